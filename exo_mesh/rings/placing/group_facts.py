"""What this node knows about tensor groups: RDMA links between peers, engines that can split a model, and groups that
failed."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from msgspec.structs import replace

from exo_mesh.base.clock import Clock, monotonic
from exo_mesh.domain.device import PeerInfo
from exo_mesh.domain.group_placement import GroupTimes, as_pipeline, group_verdict, groups_of
from exo_mesh.domain.grouping import GroupFacts, GroupWish, WishedBackend
from exo_mesh.domain.model import ModelCard
from exo_mesh.domain.plan import Plan, Seat
from exo_mesh.domain.rdma_links import queue_pairs_left, rdma_devices, static_groups
from exo_mesh.domain.ring_candidates import Candidate
from exo_mesh.domain.tensor_group import GroupBackend, GroupFigures, TensorGroup
from exo_mesh.engine.contract import Groupable
from exo_mesh.engine.registry import Registry
from exo_mesh.errors import MeshError, ModelError
from exo_mesh.rings.placing.spec import InstanceSpec
from exo_mesh.rings.placing.tensor_groups import MAX_SETS, GroupTroubles
from exo_mesh.settings.config import Settings
from exo_mesh.weights.model_files import read_json

_log = logging.getLogger(__name__)

WIDEST_BYTES = 4
"""Bytes per element of the activations: float32, the widest type and so the worst case for a tensor group."""

WITHOUT_RDMA = (
    "over TCP, which is slower: no RDMA link is up between them, which takes Thunderbolt 5 cables and macOS 26.2 or "
    "newer on each; exo-mesh doctor rdma says what is missing"
)
"""Explains in the placement note why a tensor group communicates over TCP although nobody requested TCP."""

_FINAL = frozenset({ModelError.code})
"""Failures of a rank that are not caused by its tensor group: a pipeline stage would fail in the same way."""


class GroupKnowledge:
    """Decides whether tensor groups may be formed, and remembers how past groups performed.

    peers: the live peers, including this node. plans: the plans in force. text_files: returns a directory that holds a
    model's config.json.
    """

    def __init__(
        self,
        settings: Settings,
        registry: Registry,
        peers: Callable[[], Sequence[PeerInfo]],
        plans: Callable[[], Iterable[Plan]],
        text_files: Callable[[str], Awaitable[Path]],
        clock: Clock = monotonic,
    ) -> None:
        self._settings = settings
        self._registry = registry
        self._peers = peers
        self._plans = plans
        self._text_files = text_files
        self._clock = clock
        self._troubles = GroupTroubles()
        self._verdicts: dict[tuple[str, frozenset[str]], str] = {}

    def wish(self, spec: InstanceSpec, candidates: Sequence[Candidate]) -> GroupWish:
        """The requested grouping; without one, the groups of a hostfile whose ranks can all take part."""
        wish = spec.group_wish(self._settings)
        if wish.size is not None or wish.members:
            return wish
        able = {candidate.peer_id for candidate in candidates}
        groups = [ranks for ranks in static_groups(self._peers()) if able.issuperset(peer.id for peer in ranks)]
        if not groups:
            return wish
        members = tuple(tuple(peer.id for peer in ranks) for ranks in groups)
        return replace(wish, members=members, backend=_backend_of(groups[0][0], wish.backend))

    async def facts(self, card: ModelCard, spec: InstanceSpec, *, num_candidates: int) -> GroupFacts:
        """The facts that placement needs about groups. Reads no file when neither the model nor the spec can use
        groups.

        Raises ModelError, or the error of asking a peer, if a group was requested and the model's config cannot be
        read.
        """
        peers = self._peers()
        rdma = rdma_devices(peers)
        wish = spec.group_wish(self._settings)
        pinned = any(pin.group for pin in spec.pins)
        static = any(peer.static_rank for peer in peers)
        wanted = wish.is_forced or pinned or static or (wish.size != 1 and (rdma or wish.backend == "ring"))
        if not wanted or num_candidates < 2:
            return GroupFacts()
        try:
            config = await self._config(card.name)
        except MeshError as exc:
            if wish.is_forced or pinned:
                raise
            _log.info("no tensor group for %s: %s", card.name, exc)
            return GroupFacts()
        formed = [group for plan in self._plans() for group in groups_of(plan)]
        return GroupFacts(
            rdma,
            lambda engine, size: self._obstacle(engine, config, size),
            self._unfit(),
            tcp_fallback=not self._settings.secret,  # collectives over TCP are not encrypted
            queue_pairs=queue_pairs_left(peers, formed),
        )

    async def _config(self, name: str) -> Mapping[str, Any]:
        """The config.json of a model. Raises ModelError if it cannot be read."""
        file = await self._text_files(name) / "config.json"
        return await asyncio.to_thread(read_json, file)

    def _obstacle(self, engine: str, config: Mapping[str, Any], size: int) -> str:
        try:
            provider = self._registry.provider(engine)
        except MeshError as exc:
            return str(exc)
        if not isinstance(provider, Groupable):
            return f"engine {engine} cannot form tensor groups"
        return provider.group_obstacle(config, size)

    # Groups that failed to form.

    def note_failure(self, plan: Plan, lost: Seat | None, error: MeshError) -> bool:
        """Record that bringing up the plan failed. Returns True if a tensor group caused it, so another plan is worth
        trying."""
        group = _at_fault(plan, lost)
        if group is None or error.code in _FINAL:
            return False
        self._troubles.note(group, str(error), self._clock())
        return True

    def note_success(self, card: ModelCard, spec: InstanceSpec, plan: Plan, measured: Mapping[int, GroupTimes]) -> bool:
        """Record that the plan is running. Returns False if nobody asked for a group and the measured times favour
        pipeline stages."""
        wish = spec.group_wish(self._settings)
        asked = wish.is_forced or wish.backend != "auto" or any(pin.group for pin in spec.pins)
        keep = True
        for index, group in ((i, stage.group) for i, stage in enumerate(plan.stages) if stage.group is not None):
            self._troubles.forget(group)
            if index not in measured:
                continue
            verdict = group_verdict(measured[index])
            _log.info("%s: %s is %s", plan.instance_id, "+".join(p[:8] for p in group.peers), verdict.reason)
            self._verdicts[(card.digest, frozenset(group.peers))] = verdict.reason
            if not verdict.group and not asked and not any(peer.static_rank for peer in self._peers()):
                self._troubles.refuse(group, verdict.reason, self._clock())
                keep = False
        while len(self._verdicts) > MAX_SETS:
            del self._verdicts[next(iter(self._verdicts))]
        return keep

    def is_unfit(self, plan: Plan) -> bool:
        """Whether a group of the plan has failed MAX_FAILURES times within FORGET_S."""
        failed = self._troubles.failed(self._clock())
        return any(frozenset(group.peers) in failed for group in groups_of(plan))

    def as_pipeline(self, spec: InstanceSpec, plan: Plan) -> InstanceSpec:
        """The spec changed so that the peers of the plan become pipeline stages."""
        wish, min_peers = as_pipeline(spec.group_wish(self._settings), plan, spec.min_peers or 1)
        return replace(spec, tensor_group=wish.size, groups=(), pins=(), min_peers=min_peers)

    def note_of(self, plan: Plan, spec: InstanceSpec) -> str:
        """Why peers of the plan do not form a group, or the measurements of the groups that they form; "" if there is
        nothing to say."""
        notes = [reason for peers, reason in self._measured(plan)]
        return "; ".join([*notes, *self._demotions(plan), *self._over_tcp(plan, spec)])

    def demotion_of(self, plan: Plan, spec: InstanceSpec) -> str:
        """Why peers of the plan do not form a group, or form one without RDMA; "" if there is no such reason."""
        return "; ".join([*self._demotions(plan), *self._over_tcp(plan, spec)])

    def _over_tcp(self, plan: Plan, spec: InstanceSpec) -> list[str]:
        """One sentence for each group that communicates over TCP although nobody requested TCP."""
        wished = {frozenset(pin.group): pin.group_backend for pin in spec.pins if pin.group}
        peers = {peer.id: peer for peer in self._peers()}
        notes = []
        for group in groups_of(plan):
            default = spec.group_wish(self._settings).backend
            if (leader := peers.get(group.peers[0])) is not None:
                default = _backend_of(leader, default)
            if group.backend == "ring" and wished.get(frozenset(group.peers), default) != "ring":
                names = " and ".join(peers[one].name if one in peers else one[:8] for one in group.peers)
                notes.append(f"{names} are a tensor group {WITHOUT_RDMA}")
        return notes

    def _measured(self, plan: Plan) -> list[tuple[frozenset[str], str]]:
        groups = [frozenset(group.peers) for group in groups_of(plan)]
        return [(g, self._verdicts[(plan.model_digest, g)]) for g in groups if (plan.model_digest, g) in self._verdicts]

    def _demotions(self, plan: Plan) -> list[str]:
        notes = []
        for peers, why in self._unfit().items():
            if peers <= set(plan.member_ids) and not any(peers == frozenset(g.peers) for g in groups_of(plan)):
                notes.append(f"{' and '.join(sorted(peer_id[:8] for peer_id in peers))} are pipeline stages: {why}")
        return notes

    def _unfit(self) -> dict[frozenset[str], str]:
        return self._troubles.unfit(self._clock())


def _backend_of(peer: PeerInfo, wished: WishedBackend) -> WishedBackend:
    """The backend of the hostfile, unless `wished` requests another one."""
    said = peer.static_rank.backend if peer.static_rank is not None else ""
    known = [backend for backend in get_args(GroupBackend) if backend == said]
    return known[0] if known and wished == "auto" else wished


def _at_fault(plan: Plan, lost: Seat | None) -> TensorGroup | None:
    """The group of the lost rank; if no rank was lost because the whole bring-up timed out, the first group of the
    plan."""
    if lost is not None:
        return plan.stages[lost.stage].group
    return next(iter(groups_of(plan)), None)


def times_of(
    card: ModelCard, plan: Plan, figures: Mapping[int, GroupFigures], hop_s: float, chunk_tokens: int
) -> dict[int, GroupTimes]:
    """The measured times of each tensor group, by stage; groups with incomplete measurements are left out. hop_s:
    one-way time between the peers of the ring."""
    found = {}
    for index, held in figures.items():
        check, group = held.check, plan.stages[index].group
        token_bytes = card.hidden_size * WIDEST_BYTES
        if group is not None:
            with contextlib.suppress(ValueError):  # a figure could not be measured
                found[index] = GroupTimes(
                    group.size, len(plan.stages[index].shard), check.all_reduce_s, check.reduce_bytes_per_s,
                    check.alone_layer_s, check.alone_chunk_s, chunk_tokens, token_bytes, hop_s,
                )  # fmt: skip
    return found
