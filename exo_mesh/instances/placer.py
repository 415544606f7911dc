"""Turns an instance spec into a running ring: solve, reserve at all members, bring up."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Any

from exo_mesh.clock import monotonic
from exo_mesh.domain.device import PeerInfo
from exo_mesh.domain.footprint import POOL_TOKENS
from exo_mesh.domain.group_placement import pinned_groups, place_grouped
from exo_mesh.domain.grouping import GroupFacts
from exo_mesh.domain.model import ModelCard
from exo_mesh.domain.pinning import solve_pinned
from exo_mesh.domain.placement import (
    Candidate,
    Surroundings,
    most_context,
    solve,
    solve_with_most_context,
    with_caps,
)
from exo_mesh.domain.plan import NO_BALLOT, Ballot, Plan, Seat
from exo_mesh.domain.rings import DEFAULT_HOP_S, by_tier, without
from exo_mesh.domain.runner_limits import RunnerLimits
from exo_mesh.domain.speed.engine_speed import Prediction, predict, speed_of
from exo_mesh.domain.stage import ReserveAnswer
from exo_mesh.domain.view import InstanceInfo, InstanceState
from exo_mesh.domain.whole.served import SERVED_ARCHITECTURE
from exo_mesh.errors import (
    CrashLoopError,
    DeadlineError,
    EngineError,
    FetchError,
    InputError,
    MeshError,
    ModelError,
    PlacementError,
    QuarantinedError,
    ReservationError,
    StageLostError,
    TransportError,
)
from exo_mesh.instances.candidate_pool import CandidatePool
from exo_mesh.instances.group_facts import GroupKnowledge, times_of
from exo_mesh.instances.members import Members
from exo_mesh.instances.outlook import FIGURES_S, finds_plan, judged, memory_in_use
from exo_mesh.instances.ring_monitor import OnProgress, RingMonitor, release_all
from exo_mesh.instances.spec import InstanceSpec
from exo_mesh.instances.stage_phases import StagePhase
from exo_mesh.instances.tensor_groups import wirings
from exo_mesh.membership.service import Membership
from exo_mesh.models.mixing import Mixing
from exo_mesh.models.surveys import Surveys, as_held
from exo_mesh.settings.effective import EffectiveSettings
from exo_mesh.telemetry.metrics import Metrics

CHUNK_TOKENS = 512
"""Tokens of a prefill chunk, with which a runner measures its group (PREFILL_CHUNK of exo_mesh/runner)."""

MAX_GROUP_FAILURES = 4
"""Tensor groups, of any peers, that may fail to form in one placement before all peers become pipeline stages."""

MAX_SOLVES = 8
"""Rounds of solving. Each refusal lowers the memory counted for a peer, so more rounds than this mean that memory keeps
changing during the placement."""

_log = logging.getLogger(__name__)


class BallotBeatenError(ReservationError):
    """A member has promised another plan of this instance; `ballot` is the ballot of that plan."""

    def __init__(self, message: str, *, peer_id: str, ballot: Ballot) -> None:
        super().__init__(message, peer_id=peer_id)
        self.ballot = ballot


class StageFailedError(EngineError):
    """An engine failed while loading its stage; the peer counts such failures and refuses the stage after too many."""


@dataclass(frozen=True, slots=True)
class Reserved:
    """A plan for which every member has reserved memory, and the endpoints of each rank's collectives. avoided: peers
    that were left out because their runners had crashed or got stuck. note: why the plan differs from what a user might
    expect."""

    plan: Plan
    collectives: Mapping[Seat, str]
    avoided: Sequence[str]
    note: str = ""


@dataclass(slots=True)
class _Refused:
    """What peers have refused during one placement. usable_bytes: the memory a peer can give, by peer id, if memory was
    the reason. unable: peers that can never run their stage. texts: the refusals in order, for people."""

    usable_bytes: dict[str, int] = field(default_factory=dict)
    unable: dict[str, ReservationError] = field(default_factory=dict)
    texts: list[str] = field(default_factory=list)

    @property
    def is_hopeless(self) -> bool:
        """Whether the model has crashed or is quarantined on some peer."""
        return any(refusal.why for refusal in self.unable.values())

    @property
    def avoided(self) -> list[str]:
        """The peers that were left out because the model has crashed there, with the reasons."""
        return [f"{peer_id[:8]}: {refusal}" for peer_id, refusal in self.unable.items() if refusal.why]

    def note(self, seat: Seat, answer: ReserveAnswer | ReservationError) -> str:
        """Record a refusal and return its reason."""
        if isinstance(answer, ReservationError):
            self.unable[seat.peer_id], reason = answer, str(answer)
        else:
            self.usable_bytes[seat.peer_id], reason = answer.usable_bytes, answer.reason
        self.texts.append(f"{seat.peer_id[:8]} refused: {reason}")
        return reason


class Placer:
    """Makes this node's plans and brings them up. Does not know which instances exist."""

    def __init__(
        self,
        effective: EffectiveSettings,
        membership: Membership,
        members: Members,
        surveys: Surveys,
        mixing: Mixing,
        metrics: Metrics,
        pool: CandidatePool,
        runner_limits: RunnerLimits,
        groups: GroupKnowledge,
    ) -> None:
        self._effective = effective
        self._membership = membership
        self._members = members
        self._surveys = surveys
        self._mixing = mixing
        self._metrics = metrics
        self._pool = pool
        self._runner_limits = runner_limits
        self._groups = groups
        self._rising: dict[str, RingMonitor] = {}

    async def propose(
        self,
        card: ModelCard,
        spec: InstanceSpec,
        instance_id: str = "preview",
        ballot: Ballot | None = None,
        caps: Mapping[str, int] | None = None,
        *,
        hopeless: bool = False,
    ) -> Plan:
        """The plan that this node would propose now. Raises PlacementError with the arithmetic.

        Peers that would first have to fetch files take part only if the peers that have the files cannot run the model
        alone, and never after the model has crashed (`hopeless`); peers of a higher tier only if the others cannot run
        it alone. Only the engines that a plan would use are asked about the model and compared with each other.
        """
        ballot = ballot or NO_BALLOT.next_for(self._membership.own.id)
        holders = with_caps(self.candidates(card, spec), caps or {})
        everybody = with_caps(self.candidates(card, spec, may_fetch=True), caps or {})
        pools = [*by_tier(holders)] or [holders]
        if not hopeless and len(everybody) > len(holders):
            pools += by_tier(everybody)
        for pool in pools[:-1]:
            try:
                return await self._propose(card, spec, instance_id, ballot, pool)
            except (PlacementError, ModelError, InputError) as exc:
                _log.debug("%s: the most wanted peers cannot run it: %s", instance_id, exc)
        try:
            return await self._propose(card, spec, instance_id, ballot, pools[-1])
        except PlacementError as exc:
            raise self.naming_left_out(card, exc) from exc

    def naming_left_out(self, card: ModelCard, refusal: PlacementError) -> PlacementError:
        """The refusal with the peers that may not hold layers of the model, and what to do about them."""
        left_out = "; ".join(self._pool.left_out(card))
        if not left_out:
            return refusal
        remedy = refusal.remedy
        if refusal.reason in ("no_candidates", "too_few_peers"):
            remedy = f"start another peer, or one of these with other settings: {left_out}"
        return PlacementError(
            f"{refusal}; left out: {left_out}",
            reason=refusal.reason,
            need_bytes=refusal.need_bytes,
            have=refusal.have,
            remedy=remedy,
        )

    async def _propose(
        self, card: ModelCard, spec: InstanceSpec, instance_id: str, ballot: Ballot, candidates: list[Candidate]
    ) -> Plan:
        around = Surroundings(hop_s=self._hops(), even=self._effective.now.proportional_layers == "off")
        facts = await self._groups.facts(card, spec, num_candidates=len(candidates))
        while True:
            plan = await asyncio.to_thread(self._solve, card, spec, candidates, instance_id, ballot, around, facts)
            unseen = [engine for engine in plan.engines if engine not in around.cards]
            if unseen:
                around, candidates = await self._look(card, candidates, unseen, around)
                continue
            if len(plan.engines) == 1:
                return plan
            outcome = await self._mixing.of(card, ring_of(plan, candidates))
            if not outcome.unmixable:
                return replace(plan, activation_dtype=outcome.activation_dtype)
            around = replace(around, unmixable={**around.unmixable, **outcome.unmixable})

    async def held(self, card: ModelCard, engine: str) -> ModelCard:
        """The model as an engine holds it, which may differ from its files. Raises ModelError if the engine cannot run
        it."""
        return as_held(card, await self._surveys.of(card, engine))

    async def _look(
        self, card: ModelCard, candidates: list[Candidate], engines: Sequence[str], around: Surroundings
    ) -> tuple[Surroundings, list[Candidate]]:
        """Ask these engines about the model. Returns the extended surroundings and the candidates without engines that
        cannot run the model.

        Raises ModelError if no candidate is left.
        """
        cards = dict(around.cards)
        for engine in engines:
            try:
                cards[engine] = await self.held(card, engine)
            except ModelError as exc:
                _log.info("%s cannot run %s: %s", engine, card.name, exc)
                candidates = [able for one in candidates if (able := without(one, engine)) is not None]
                if not candidates:
                    raise ModelError(f"no peer can run {card.name} ({card.architecture}): {engine}: {exc}") from exc
        return replace(around, cards=cards), candidates

    def note_of(self, plan: Plan, spec: InstanceSpec) -> str:
        """What is known of the plan's tensor groups, or why it has none where one might be expected; "" if nothing."""
        return self._groups.note_of(plan, spec)

    def context_for(self, spec: InstanceSpec) -> int:
        """Smallest context, in tokens, that a placement for this spec needs."""
        return spec.context_limit or self._effective.now.context_limit or POOL_TOKENS

    def _solve(
        self,
        card: ModelCard,
        spec: InstanceSpec,
        candidates: Sequence[Candidate],
        instance_id: str,
        ballot: Ballot,
        around: Surroundings,
        facts: GroupFacts,
    ) -> Plan:
        policy = spec.policy or self._effective.now.placement
        is_served = card.architecture == SERVED_ARCHITECTURE
        min_peers = spec.min_peers or (1 if is_served else self._effective.now.min_peers)
        if (spec.context_limit or 0) > card.context_length:
            raise InputError(
                f"context_limit is {spec.context_limit}, but {card.name} supports at most {card.context_length} tokens",
                param="context_limit",
            )
        shared: dict[str, Any] = {
            "instance_id": instance_id,
            "ballot": ballot,
            "around": around,
            "mixing": spec.mixed_rings or self._effective.now.mixed_rings,
        }
        context_limit = spec.context_limit or self._effective.now.context_limit
        if spec.pins:
            return _pinned(card, candidates, spec, facts, context_limit, shared)

        def attempt(grouped: Sequence[Candidate], min_stages: int) -> Plan:
            wide: dict[str, Any] = {**shared, "policy": policy, "min_peers": min_stages}
            if context_limit is None:
                return solve_with_most_context(self._capped(card), grouped, **wide)
            return solve(card, grouped, context_limit=min(context_limit, card.context_length), **wide)

        return place_grouped(candidates, self._groups.wish(spec, candidates), facts, min_peers, attempt)

    def _capped(self, card: ModelCard) -> ModelCard:
        """The model with the longest context that its card recommends, for an instance without a limit of its own."""
        most = self._pool.max_context(card.name)
        return card if most is None or most >= card.context_length else replace(card, context_length=most)

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
                raise await self.judge(card, spec, exc) from exc
            plan, began = reserved.plan, monotonic()
            _log.info("placing %s: %s by ballot %s", instance_id, self._summary(plan), plan.ballot)
            if reserved.note:
                _log.warning("%s: %s", instance_id, reserved.note)
            monitor = RingMonitor(
                plan, self._members, on_progress, self._runner_limits, wirings=wirings(plan, reserved.collectives)
            )
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
            times = times_of(card, plan, monitor.figures, self._hop_of(plan), CHUNK_TOKENS)
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
        names = {peer.id: peer.name for peer in self._membership.view.peers()}
        parts = [
            f"{'+'.join(names.get(one, one[:8]) for one in stage.peers)} {stage.shard.start}-{stage.shard.stop}"
            for stage in plan.stages
        ]
        over = f"{len(plan.member_ids)} peer{'s' if len(plan.member_ids) > 1 else ''}"
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
            outcome = exc.code if isinstance(exc, MeshError) else "cancelled"
            self._metrics.placed(monitor.plan.model, outcome)
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

        Raises PlacementError, BallotBeatenError, or the error that `_nobody_left` selects.
        """
        refused = _Refused()
        ballot = above.next_for(self._membership.own.id)
        for _ in range(MAX_SOLVES):
            able = replace(spec, exclude_peers=(*spec.exclude_peers, *refused.unable))
            try:
                plan = await self.propose(
                    card, able, instance_id, ballot, refused.usable_bytes, hopeless=refused.is_hopeless
                )
                if self._groups.is_unfit(plan):  # although the spec requests it
                    spec = self._groups.as_pipeline(able, plan)
                    plan = await self.propose(card, spec, instance_id, ballot, refused.usable_bytes)
            except PlacementError as exc:
                self._metrics.placed(card.name, exc.code)
                raise self._no_plan(card, able, refused, exc) from exc
            asked = await asyncio.gather(*(self._ask(plan, seat) for seat in plan.seats))
            answers = dict(zip(plan.seats, asked, strict=True))
            granted = {seat: a.collective for seat, a in answers.items() if isinstance(a, ReserveAnswer) and a.granted}
            if len(granted) == len(answers):
                return Reserved(plan, granted, refused.avoided, self._groups.demotion_of(plan, spec))
            await release_all(plan, self._members)
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

    def _no_plan(self, card: ModelCard, able: InstanceSpec, refused: _Refused, exc: PlacementError) -> MeshError:
        """The error when no plan is left for a model, including what peers have refused."""
        if refused.unable and not self.candidates(card, able, may_fetch=not refused.is_hopeless):
            why = "; ".join(refused.texts)
            return _nobody_left(refused.unable.values())(f"no peer can run {card.name} ({card.architecture}): {why}")
        return PlacementError(
            "; ".join([str(exc), *refused.texts]),
            reason=exc.reason,
            need_bytes=exc.need_bytes,
            have=exc.have,
            remedy=exc.remedy,
        )

    async def _ask(self, plan: Plan, seat: Seat) -> ReserveAnswer | ReservationError:
        """One member's answer, or the reason why it can never run its stage. An unreachable member counts as having no
        memory."""
        try:
            return await self._members.member(seat.peer_id).reserve(plan, seat.stage)
        except (TransportError, DeadlineError) as exc:
            return ReserveAnswer(False, 0, str(exc))
        except ReservationError as exc:
            return exc

    async def judge(self, card: ModelCard, spec: InstanceSpec, refusal: PlacementError) -> PlacementError:
        """Classify a refusal as permanent or temporary; see outlook.judged."""
        membership = self._membership

        async def fits(besides: Sequence[PeerInfo]) -> bool:
            ballot = NO_BALLOT.next_for(membership.own.id)
            everybody = self._pool.if_empty(card, spec, besides)
            return await finds_plan(self._propose(card, spec, "preview", ballot, everybody))

        peers = [membership.own, *(peer.info for peer in membership.peers)]
        return await judged(
            refusal,
            silent=self._pool.without_figures(card, spec),
            gone=[info for info in membership.gone if info.id not in spec.exclude_peers],
            in_use=memory_in_use(peers, membership.telemetry),
            fits=fits,
        )

    def candidates(self, card: ModelCard, spec: InstanceSpec, *, may_fetch: bool = False) -> list[Candidate]:
        """See CandidatePool.candidates."""
        spec = replace(spec, policy=spec.policy or self._effective.now.placement)
        return self._pool.candidates(card, spec, may_fetch=may_fetch)

    def prediction(self, card: ModelCard, plan: Plan) -> Prediction | None:
        """What one client can expect of a plan; None unless each peer has measured its engine with this model."""
        infos = {info.id: info for info in self._membership.view.peers()}
        stages = []
        for stage in plan.stages:
            info = infos.get(stage.peer_id)
            speed = None if info is None else speed_of(info.engine_speeds, card.digest, stage.engine)
            if speed is None or stage.group is not None:
                return None
            stages.append((speed, len(stage.shard)))
        hops = Surroundings(hop_s=self._hops()).ring_hops([stage.peer_id for stage in plan.stages])
        return predict(stages, hops.total_s)

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

    def _hops(self) -> dict[tuple[str, str], float]:
        """Seconds one way by pair of peers: half of each round trip measured here; between two other peers, the larger
        half."""
        own_id = self._membership.own.id
        halves = {peer.id: peer.rtt_ms / 2000 for peer in self._membership.peers if peer.rtt_ms is not None}
        between = {(a, b): max(halves[a], halves[b]) for a, b in combinations(sorted(halves), 2)}
        return {**between, **{(own_id, peer_id): half for peer_id, half in halves.items()}}

    def _hop_of(self, plan: Plan) -> float:
        """Seconds one way between two peers of the plan: the longest that is known."""
        hops = self._hops()
        known = [hops[pair] for pair in combinations(plan.member_ids, 2) if pair in hops]
        known += [hops[b, a] for a, b in combinations(plan.member_ids, 2) if (b, a) in hops]
        return max(known, default=DEFAULT_HOP_S)


def _without_lost(spec: InstanceSpec, monitor: RingMonitor, error: FetchError) -> InstanceSpec:
    """The spec without the peer that could not get its files, for a ring of the same width. Raises `error` if that peer
    was already left out, or if the spec pins peers."""
    seat = monitor.lost_seat
    if seat is None or seat.peer_id in spec.exclude_peers or spec.pins:
        raise error
    width = len(monitor.plan.member_ids)
    return replace(spec, exclude_peers=(*spec.exclude_peers, seat.peer_id), min_peers=max(width, spec.min_peers or 1))


def _nobody_left(refusals: Iterable[ReservationError]) -> type[MeshError]:
    """The error type for a model that every able peer has refused."""
    by_code = {error.code: error for error in (CrashLoopError, QuarantinedError)}
    return next((by_code[refusal.why] for refusal in refusals if refusal.why in by_code), ModelError)


def _pinned(
    card: ModelCard,
    candidates: Sequence[Candidate],
    spec: InstanceSpec,
    facts: GroupFacts,
    context_limit: int | None,
    shared: Mapping[str, Any],
) -> Plan:
    """The plan that the pins of the spec define. Raises InputError or PlacementError, see solve_pinned."""
    grouped, pins = pinned_groups(candidates, spec.pins, facts)

    def pinned(context: int) -> Plan:
        return solve_pinned(card, grouped, pins, context_limit=context, **shared)

    return most_context(card, pinned) if context_limit is None else pinned(min(context_limit, card.context_length))


def ring_of(plan: Plan, candidates: Sequence[Candidate]) -> list[Candidate]:
    """The candidates of a plan's stages, each with the engine that the plan gives it. A peer that could take no further
    ring, because the model's card has changed, counts as one with an unknown build."""
    by_id = {candidate.peer_id: candidate for candidate in candidates}
    found = ((stage, by_id.get(stage.peer_id)) for stage in plan.stages)
    return [one.running(s.engine) if one is not None else Candidate(s.peer_id, 0, s.engine) for s, one in found]
