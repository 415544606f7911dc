"""Turns an instance spec into a running ring: solve, reserve at all members, bring up."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence

import msgspec
from msgspec.structs import replace

from exo_mesh.base.clock import monotonic
from exo_mesh.base.printable import counted
from exo_mesh.base.telemetry.metrics import Metrics
from exo_mesh.domain.device import PeerInfo
from exo_mesh.domain.model import ModelCard
from exo_mesh.domain.peer_names import told_apart
from exo_mesh.domain.plan import Ballot, Plan, Seat
from exo_mesh.domain.runner_limits import RunnerLimits
from exo_mesh.domain.stage import ReserveAnswer
from exo_mesh.domain.view import InstanceInfo, InstanceState
from exo_mesh.errors import (
    CrashLoopError,
    DeadlineError,
    EngineError,
    FetchError,
    InputError,
    MeshError,
    PlacementError,
    ReservationError,
    StageLostError,
    TransportError,
    code_of,
)
from exo_mesh.mesh.membership.service import Membership
from exo_mesh.rings.placing.candidate_pool import CandidatePool
from exo_mesh.rings.placing.group_facts import GroupKnowledge, times_of
from exo_mesh.rings.placing.members import Members
from exo_mesh.rings.placing.planner import Planner
from exo_mesh.rings.placing.refused_stages import BallotBeatenError, RefusedStages, StageFailedError
from exo_mesh.rings.placing.retryable import FIGURES_S
from exo_mesh.rings.placing.ring_monitor import OnProgress, RingMonitor
from exo_mesh.rings.placing.ring_use import RingUse
from exo_mesh.rings.placing.spec import InstanceSpec
from exo_mesh.rings.placing.stage_phases import StagePhase
from exo_mesh.rings.placing.tensor_groups import wirings

CHUNK_TOKENS = 512
"""Tokens of a prefill chunk, with which a runner measures its group (PREFILL_CHUNK of exo_mesh/rings/runner)."""

MAX_GROUP_FAILURES = 4
"""Tensor groups, of any peers, that may fail to form in one placement before all peers become pipeline stages."""

MAX_SOLVES = 8
"""Rounds of solving. Each refusal lowers the memory counted for a peer, so more rounds than this mean that memory keeps
changing during the placement."""

_log = logging.getLogger(__name__)


class Reserved(msgspec.Struct, frozen=True):
    """A plan for which every member has reserved memory, and the endpoints of each rank's collectives. avoided: peers
    that were left out because their runners had crashed or got stuck. note: why the plan differs from what a user might
    expect."""

    plan: Plan
    collectives: Mapping[Seat, str]
    avoided: Sequence[str]
    note: str = ""


class Placer:
    """Brings up the plans of this node. Does not know which instances exist."""

    def __init__(
        self,
        planner: Planner,
        membership: Membership,
        members: Members,
        metrics: Metrics,
        pool: CandidatePool,
        runner_limits: RunnerLimits,
        groups: GroupKnowledge,
        use: RingUse,
    ) -> None:
        self._planner = planner
        self._membership = membership
        self._members = members
        self._metrics = metrics
        self._pool = pool
        self._runner_limits = runner_limits
        self._groups = groups
        self._use = use
        self._rising: dict[str, RingMonitor] = {}

    async def place(
        self, card: ModelCard, spec: InstanceSpec, instance_id: str, above: Ballot, on_progress: OnProgress
    ) -> tuple[RingMonitor, InstanceInfo]:
        """Place a model. Returns a ready ring with a ballot above `above` and the record to publish for it.

        A tensor group that fails to form is retried once with other ports and new processes; then its members become
        pipeline stages. Raises PlacementError, BallotBeatenError, CrashLoopError, QuarantinedError, or the failure of a
        stage; nothing of the plan remains then.
        """
        failures = 0
        unfetched: FetchError | None = None
        give_up_at = asyncio.get_running_loop().time() + FIGURES_S
        while True:
            silent = self._pool.without_figures(card, spec)
            try:
                reserved = await self._reserve(card, spec, instance_id, above)
            except InputError:  # a pinned peer may only be missing because its figures have not arrived
                if spec.pins and await self._hear_figures(card, spec, give_up_at, silent):
                    continue
                raise
            except PlacementError as exc:
                if unfetched is not None:  # more informative than the refusal of the other peers
                    raise unfetched from None
                if await self._hear_figures(card, spec, give_up_at, silent):
                    continue
                raise await self._planner.judge(card, spec, exc) from exc
            plan, began = reserved.plan, monotonic()
            _log.info("placing %s: %s by ballot %s", instance_id, self._summary(plan), plan.ballot)
            if reserved.note:
                _log.warning("%s: %s", instance_id, reserved.note)
            wired = wirings(plan, reserved.collectives)
            monitor = RingMonitor(plan, self._members, self._use, on_progress, self._runner_limits, wirings=wired)
            try:
                instance = await self._bring_up(monitor)
            except FetchError as exc:
                spec, unfetched, above = _without_lost(spec, monitor, exc), exc, plan.ballot
                _log.warning("%s: %s; placing it without that peer", instance_id, exc)
                continue
            except MeshError as exc:
                if not self._groups.note_failure(plan, monitor.lost_seat, exc):
                    self._give_up_if_hopeless(reserved, exc)
                    if isinstance(exc, EngineError):
                        raise StageFailedError(str(exc)) from exc
                    raise
                _log.warning("%s: a tensor group of ballot %s failed to form: %s", instance_id, plan.ballot, exc)
                above, failures = plan.ballot, failures + 1
                if failures == MAX_GROUP_FAILURES:
                    spec = self._groups.as_pipeline(spec, plan)
                continue
            times = times_of(card, plan, monitor.figures, self._planner.hop_of(plan), CHUNK_TOKENS)
            if not self._groups.note_success(card, spec, plan, times):
                await monitor.release()
                self._membership.put_instance(instance_id, None)
                above = plan.ballot
                continue
            self._metrics.placed(plan.model, "ready")
            _log.info("placed %s: %s in %.1f s", instance_id, self._summary(plan), monotonic() - began)
            return monitor, replace(instance, reason=reserved.note)

    def _summary(self, plan: Plan) -> str:
        """The model, peers and layers of a plan, for the log."""
        names = told_apart((peer.id, peer.name) for peer in self._membership.view.peers())
        parts = [
            f"{'+'.join(names.get(one, one[:8]) for one in stage.peers)} {stage.shard.start}-{stage.shard.stop}"
            for stage in plan.stages
        ]
        over = counted(len(plan.member_ids), "peer")
        return f"{plan.model} over {over} (layers {', '.join(parts)}), context of {plan.context_limit} tokens"

    async def _bring_up(self, monitor: RingMonitor) -> InstanceInfo:
        """Bring up a ring; its record is "loading" until it is up. Raises the failure of a stage; nothing of the plan
        remains then."""
        instance_id = monitor.plan.instance_id
        self._membership.put_instance(instance_id, InstanceInfo(monitor.plan, InstanceState.LOADING))
        try:
            self._rising[instance_id] = monitor
            return await monitor.bring_up()
        except BaseException as exc:
            self._metrics.placed(monitor.plan.model, code_of(exc))
            try:
                await monitor.release()  # may be cancelled again: two peers may delete at once
            finally:
                self._membership.put_instance(instance_id, None)
            raise
        finally:
            self._rising.pop(instance_id, None)

    def phases(self, instance_id: str) -> Sequence[StagePhase]:
        """The phase of each stage of an instance that this node is bringing up; () for other instances."""
        monitor = self._rising.get(instance_id)
        return () if monitor is None else monitor.phases

    def _give_up_if_hopeless(self, reserved: Reserved, error: MeshError) -> None:
        """Raise CrashLoopError for a model that crashed on one peer until that peer refused it and then crashed on
        others: it will not succeed on the next peers. Does nothing if members are gone, because that explains the
        failure."""
        crashed = isinstance(error, StageLostError | EngineError | DeadlineError)
        if crashed and reserved.avoided and all(map(self._membership.is_alive, reserved.plan.member_ids)):
            raise CrashLoopError(f"{error}; earlier refusals: " + "; ".join(reserved.avoided)) from error

    async def _reserve(self, card: ModelCard, spec: InstanceSpec, instance_id: str, above: Ballot) -> Reserved:
        """A plan for which all members hold memory; each refusal is taken into account in the next round.

        Raises PlacementError, BallotBeatenError, or that of RefusedStages.nobody_left.
        """
        refused = RefusedStages()
        ballot = above.next_for(self._membership.own.id)
        for _ in range(MAX_SOLVES):
            able = replace(spec, exclude_peers=(*spec.exclude_peers, *refused.unable))
            try:
                plan = await self._planner.propose(
                    card, able, instance_id, ballot, refused.usable_bytes, hopeless=refused.is_hopeless
                )
                if self._groups.is_unfit(plan):  # although the spec requests it
                    spec = self._groups.as_pipeline(able, plan)
                    plan = await self._planner.propose(card, spec, instance_id, ballot, refused.usable_bytes)
            except PlacementError as exc:
                self._metrics.placed(card.name, exc.code)
                raise self._no_plan(card, able, refused, exc) from exc
            asked = await asyncio.gather(*(self._ask(plan, seat) for seat in plan.seats))
            answers = dict(zip(plan.seats, asked, strict=True))
            granted = {seat: a.collective for seat, a in answers.items() if isinstance(a, ReserveAnswer) and a.granted}
            if len(granted) == len(answers):
                return Reserved(plan, granted, refused.avoided, self._groups.demotion_of(plan, spec))
            await self._members.release(plan.instance_id, plan.ballot, plan.member_ids)
            for seat, answer in answers.items():
                if seat not in granted:
                    self._require_unbeaten(card, seat, answer)
                    reason = refused.note(seat, answer)
                    _log.info("%s: peer %s refused: %s", instance_id, seat.peer_id[:8], reason)
        last = "; ".join(refused.texts[-3:])
        raise PlacementError(f"{card.name}: members refused {MAX_SOLVES} plans in a row; {last}")

    def _require_unbeaten(self, card: ModelCard, seat: Seat, answer: ReserveAnswer | ReservationError) -> None:
        if isinstance(answer, ReserveAnswer) and answer.beaten_by is not None:
            self._metrics.placed(card.name, "ballot_beaten")
            raise BallotBeatenError(answer.reason, peer_id=seat.peer_id, ballot=answer.beaten_by)

    def _no_plan(self, card: ModelCard, able: InstanceSpec, refused: RefusedStages, exc: PlacementError) -> MeshError:
        """The error when no plan is left for a model, including what peers have refused."""
        if refused.unable and not self._planner.candidates(card, able, may_fetch=not refused.is_hopeless):
            return refused.nobody_left(card)
        return refused.added_to(exc)

    async def _ask(self, plan: Plan, seat: Seat) -> ReserveAnswer | ReservationError:
        """One member's answer, or the reason why it can never run its stage. An unreachable member counts as having no
        memory."""
        try:
            return await self._members.member(seat.peer_id).reserve(plan, seat.stage)
        except (TransportError, DeadlineError) as exc:
            return ReserveAnswer(False, 0, str(exc))
        except ReservationError as exc:
            return exc

    async def _hear_figures(
        self, card: ModelCard, spec: InstanceSpec, give_up_at: float, silent: Sequence[PeerInfo]
    ) -> bool:
        """Wait for the telemetry of peers that could take part; True as soon as some of it has arrived. silent: the
        peers without telemetry when the plan was solved."""
        missing = self._pool.without_figures(card, spec)
        if missing != silent:
            return asyncio.get_running_loop().time() < give_up_at
        while missing and asyncio.get_running_loop().time() < give_up_at:
            await self._membership.changed.wait(0.2)
            if self._pool.without_figures(card, spec) != missing:
                return True
        return False


def _without_lost(spec: InstanceSpec, monitor: RingMonitor, error: FetchError) -> InstanceSpec:
    """The spec without the peer that could not get its files, for a ring of the same width. Raises `error` if that peer
    was already left out, or if the spec pins peers."""
    seat = monitor.lost_seat
    if seat is None or seat.peer_id in spec.exclude_peers or spec.pins:
        raise error
    width = len(monitor.plan.member_ids)
    return replace(spec, exclude_peers=(*spec.exclude_peers, seat.peer_id), min_peers=max(width, spec.min_peers or 1))
