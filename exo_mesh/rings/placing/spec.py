"""What a client asks of an instance: the model, and how it may be placed; and whether an instance is like that."""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec

from exo_mesh.domain.group_placement import FAILED, groups_of
from exo_mesh.domain.grouping import GroupWish, WishedBackend
from exo_mesh.domain.pinning import Pin
from exo_mesh.domain.plan import Plan
from exo_mesh.domain.view import InstanceInfo
from exo_mesh.settings.config import Settings


class InstanceSpec(msgspec.Struct, frozen=True):
    """A requested instance. None for policy and min_peers means the node's own settings.

    exclude_peers, pins: peers by id or name. Pins fix the layers of each peer, so policy and min_peers are ignored.
    engine: the engine of every stage. engine_preference: engines or tags (`torch`, `mlx-metal`) that peers should
    prefer to their own choice, in this order. mixed_rings: whether stages may use several engines, one of
    `domain.rings.MIXING`; None means the node's own setting. tensor_group: 1 for no tensor group, N for at least one of
    N peers. groups: the peers of each group, by id or name, the leader first. group_backend: how their ranks
    communicate. is_auto: nobody asked for the instance; it is placed because the requests of its model have to wait.
    Open fields use the node's own settings.
    """

    model: str
    min_peers: int | None = None
    policy: str | None = None
    context_limit: int | None = None
    engine: str | None = None
    exclude_peers: tuple[str, ...] = ()
    pins: tuple[Pin, ...] = ()
    engine_preference: tuple[str, ...] = ()
    mixed_rings: str | None = None
    tensor_group: int | None = None
    groups: tuple[tuple[str, ...], ...] = ()
    group_backend: WishedBackend | None = None
    is_auto: bool = False

    def group_wish(self, settings: Settings) -> GroupWish:
        """The requested grouping, with open fields taken from the settings."""
        size = self.tensor_group if self.tensor_group or self.groups else settings.tensor_group or None
        return GroupWish(size, self.groups, self.group_backend or settings.group_backend)


def replica_id(model: str, replica: int) -> str:
    """The instance id of a replica, `org--name-1`. It is equal on every peer, so two peers that place a model at the
    same time create one instance."""
    slug = re.sub(r"[^A-Za-z0-9._]+", "-", model.replace("/", "--")).strip("-")
    return f"{slug[-80:]}-{replica}"


def is_replica(instance_id: str, model: str) -> bool:
    """Whether it is the instance id of a replica of the model."""
    replica = instance_id.rpartition("-")[2]
    return replica.isdecimal() and instance_id == replica_id(model, int(replica))


_MIXED = {None: (False, True), "auto": (False, True), "never": (False,), "always": (True,)}
"""Allowed values of "the plan uses several engines", by the `mixed_rings` value of the spec."""


def suits(instance: InstanceInfo, spec: InstanceSpec) -> bool:
    """Whether an instance matches a spec. A field that the spec leaves open matches any value."""
    plan = instance.plan
    return (
        plan.model == spec.model
        and len(plan.member_ids) >= (spec.min_peers or 1)
        and plan.context_limit >= (spec.context_limit or 0)
        and all(spec.engine in (None, stage.engine) for stage in plan.stages)
        and (len(plan.engines) > 1) in _MIXED[spec.mixed_rings]
        and not set(spec.exclude_peers) & set(plan.member_ids)
        and (not spec.pins or _as_pinned(plan, spec.pins))
        and (FAILED in instance.reason or _as_grouped(plan, spec))
    )


def _as_pinned(plan: Plan, pins: Sequence[Pin]) -> bool:
    ordered = sorted(pins, key=lambda pin: pin.start)
    held = [(stage.peers, stage.shard.start, stage.shard.stop) for stage in plan.stages]
    return held == [(pin.group or (pin.peer_id,), pin.start, pin.stop) for pin in ordered] and all(
        pin.engine in (None, stage.engine) for pin, stage in zip(ordered, plan.stages, strict=True)
    )


def _as_grouped(plan: Plan, spec: InstanceSpec) -> bool:
    groups = groups_of(plan)
    if spec.groups:
        return {group.peers for group in groups} >= set(spec.groups)
    return spec.tensor_group is None or max((group.size for group in groups), default=1) == spec.tensor_group
