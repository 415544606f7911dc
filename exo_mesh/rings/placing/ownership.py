"""Decides who owns a ring after deaths and partitions, and which stages are orphans. Pure.

When an owner dies or seems to die, the lowest-id member adopts its ready rings, each by a higher ballot. After a
partition or a false verdict an instance may therefore have two owners: the one with the lower ballot yields. A stage is
an orphan if no record names its ballot, it does not work for a request, and no living owner follows its reports. A
stage in use is no orphan, whatever the membership says of its owner: a verdict of the membership ends no healthy ring.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from enum import Enum

from exo_mesh.domain.plan import Ballot, Plan
from exo_mesh.domain.view import InstanceInfo, InstanceState

ORPHAN_S = 10.0
"""How long a stage may have no owner before it ends; its ring may be healthy meanwhile and may still be adopted."""


def adopter(instance: InstanceInfo, is_alive: Callable[[str], bool]) -> str | None:
    """The peer that adopts a ring whose owner is gone: its lowest-id member, if all members live and it is ready."""
    if instance.state is not InstanceState.READY or not all(is_alive(one) for one in instance.plan.member_ids):
        return None
    return min(instance.plan.member_ids)


def surviving_heir(instance: InstanceInfo, is_alive: Callable[[str], bool]) -> str | None:
    """The peer that recovers a ring whose owner and other members are gone: its lowest-id live member."""
    if instance.state is not InstanceState.READY:
        return None
    return min((peer_id for peer_id in instance.plan.member_ids if is_alive(peer_id)), default=None)


class Claim(Enum):
    """What an owner does with its ring, given what other peers own."""

    KEEP = "keep"
    HAND_OVER = "hand over"  # the same plan has another owner: stop watching; the stages keep running
    END = "end"  # a higher plan is ready: end the stages of this one


def claim(own_id: str, plan: Plan, ballot: Ballot, others: Iterable[tuple[str, InstanceInfo]]) -> Claim:
    """Decide what this node does with a plan that it holds by `ballot`. others: (owner, instance) of all records. The
    ready record with the highest (ballot, owner) wins, as in View.instances."""
    ready = [
        (one.ballot, owner, one.plan.ballot)
        for owner, one in others
        if one.plan.instance_id == plan.instance_id and one.state is InstanceState.READY and owner != own_id
    ]
    highest = max(ready, default=None)
    if highest is None or highest[:2] < (ballot, own_id):
        return Claim.KEEP
    return Claim.HAND_OVER if highest[2] == plan.ballot else Claim.END


class Orphans:
    """Remembers since when each committed stage here has had no owner."""

    def __init__(self) -> None:
        self._since: dict[tuple[str, Ballot], float] = {}

    def due(
        self, stages: Mapping[tuple[str, Ballot], bool], instances: Iterable[InstanceInfo], now: float
    ) -> list[tuple[str, Ballot]]:
        """The stages to end now. stages: (instance id, ballot in force) of each, and whether it is in use or an owner
        follows its reports.

        A stage whose instance is ready by a higher ballot can no longer be adopted and ends at once, because its
        requests wait for that.
        """
        known = list(instances)
        owned = {(one.plan.instance_id, one.ballot) for one in known}
        alone = [stage for stage, followed in stages.items() if not followed and stage not in owned]
        self._since = {stage: self._since.get(stage, now) for stage in alone}
        lost = {(name, ballot) for name, ballot, _ in beaten(alone, known)}
        return [stage for stage, since in self._since.items() if stage in lost or now - since >= ORPHAN_S]


def beaten(stages: Iterable[tuple[str, Ballot]], instances: Iterable[InstanceInfo]) -> list[tuple[str, Ballot, Ballot]]:
    """The stages whose instance is ready by a higher ballot, each with that ballot. A node must free them before it
    refutes its death."""
    highest: dict[str, Ballot] = {}
    for one in instances:
        if one.state is InstanceState.READY:
            instance_id = one.plan.instance_id
            highest[instance_id] = max(one.ballot, highest.get(instance_id, one.ballot))
    return [(name, ballot, highest[name]) for name, ballot in stages if highest.get(name, ballot) > ballot]
