"""Brings up one plan and watches it for its owner: commit at all members, link the ring, wait until all are ready."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from itertools import pairwise
from typing import Any, TypeVar

from exo_mesh.base.tasks import ChangeSignal, TaskOwner
from exo_mesh.base.wakeups import until_wakeup
from exo_mesh.domain.agreement import TensorShape, boundary_defect
from exo_mesh.domain.plan import NO_BALLOT, Ballot, Plan, Seat
from exo_mesh.domain.runner_limits import RunnerLimits
from exo_mesh.domain.stage import (
    StageFailed,
    StageFetching,
    StageHopLost,
    StageListening,
    StageLoading,
    StageReady,
    StageUpdate,
)
from exo_mesh.domain.tensor import TensorSpec
from exo_mesh.domain.tensor_group import GroupFigures, RankWiring
from exo_mesh.domain.view import InstanceInfo, InstanceState
from exo_mesh.errors import (
    DeadlineError,
    EngineError,
    FetchError,
    MeshError,
    StageLostError,
    TransportError,
    error_from_code,
)
from exo_mesh.rings.placing.liveness import SilentSeats, StageLook
from exo_mesh.rings.placing.members import Members
from exo_mesh.rings.placing.ring_use import RingUse
from exo_mesh.rings.placing.stage_phases import StagePhase, of_rank, of_stage

MARGIN_S = 30.0
"""Added to a stage's load deadline, which its peer enforces: the owner times out only if that peer does not."""

REATTACH_S = 3.0
"""A broken report stream alone does not mean a lost stage: the owner reconnects for this long, unless the mesh agrees
that the node is dead or its probes have been unanswered here for long, too."""

MANY_LOOKS = 2
"""Consecutive checks of a silent data port that count as a loss while the mesh considers the node alive."""

REATTACH_PAUSE_S = 0.2

QUIET_AFTER_S = 10.0
"""Time for which no node must know of a request before reports are read over connections with few pings. Its own stage
tells the owner of no request only half a minute after the last one."""

JUDGE_EVERY_S = 0.1
CALM_JUDGE_EVERY_S = 0.25
"""Interval of the loss check while a stage is silent, and while all stages report: a broken report stream starts a
check at once. Recovery has to start within 0.3 s of a verdict of the mesh."""

FETCH_SILENCE_S = 300.0
"""A stage may fetch for hours but must make progress within this time; its peer gives up much earlier."""

TAKE_BACK_TRIES = 4
"""Ballots tried one after the other: a stage that has promised a higher ballot answers with that ballot."""

_T = TypeVar("_T")
_log = logging.getLogger(__name__)

OnProgress = Callable[[str, int, int], None]
"""Called with ("fetching", bytes there, bytes wanted) while a stage lacks files, then with ("loading", bytes or layers
done, total); summed over all stages."""


def tell_nobody(phase: str, done: int, total: int) -> None:
    """An OnProgress that does nothing, for rings that no caller waits for."""


class RingMonitor:
    """Owns the report streams of all stages of one plan, or of all ranks of a tensor group. `lost` completes with the
    first failure of any of them; `lost_seat` is the seat that failed. figures: what the tensor groups measured of
    themselves, by stage, once the ring is up.

    adopted: the ballot by which this node took the plan over, if another peer made the plan. It rises when this node
    takes the ring back from an adopter that reached only some stages; see lost_or_taken_back. endpoints: of the
    stages, if they already run. keep_kv_from: see ChangePlan. wirings: of the ranks of tensor groups, if this node
    brings the plan up.

    After a loss: `trouble_s` is the time from its first sign to the verdict, `hop_lost` the stage that cannot reach the
    next one, `is_next_out_of_reach` whether its node cannot reach the next stage's node either. `resumed`: requests
    that continued in the driver.
    """

    def __init__(
        self,
        plan: Plan,
        members: Members,
        use: RingUse,
        on_progress: OnProgress,
        runner_limits: RunnerLimits,
        adopted: Ballot = NO_BALLOT,
        *,
        endpoints: Sequence[str] = (),
        keep_kv_from: int | None = None,
        wirings: Mapping[Seat, RankWiring] | None = None,
    ) -> None:
        loop = asyncio.get_running_loop()
        self.plan = plan
        self.adopted = adopted
        self.ballot = max(plan.ballot, adopted)
        self.lost: asyncio.Future[MeshError] = loop.create_future()
        self.lost_seat: Seat | None = None
        self.figures: dict[int, GroupFigures] = {}
        self._taken_back = asyncio.Event()
        self.trouble_s = 0.0
        self.hop_lost: int | None = None
        self.is_next_out_of_reach = False
        self.resumed = 0
        self._is_quiet = False
        self._used_at = loop.time()
        self._switched = ChangeSignal()
        leaders = [seat for seat in plan.seats if not seat.rank]
        self._endpoints: dict[Seat, str] = dict(zip(leaders, endpoints, strict=False))
        self._addresses: dict[Seat, list[str]] = {}
        self._keep_kv_from = keep_kv_from
        self._wirings = wirings or {}
        self._taking_back = asyncio.Lock()
        self._members = members
        self._use = use
        self._on_progress = on_progress
        self._runner_limits = runner_limits
        self._listening: dict[Seat, asyncio.Future[StageListening]] = {s: loop.create_future() for s in plan.seats}
        self._ready: dict[Seat, asyncio.Future[StageReady]] = {seat: loop.create_future() for seat in plan.seats}
        self._loading: dict[Seat, tuple[int, int]] = {}
        self._fetching: dict[Seat, tuple[int, int]] = {}
        self._fetched_at = 0.0
        self._broken: dict[Seat, tuple[float, MeshError]] = {}
        self._broke = ChangeSignal()
        self._silent = SilentSeats(plan, members, self._addresses_of)
        self._tasks = TaskOwner()

    async def bring_up(self) -> InstanceInfo:
        """Commit, link, and wait until all stages are ready. Raises the MeshError of the first stage that fails, or
        DeadlineError."""
        self.watch()
        largest = max(stage.reserve_bytes for stage in self.plan.stages)
        patience_s = self._runner_limits.load_s(largest) + MARGIN_S
        # A runner listens only after it has loaded.
        heard = await self._or_lost(asyncio.gather(*self._listening.values()), patience_s, "every runner listens")
        listening = dict(zip(self._listening, heard, strict=True))
        leaders = [seat for seat in self.plan.seats if not seat.rank]
        endpoints = [listening[seat].endpoint for seat in leaders]
        ranks = {seat: status.endpoint for seat, status in listening.items() if seat.rank}
        linked = asyncio.gather(*(self._link(index, endpoints, ranks) for index in range(len(endpoints))))
        await self._or_lost(linked, patience_s, "every stage is linked")
        ready = await self._or_lost(asyncio.gather(*self._ready.values()), patience_s, "every stage is loaded")
        loaded = dict(zip(self._ready, ready, strict=True))
        refuse_mismatch(self.plan, [loaded[seat] for seat in leaders])
        figures = {seat.stage: loaded[seat].loaded.group for seat in leaders}
        self.figures = {stage: one for stage, one in figures.items() if one is not None}
        self.resumed = sum(status.resumed for status in ready)
        self._endpoints = {seat: status.endpoint for seat, status in listening.items()}
        pids = tuple(listening[seat].pid for seat in leaders)
        return InstanceInfo(self.plan, InstanceState.READY, tuple(endpoints), pids)

    def watch(self) -> None:
        """Commit at all members and follow their reports. For a running ring, this takes it over."""
        for seat in self.plan.seats:
            self._tasks.start(self._follow(seat), f"{seat} of {self.plan.instance_id}")
        self._tasks.start(self._judge(), f"silent stages of {self.plan.instance_id}")

    async def lost_or_taken_back(self) -> MeshError | None:
        """Waits for the first failure of a stage, and returns it; or until this node has taken the ring back by a
        higher ballot: None."""
        taken_back = asyncio.ensure_future(self._taken_back.wait())
        try:
            await asyncio.wait((self.lost, taken_back), return_when=asyncio.FIRST_COMPLETED)
        finally:
            taken_back.cancel()
        if self._taken_back.is_set():
            self._taken_back.clear()
            return None
        return self.lost.result()

    async def close(self) -> None:
        """Stop watching; the stages keep running."""
        await self._tasks.close()
        await self._silent.close()
        waits: list[asyncio.Future[Any]] = [*self._listening.values(), *self._ready.values(), self.lost]
        for future in waits:
            future.cancel()

    async def release(self, *, for_good: bool = False) -> None:
        """Stop watching, and end all stages. Members that cannot be reached end theirs when they see that this node is
        gone.

        for_good: also end stages that have promised a higher ballot to an adopter that did not reach all of them.
        """
        await self.close()
        if for_good:
            highest = max(await asyncio.gather(*map(self._promised, self.plan.seats)))
            if highest > self.ballot:
                self.ballot = highest.next_for(self._members.own_id)
        await self._members.release(self.plan.instance_id, self.ballot, self.plan.member_ids)

    async def _promised(self, seat: Seat) -> Ballot:
        """The ballot by which this seat of the plan runs; this node's ballot if no higher one is known. Asking with
        this node's own ballot changes nothing at the stage."""
        try:
            answer = await self._members.member(seat.peer_id).adopt(self.plan, seat.stage, self.ballot)
        except MeshError:
            return self.ballot
        return max(self.ballot, answer.beaten_by or NO_BALLOT)

    def _addresses_of(self, seat: Seat) -> list[str]:
        """Where the runner of a seat may be reached; the last known addresses once its peer is gone."""
        if seat in self._endpoints and (self._members.is_alive(seat.peer_id) or seat not in self._addresses):
            self._addresses[seat] = self._members.addresses(self._endpoints[seat], seat.peer_id)
        return self._addresses.get(seat, [])

    async def _follow(self, seat: Seat) -> None:
        loop = asyncio.get_running_loop()

        def heard() -> None:
            if self._broken.pop(seat, None) is not None:
                self._silent.heard(seat)

        while not self.lost.done():
            try:
                await self._reports(seat, heard)
            except (TransportError, DeadlineError) as exc:
                self._broken[seat] = self._broken.get(seat, (loop.time(), exc))[0], exc
                self._silent.step(self._broken)
                self._broke.beat()
            except MeshError as exc:
                self._lose(exc, seat)
                return
            await asyncio.sleep(REATTACH_PAUSE_S)

    async def _judge(self) -> None:
        """Give up a stage whose reports do not arrive, once its data port shows that it is gone."""
        loop = asyncio.get_running_loop()
        while not self.lost.done():
            self._choose_pings(loop.time())
            self._silent.step(self._broken)
            for seat, (broke_at, error) in self._broken.items():
                if self._is_lost(seat, loop.time() - broke_at):
                    self.trouble_s = loop.time() - broke_at
                    self._lose(StageLostError(f"{seat} is out of reach: {error}"), seat)
                    return
            is_calm = not self._broken and not self._silent.is_checking
            await self._broke.wait(until_wakeup(CALM_JUDGE_EVERY_S) if is_calm else JUDGE_EVERY_S)

    def _choose_pings(self, now: float) -> None:
        """Read the reports over connections with few pings (see ControlPort.stream) once no request has used the ring
        for a while, and with many as soon as one does, or a node of the ring does not answer."""
        others = (peer_id for peer_id in self.plan.member_ids if peer_id != self._members.own_id)
        answer = all(self._members.is_alive(one) and not self._members.unanswered_s(one) for one in others)
        if self._broken or not answer or not self._is_calm():
            self._used_at = now
        if self._is_quiet != (now - self._used_at >= QUIET_AFTER_S):
            self._is_quiet = not self._is_quiet
            self._switched.beat()

    def _is_calm(self) -> bool:
        is_up = all(ready.done() for ready in self._ready.values())
        return is_up and self._use.is_calm(self.plan.instance_id)

    def _is_lost(self, seat: Seat, broken_s: float) -> bool:
        """Whether a silent stage is lost. A frozen node ends no ring whose runners continue, whatever the mesh says of
        it. If the runner is silent too, a death verdict of the mesh is enough; without a verdict, both must stay
        silent."""
        look, times = self._silent.last(seat) or (StageLook.LIVES, 0)
        if look is not StageLook.SILENT:
            return look is StageLook.REFUSED
        if not self._members.is_alive(seat.peer_id):
            return True
        return self._members.is_out_of_reach(seat.peer_id) or (broken_s > REATTACH_S and times >= MANY_LOOKS)

    async def _reports(self, seat: Seat, heard: Callable[[], None]) -> None:
        """Process the reports of a stage over one stream, until it ends with an error, the ring has been taken back, or
        another connection is to be used."""
        ballot, wiring, is_quiet = self.ballot, self._wirings.get(seat), self._is_quiet
        member = self._members.member(seat.peer_id)
        try:
            stream = member.commit(self.plan.instance_id, ballot, self._keep_kv_from, wiring, quiet=is_quiet)
            is_here = seat.peer_id == self._members.own_id
            async with aclosing(self._until_switched(stream, is_quiet, is_here=is_here)) as reports:
                async for update in reports:
                    heard()
                    self._take(seat, update)
        except StageLostError as exc:
            await self._take_back(ballot, exc)
            return
        if self._is_quiet == is_quiet:
            raise TransportError(f"the report stream of {seat} ended")

    async def _until_switched(
        self, stream: AsyncIterator[StageUpdate], is_quiet: bool, *, is_here: bool
    ) -> AsyncGenerator[StageUpdate, None]:
        """The reports of a stream, until `_is_quiet` has changed; a local stage's, until they end."""
        switched = asyncio.create_task(self._wait_for_switch(is_quiet))
        try:
            while True:
                report = asyncio.ensure_future(anext(stream))
                try:
                    await asyncio.wait({report} if is_here else {report, switched}, return_when=asyncio.FIRST_COMPLETED)
                    if not report.done():
                        return
                    yield report.result()
                except StopAsyncIteration:
                    return
                finally:
                    report.cancel()
                    await asyncio.gather(report, return_exceptions=True)
                    del report  # its error refers to this frame: a cycle that would keep the call
        finally:
            switched.cancel()
            await asyncio.gather(switched, return_exceptions=True)

    async def _wait_for_switch(self, is_quiet: bool) -> None:
        while self._is_quiet == is_quiet:
            await self._switched.wait(MARGIN_S)

    async def _take_back(self, refused: Ballot, refusal: StageLostError) -> None:
        """Handle a stage that refuses this node's ballot. Its node may have promised an adopter that reached only some
        stages: then take all of them back by a higher ballot.

        Raises `refusal` if the stage is gone, and TransportError if that cannot be determined now or the ring has
        another owner, to which it is then left (see OwnedRings).
        """
        async with self._taking_back:
            if self.ballot > refused:
                return  # already taken back after another stage's refusal
            members = [(seat.stage, self._members.member(seat.peer_id)) for seat in self.plan.seats]
            looks = (member.look(self.plan.instance_id, self.plan.ballot) for _, member in members)
            if any(await asyncio.gather(*looks)):
                raise refusal  # before the other stages promise a new ballot
            await self._yield_to_adopter(refused)
            ballot = refused
            for _ in range(TAKE_BACK_TRIES):
                if self._members.has_other_owner(self.plan, ballot):
                    raise TransportError(f"{self.plan.instance_id} has been adopted")
                ballot = ballot.next_for(self._members.own_id)
                adoptions = (member.adopt(self.plan, index, ballot) for index, member in members)
                answers = await asyncio.gather(*adoptions)
                if all(answer.granted for answer in answers):
                    _log.warning("%s was adopted only in part; taken back by ballot %s", self.plan.instance_id, ballot)
                    self.adopted = self.ballot = ballot
                    self._taken_back.set()
                    return
                if any(not answer.granted and (answer.beaten_by or NO_BALLOT) < ballot for answer in answers):
                    raise refusal
                ballot = max(answer.beaten_by or ballot for answer in answers)
            raise TransportError(f"{self.plan.instance_id} is being adopted by other peers")

    async def _yield_to_adopter(self, refused: Ballot) -> None:
        """Raise TransportError if all stages have promised the same other living peer: it has adopted the ring, and its
        record is on its way. Asking with the old ballot changes nothing at a stage."""
        seats = self.plan.seats
        asked = (self._members.member(seat.peer_id).adopt(self.plan, seat.stage, refused) for seat in seats)
        answers = await asyncio.gather(*asked)
        adopters = {answer.beaten_by.proposer if answer.beaten_by else "" for answer in answers}
        if len(adopters) == 1 and "" not in adopters and self._members.own_id not in adopters:
            (adopter,) = adopters
            if self._members.is_alive(adopter):
                raise TransportError(f"{self.plan.instance_id} has been adopted by peer {adopter[:8]}")

    @property
    def phases(self) -> list[StagePhase]:
        """The phase of each stage, in ring order."""
        ranks: dict[int, list[StagePhase]] = {}
        for seat in self.plan.seats:
            is_loaded, is_ready = self._listening[seat].done(), self._ready[seat].done()
            phase = of_rank(self._fetching.get(seat), self._loading.get(seat), is_loaded=is_loaded, is_ready=is_ready)
            ranks.setdefault(seat.stage, []).append(phase)
        return [of_stage(ranks[stage]) for stage in sorted(ranks)]

    def give_up(self, stage: int, reason: str) -> None:
        """Declare the ring lost because its owner found that a stage cannot continue."""
        seat = next(seat for seat in self.plan.seats if seat.stage == stage)
        self._lose(StageLostError(f"{seat}: {reason}"), seat)

    def _take(self, seat: Seat, update: StageUpdate) -> None:
        match update:
            case StageListening():
                _resolve(self._listening[seat], update)
            case StageFetching(done, total):
                self._note_fetching(seat, done, total)
            case StageLoading(done, total):
                self._loading[seat] = (done, total)
                if not self._is_fetching:
                    self._publish_progress("loading", self._loading)
            case StageReady():
                _resolve(self._ready[seat], update)
            case StageFailed():
                self._lose(_error_of(seat, update), seat)
            case StageHopLost(message):
                self.hop_lost = seat.stage
                self.is_next_out_of_reach = update.is_out_of_reach
                self._lose(StageLostError(f"{seat} lost its connection to the next stage: {message}"))

    @property
    def _is_fetching(self) -> bool:
        return any(done < total for done, total in self._fetching.values())

    def _note_fetching(self, seat: Seat, done: int, total: int) -> None:
        if (done, total) != self._fetching.get(seat):
            self._fetched_at = asyncio.get_running_loop().time()
        self._fetching[seat] = (done, total)
        self._publish_progress("fetching", self._fetching)

    def _publish_progress(self, phase: str, parts: Mapping[Seat, tuple[int, int]]) -> None:
        self._on_progress(phase, sum(done for done, _ in parts.values()), sum(total for _, total in parts.values()))

    def _lose(self, error: MeshError, seat: Seat | None = None) -> None:
        """Record the first failure as the result; later ones are ignored. seat: the seat that failed, if known."""
        if not self.lost.done():
            self.lost_seat = seat
            _log.warning("instance %s (ballot %s) lost: %s", self.plan.instance_id, self.ballot, error)
            self.lost.set_result(error)

    async def _link(self, index: int, endpoints: Sequence[str], ranks: Mapping[Seat, str]) -> None:
        """Link a stage to the next one. ranks: endpoints of the ranks that lead no stage, by seat."""
        following = (index + 1) % len(endpoints)
        member = self._members.member(self.plan.stages[index].peer_id)
        next_peer = self.plan.stages[following].peer_id
        others = [(endpoint, seat.peer_id) for seat, endpoint in ranks.items() if seat.stage == index]
        extra = (others,) if others else ()
        await member.link(self.plan.instance_id, self.ballot, endpoints[following], next_peer, *extra)

    async def _or_lost(self, work: Awaitable[_T], patience_s: float, what: str) -> _T:
        """Await `work`, or raise the error of `lost`, or DeadlineError. patience_s: counts from now, or from the last
        progress of a fetch. what: the condition that `work` waits for."""
        loop = asyncio.get_running_loop()
        task, began = asyncio.ensure_future(work), loop.time()
        try:
            while not task.done() and not self.lost.done():
                silence_s = max(patience_s, FETCH_SILENCE_S) if self._is_fetching else patience_s
                left_s = max(began, self._fetched_at) + silence_s - loop.time()
                if left_s <= 0:
                    break
                step_s = min(left_s, MARGIN_S)  # a fetch may begin in the meantime
                await asyncio.wait((task, self.lost), timeout=step_s, return_when=asyncio.FIRST_COMPLETED)
            if self.lost.done():
                raise self.lost.result()
            if not task.done():
                raise DeadlineError(f"{self.plan.instance_id}: timeout after {patience_s:.0f} s, waiting until {what}")
            return task.result()
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


def _error_of(seat: Seat, failed: StageFailed) -> MeshError:
    message = f"{seat}: {failed.message}"
    if failed.code == FetchError.code:
        return FetchError(message, remedy=failed.remedy, is_final=failed.is_final)
    return error_from_code(failed.code, message)


def _resolve(future: asyncio.Future[Any], value: Any) -> None:
    if not future.done():
        future.set_result(value)


def refuse_mismatch(plan: Plan, ready: Sequence[StageReady]) -> None:
    """Raise EngineError naming both stages unless each stage's declared outputs match the next stage's inputs by name
    and shape. An engine that declares nothing is trusted: its self-test or its own kind vouches for it."""
    for (one, given), (other, taken) in pairwise(zip(plan.stages, ready, strict=True)):
        if defect := boundary_defect(_shapes(given.loaded.outputs), _shapes(taken.loaded.inputs)):
            raise EngineError(
                f"{one.shard} ({one.engine} at {one.peer_id[:8]}) and {other.shard} ({other.engine} at "
                f"{other.peer_id[:8]}) do not fit together: {defect}"
            )


def _shapes(specs: Iterable[TensorSpec]) -> tuple[TensorShape, ...]:
    return tuple((spec.name, spec.item_shape) for spec in specs)
