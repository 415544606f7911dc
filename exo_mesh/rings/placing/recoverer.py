"""Recovers a ring that has lost stages: makes a new plan for the remaining peers and spares, reserves and commits
it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Collection, Iterable, Mapping, Sequence

import msgspec
from msgspec.structs import replace

from exo_mesh.base.printable import counted
from exo_mesh.base.telemetry.metrics import Metrics
from exo_mesh.domain.footprint import gigabytes
from exo_mesh.domain.model import ModelCard
from exo_mesh.domain.placement import with_caps
from exo_mesh.domain.plan import Ballot, Plan
from exo_mesh.domain.recovery import Recovery, recover
from exo_mesh.domain.ring_candidates import Candidate, Surroundings, by_tier
from exo_mesh.domain.runner_limits import RunnerLimits
from exo_mesh.domain.stage import ReserveAnswer, StageStatus
from exo_mesh.domain.view import InstanceInfo, InstanceState
from exo_mesh.errors import (
    DeadlineError,
    MeshError,
    PlacementError,
    ReservationError,
    StageLostError,
    TransportError,
    code_of,
)
from exo_mesh.mesh.membership.service import Membership
from exo_mesh.models.catalogue import Catalogue
from exo_mesh.models.mixed_ring_test import MixedRingTest
from exo_mesh.rings.placing.members import Members
from exo_mesh.rings.placing.planner import Planner, ring_of
from exo_mesh.rings.placing.refused_stages import BallotBeatenError
from exo_mesh.rings.placing.ring_monitor import OnProgress, RingMonitor
from exo_mesh.rings.placing.ring_use import RingUse
from exo_mesh.rings.placing.spec import InstanceSpec

MAX_PLANS = 4
"""Plans tried one after the other, each with what the failure of the last one showed: a peer that gives less memory
than it reported, a peer that died meanwhile, or a process that ends whenever it loads. More attempts would take too
long."""

_log = logging.getLogger(__name__)


class _Attempt(msgspec.Struct):
    """One recovery in progress. above: the highest ballot used or met. known: a living peer with a higher ballot is
    recovering the ring or has recovered it. caps: bytes that peers reported they can give. unable: peers on which a
    plan failed. touched: peers that may hold something of the ring. is_published: the view has a record of the
    recovery."""

    old: Plan
    above: Ballot
    known: Ballot
    unable: set[str]
    touched: set[str]
    only_what_is_left: bool
    caps: dict[str, int] = msgspec.field(default_factory=dict)
    refusals: list[str] = msgspec.field(default_factory=list)
    is_published: bool = False


class Recoverer:
    """Makes the plan that loads the fewest bytes and brings it up; surviving stages keep their process, weights and
    KV. lost_hops: which peers to leave out after a ring has lost a hop."""

    def __init__(
        self,
        membership: Membership,
        members: Members,
        catalogue: Catalogue,
        planner: Planner,
        mixing: MixedRingTest,
        metrics: Metrics,
        runner_limits: RunnerLimits,
        use: RingUse,
    ) -> None:
        self._membership = membership
        self._members = members
        self.lost_hops = LostHops(members)
        self._catalogue = catalogue
        self._planner = planner
        self._mixing = mixing
        self._metrics = metrics
        self._runner_limits = runner_limits
        self._use = use

    async def recover(
        self,
        old: Plan,
        above: Ballot,
        on_progress: OnProgress,
        *,
        trouble_s: float = 0.0,
        owned: Ballot | None = None,
        suspects: Collection[str] = (),
        only_what_is_left: bool = False,
        cause: str = "request",
    ) -> tuple[RingMonitor, InstanceInfo]:
        """Recover the ring of `old` from its remaining stages. Returns a ready ring with a ballot above `above`. Raises
        StageLostError for a ring with tensor groups, because those are placed again instead.

        trouble_s: how long it took to detect the loss. owned: the ballot by which this node owns or inherits the ring;
        a peer with a higher one takes precedence. suspects: peers to leave out. only_what_is_left: fail if no stage is
        left. cause: of the loss, for the metrics. Raises PlacementError if the remaining peers cannot hold the model,
        BallotBeatenError if another peer is recovering the ring, or the last failure; nothing of the ring remains then.
        """
        began = time.monotonic()
        above = max(above, old.ballot)
        attempt = _Attempt(old, above, owned or above, set(suspects), set(old.member_ids), only_what_is_left)
        try:
            monitor, instance, found = await self._try_plans(attempt, on_progress)
        except BaseException as exc:
            self._metrics.recovery_ended(old.model, cause, code_of(exc))
            if attempt.is_published:
                self._membership.put_instance(old.instance_id, None)
            # The peer that recovers the ring by a higher ballot may need the remaining stages.
            beaten = isinstance(exc, BallotBeatenError)
            released = attempt.touched - set(old.peer_ids) if beaten else attempt.touched
            await self._members.release(old.instance_id, attempt.above, released)
            raise
        took_s = time.monotonic() - began
        loaded_bytes = found.total_load_bytes
        self._metrics.recovered(old.model, cause, trouble_s=trouble_s, took_s=took_s, loaded_bytes=loaded_bytes)
        _log_recovery(monitor, found, trouble_s, took_s)
        await self._members.release(old.instance_id, attempt.above, attempt.touched - set(found.plan.peer_ids))
        return monitor, instance

    async def _try_plans(
        self, attempt: _Attempt, on_progress: OnProgress
    ) -> tuple[RingMonitor, InstanceInfo, Recovery]:
        instance_id = attempt.old.instance_id
        failure: MeshError = StageLostError(f"{instance_id} could not be recovered")
        if any(stage.group is not None for stage in attempt.old.stages):
            raise StageLostError(f"{instance_id} has a tensor group and is placed again")
        last = attempt.old
        for _ in range(MAX_PLANS):
            found, keep_kv_from = await self._reserve(attempt, last)
            last = found.plan
            self._membership.put_instance(instance_id, InstanceInfo(last, InstanceState.LOADING))
            attempt.is_published = True
            monitor = RingMonitor(
                last, self._members, self._use, on_progress, self._runner_limits, keep_kv_from=keep_kv_from
            )
            try:
                return monitor, await monitor.bring_up(), found
            except MeshError as exc:
                failure = exc
                _log.warning("recovering %s by ballot %s failed: %s", instance_id, last.ballot, exc)
                loser = monitor.lost_seat.peer_id if monitor.lost_seat is not None else ""
                if loser and found.load_bytes[loser]:  # it failed to load; another peer may succeed
                    attempt.unable.add(loser)
                await monitor.close()
                attempt.unable.update(
                    await self.lost_hops.suspects(last, monitor.hop_lost, is_out_of_reach=monitor.is_next_out_of_reach)
                )
            except BaseException:
                await monitor.close()
                raise
        raise failure

    async def _reserve(self, attempt: _Attempt, last: Plan) -> tuple[Recovery, int | None]:
        """A plan that all its members have granted, and the first stage that keeps its KV (None: no stage does)."""
        card = await self._catalogue.card(last.model)
        if card.digest != last.model_digest:
            raise PlacementError(f"the files of {last.model} have changed since {last.instance_id} was placed")
        cards = {engine: await self._planner.held(card, engine) for engine in last.engines}
        for _ in range(MAX_PLANS):
            statuses = await self._statuses(last, attempt.unable)
            self._refuse_beaten(attempt, statuses)
            if attempt.only_what_is_left and not any(status.held for status in statuses.values()):
                raise StageLostError(f"nothing is left of {last.instance_id}")
            found = await self._solve(card, last, attempt, statuses, Surroundings(cards=cards))
            plan = found.plan
            attempt.above = plan.ballot
            attempt.touched |= set(plan.peer_ids)
            answers = await asyncio.gather(*(self._ask(plan, index) for index in range(len(plan.stages))))
            if all(isinstance(answer, ReserveAnswer) and answer.granted for answer in answers):
                return found, _kept_from(found, statuses)
            for peer_id, answer in zip(plan.peer_ids, answers, strict=True):
                _note_refusal(attempt, plan, peer_id, answer)
        reasons = "; ".join(attempt.refusals[-3:])
        raise PlacementError(f"{last.instance_id}: members refused {MAX_PLANS} plans in a row; {reasons}")

    def _refuse_beaten(self, attempt: _Attempt, statuses: Mapping[str, StageStatus]) -> None:
        """Raise BallotBeatenError if a member has promised a higher ballot of another living peer that this node did
        not know: that peer is recovering the ring or has done so, and its record is on its way."""
        for peer_id, status in statuses.items():
            proposer = status.promised.proposer
            if status.promised > attempt.known and proposer != self._membership.own.id:
                attempt.above = max(attempt.above, status.promised)
                if self._members.is_alive(proposer):
                    message = f"{peer_id[:8]} has promised ballot {status.promised}"
                    raise BallotBeatenError(message, peer_id=peer_id, ballot=status.promised)

    async def _solve(
        self,
        card: ModelCard,
        last: Plan,
        attempt: _Attempt,
        statuses: Mapping[str, StageStatus],
        around: Surroundings,
    ) -> Recovery:
        spec = InstanceSpec(last.model)
        holders = self._planner.candidates(card, spec)
        everybody = self._planner.candidates(card, spec, may_fetch=True)
        pools = [*by_tier(everybody)] or [everybody]
        # If the remaining peers lack files too, a spare that has to fetch them is no slower.
        if statuses.keys() <= {one.peer_id for one in holders}:
            pools = [*by_tier(holders), *pools]
        for pool in pools[:-1]:
            with contextlib.suppress(PlacementError):
                return await self._solve_among(pool, card, last, attempt, statuses, around)
        return await self._solve_among(pools[-1], card, last, attempt, statuses, around)

    async def _solve_among(
        self,
        candidates: Sequence[Candidate],
        card: ModelCard,
        last: Plan,
        attempt: _Attempt,
        statuses: Mapping[str, StageStatus],
        around: Surroundings,
    ) -> Recovery:
        candidates = with_caps(candidates, attempt.caps)
        usable = {
            peer_id: min(status.usable_bytes, attempt.caps.get(peer_id, status.usable_bytes))
            for peer_id, status in statuses.items()
        }
        found = await asyncio.to_thread(
            recover,
            card,
            last,
            holding={peer_id: status.held for peer_id, status in statuses.items() if status.held is not None},
            usable_bytes=usable,
            spares=_spares(candidates, last, attempt),
            ballot=attempt.above.next_for(self._membership.own.id),
            around=around,
        )
        if len(found.plan.engines) > 1 and not set(found.plan.peer_ids) <= set(last.peer_ids):
            everybody = self._planner.candidates(card, InstanceSpec(last.model), may_fetch=True)
            outcome = await self._mixing.of(card, ring_of(found.plan, everybody))
            if outcome.unmixable:
                raise PlacementError(f"{last.instance_id}: " + "; ".join(outcome.unmixable.values()), reason="mixing")
        return found

    async def _statuses(self, plan: Plan, unable: Collection[str]) -> dict[str, StageStatus]:
        """What each peer of a ring holds of it; only peers that answer."""
        asked = [peer_id for peer_id in plan.peer_ids if peer_id not in unable]
        answers = await asyncio.gather(*(self._status(plan.instance_id, peer_id) for peer_id in asked))
        return {peer_id: answer for peer_id, answer in zip(asked, answers, strict=True) if answer is not None}

    async def _status(self, instance_id: str, peer_id: str) -> StageStatus | None:
        try:
            return await self._members.member(peer_id).status(instance_id)
        except MeshError as exc:
            _log.info("%s: peer %s does not answer: %s", instance_id, peer_id[:8], exc)
            return None

    async def _ask(self, plan: Plan, index: int) -> ReserveAnswer | MeshError:
        try:
            return await self._members.member(plan.stages[index].peer_id).reserve(plan, index)
        except (TransportError, DeadlineError, ReservationError) as exc:
            return exc


def _spares(candidates: Iterable[Candidate], last: Plan, attempt: _Attempt) -> list[Candidate]:
    """Peers outside the ring that could take part, each with an engine of the ring."""
    spares = []
    for one in candidates:
        engine = next((name for name in (one.engine, *one.others) if name in last.engines), None)
        if engine is not None and one.peer_id not in attempt.unable and one.peer_id not in last.peer_ids:
            spares.append(replace(one.running(engine), usable_bytes=one.usable_bytes))
    return spares


def _note_refusal(attempt: _Attempt, plan: Plan, peer_id: str, answer: ReserveAnswer | MeshError) -> None:
    """Record one member's refusal for the next plan. Raises BallotBeatenError if it has promised another peer's
    ballot."""
    if isinstance(answer, MeshError):
        attempt.unable.add(peer_id)
        reason = str(answer)
    elif answer.granted:
        return
    elif answer.beaten_by is not None:
        if answer.beaten_by.proposer != plan.ballot.proposer:
            raise BallotBeatenError(answer.reason, peer_id=peer_id, ballot=answer.beaten_by)
        attempt.above, reason = max(attempt.above, answer.beaten_by), answer.reason  # from an earlier run of this node
    else:
        attempt.caps[peer_id], reason = answer.usable_bytes, answer.reason
    attempt.refusals.append(f"{peer_id[:8]} refused: {reason}")
    _log.info("%s: peer %s refused: %s", plan.instance_id, peer_id[:8], reason)


def _kept_from(found: Recovery, statuses: Mapping[str, StageStatus]) -> int | None:
    """The first stage from which on all stages keep their KV: all stages after the last loading one, provided that all
    of them can roll their KV back to the positions that the whole ring has processed."""
    peer_ids = found.plan.peer_ids
    fresh = [
        index
        for index, peer_id in enumerate(peer_ids)
        if found.load_bytes[peer_id] or peer_id not in statuses or not statuses[peer_id].rolls_back
    ]
    kept_from = max(fresh, default=-1) + 1
    return kept_from if kept_from < len(peer_ids) else None


def _log_recovery(monitor: RingMonitor, found: Recovery, trouble_s: float, took_s: float) -> None:
    # requests that are sent to the ring again are not known here: their own log lines say that they continue
    held = f", {counted(monitor.resumed, 'request')} kept in the ring" if monitor.resumed else ""
    loads = [f"{gigabytes(size)} at {peer_id[:8]}" for peer_id, size in found.load_bytes.items() if size]
    _log.warning(
        "%s recovered by ballot %s: detected after %.2f s, recovered in %.2f s, loaded %s%s",
        found.plan.instance_id,
        found.plan.ballot,
        trouble_s,
        took_s,
        " and ".join(loads) or "nothing",
        held,
    )


HOP_SUSPECT_S = 60.0
"""A hop that is lost while both its ends are alive is re-established once. If it is lost again within this time, the
peer behind it is left out: a firewall does not go away."""


class LostHops:
    """Remembers when each instance last lost a hop on this node's rings."""

    def __init__(self, members: Members) -> None:
        self._members = members
        self._lost_at: dict[str, float] = {}

    async def suspects(self, plan: Plan, hop: int | None, *, is_out_of_reach: bool = False) -> tuple[str, ...]:
        """The peers to leave out of the next plan, because the stage `hop` of this one lost its connection to the next
        stage (None: the ring was lost for another reason).

        One end of the hop, if the node before it cannot reach the node behind it either, or if the instance lost a hop
        a short time ago and this plan has re-established it. The end behind the hop unless that is this node.
        is_out_of_reach: the node before the hop has already reported that it cannot reach the other one.
        """
        if hop is None:
            return ()
        now = asyncio.get_running_loop().time()
        again = now - self._lost_at.get(plan.instance_id, -HOP_SUSPECT_S) < HOP_SUSPECT_S
        self._lost_at = {name: at for name, at in self._lost_at.items() if now - at < HOP_SUSPECT_S}
        self._lost_at[plan.instance_id] = now
        before, behind = (plan.peer_ids[(hop + n) % len(plan.stages)] for n in (0, 1))
        if not (again or is_out_of_reach) and await self._members.reaches(before, behind):
            return ()
        return (before if behind == self._members.own_id else behind,)
