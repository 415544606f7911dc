"""The way of a request from its entry here to an instance and back, token by token."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from exo_mesh.clock import Clock, monotonic
from exo_mesh.domain.plan import Ballot, Plan
from exo_mesh.domain.request import FinishReason, FrameTrace, GenerateRequest, Place, Progress, TokenEvent
from exo_mesh.domain.view import InstanceInfo
from exo_mesh.errors import ContextLengthError, DeadlineError, MeshError, StageLostError
from exo_mesh.instances.instances import Instances, Load
from exo_mesh.instances.members import Members
from exo_mesh.instances.spec import InstanceSpec
from exo_mesh.serving.history import FINE
from exo_mesh.serving.journal import Entry, Journal
from exo_mesh.serving.redial import Redial
from exo_mesh.serving.traces import TraceStore
from exo_mesh.telemetry.metrics import Metrics
from exo_mesh.transport.control_driver import DriverChannels, DriverStreamError

PROGRESS_EVERY_S = 1.0

_T = TypeVar("_T")
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Patience:
    """Seconds. queue_s: longest wait for a turn on a ring. first_s: longest silence before the first token (places in
    the queue and prefill are reported). next_s: between tokens. max_resumes: how often a request may go on after its
    ring was lost. total_s: of the whole request; an answer that is under way then ends where it is."""

    queue_s: float = 120.0
    first_s: float = 120.0
    next_s: float = 30.0
    max_resumes: int = 3
    total_s: float = 300.0


class _TimeUp(Exception):
    """A request has reached Patience.total_s."""


class Router:
    """Finds or places an instance for each request and follows it to its one end."""

    def __init__(
        self,
        instances: Instances,
        members: Members,
        drivers: DriverChannels,
        journal: Journal,
        metrics: Metrics,
        *,
        patience: Patience = Patience(),
        clock: Clock = monotonic,
    ) -> None:
        self._instances = instances
        self._members = members
        self._drivers = drivers
        self._journal = journal
        self._metrics = metrics
        self._patience = patience
        self._clock = clock
        self.traces = TraceStore()

    async def generate(self, model: str, request: GenerateRequest) -> AsyncGenerator[TokenEvent | Progress, None]:
        """See MeshService.generate."""
        metrics = self._metrics
        entry = self._journal.open(request, model, self._clock())
        if request.trace_id:
            num_prompt = len(request.prompt_ids)
            entry.trace = self.traces.open(request.trace_id, request.request_id, model, num_prompt, entry.entered_at)
        metrics.requests_live.inc()
        outcome, ttft_s = "cancelled", None
        try:
            async for item in self._from_the_start(entry):
                if isinstance(item, TokenEvent) and item.token_id is not None:
                    first = self._count_token(entry)
                    ttft_s = first if first is not None else ttft_s
                if isinstance(item, TokenEvent) and item.finish is not None:
                    outcome = str(item.finish)
                yield item
        except MeshError as exc:
            outcome = exc.code
            raise
        finally:
            metrics.request_ended(outcome, len(request.prompt_ids), failed=outcome not in FINE)
            self._journal.close(entry, outcome, ttft_s, self._clock())
            if entry.trace is not None:
                entry.trace.end(outcome, self._clock())

    async def _from_the_start(self, entry: Entry) -> AsyncGenerator[TokenEvent | Progress, None]:
        """All events of a request, beginning with what came out under its idempotency key before."""
        for event in entry.replay():
            yield event
            if event.finish is not None:
                return
        async with contextlib.aclosing(self._until_time_is_up(entry)) as events:
            async for item in events:
                yield item

    async def _until_time_is_up(self, entry: Entry) -> AsyncGenerator[TokenEvent | Progress, None]:
        """All events of a request; after Patience.total_s it ends with what it has. Raises DeadlineError if that is
        nothing."""
        try:
            async with contextlib.aclosing(self._follow(entry)) as events:
                async for event in events:
                    yield event
        except _TimeUp:
            total_s = self._patience.total_s
            entry.timed_out = True
            if not entry.emitted:
                raise DeadlineError(f"no token came within the {total_s:g} s that a request may take") from None
            _log.info("request %s ends after %g s, as no request may take longer", entry.request.request_id, total_s)
            yield TokenEvent(entry.next_index, None, finish=FinishReason.LENGTH)

    def _time_left(self, entry: Entry) -> float:
        return max(0.0, entry.entered_at + self._patience.total_s - self._clock())

    async def _follow(self, entry: Entry) -> AsyncGenerator[TokenEvent | Progress, None]:
        """All events of a request, over as many rings as it takes."""
        dials = itertools.count()
        for attempt in range(self._patience.max_resumes + 1):
            instance = None
            async for step in self._find(entry):
                if isinstance(step, InstanceInfo):
                    instance = step
                else:
                    yield step
            assert instance is not None, "_find ends with an instance or an error"
            try:
                async with contextlib.aclosing(self._on_ring(entry, instance, dials)) as events:
                    async for event in events:
                        yield event
                return
            except StageLostError as exc:
                self._instances.distrust(instance)
                if attempt == self._patience.max_resumes:
                    raise
                self._metrics.resumes.inc()
                _log.warning(
                    "request %s: %s; going on after %d tokens", entry.request.request_id, exc, len(entry.emitted)
                )
                yield Progress("recovering")

    async def _on_ring(
        self, entry: Entry, instance: InstanceInfo, dials: Iterator[int]
    ) -> AsyncGenerator[TokenEvent | Progress, None]:
        """All events of a request from one ring. A stream that breaks is opened again as long as the ring is well:
        what else runs on it goes on, and nothing is loaded anew. Raises StageLostError or TransportError if not."""
        redial = Redial(instance.plan, self._members, self._clock)
        went_on = partial(self._went_on, entry, itertools.count(1))
        while True:
            try:
                door = redial.door(instance.endpoints[-1])
                async with contextlib.aclosing(self._events(entry, instance, door, next(dials), went_on)) as events:
                    async for event in events:
                        redial.heard()
                        yield event
                return
            except DriverStreamError as exc:
                yield Progress("recovering")
                await _unless_cancelled(entry, redial.wait(len(entry.emitted)))
                self._metrics.redials.inc()
                _log.info("request %s: %s; dialling the same ring again", entry.request.request_id, exc)

    async def _find(self, entry: Entry) -> AsyncGenerator[InstanceInfo | Progress, None]:
        """Progress while an instance is placed; the last item is the instance."""
        entry.instance_id = ""
        work = asyncio.ensure_future(self._take_place(entry))
        entry.on_cancel = work.cancel
        try:
            while not work.done():
                await asyncio.wait((work,), timeout=PROGRESS_EVERY_S)
                if not work.done():
                    self._check_time(entry)
                    yield Progress("loading", *self._instances.progress(entry.model))
            if entry.cancelled:
                raise entry.end_error
            yield work.result()
        finally:
            entry.on_cancel = None
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)

    def _went_on(self, entry: Entry, times: Iterator[int], ballot: Ballot) -> None:
        """The ring of a request has lost a stage, and goes on. Raises StageLostError if it does so again and again."""
        self._metrics.resumes.inc()
        _log.warning(
            "request %s goes on by ballot %s after %d tokens", entry.request.request_id, ballot, len(entry.emitted)
        )
        if next(times) > self._patience.max_resumes:
            raise StageLostError(f"its ring has been lost more than {self._patience.max_resumes} times")

    async def _take_place(self, entry: Entry) -> InstanceInfo:
        """The instance for a request. It counts there from now on, so that the next one sees it."""
        chosen = await self._choose(entry)
        entry.instance_id = chosen.plan.instance_id
        return chosen

    async def _choose(self, entry: Entry) -> InstanceInfo:
        """The instance that keeps this very answer, or the one with the least to do, or one that is placed now."""
        request = entry.request
        load = Load(self._journal.outstanding(), len(request.prompt_ids) + request.max_tokens)
        ready = self._instances.ready_for(entry.model, load.tokens)
        if request.key_hash and len(ready) > 1:
            asked = (self._drivers.recall(self._door_of(one), request.key_hash) for one in ready)
            kept = [-1 if found is None else found for found in await asyncio.gather(*asked)]
            if max(kept) >= 0:
                return ready[kept.index(max(kept))]
        return await self._instances.ensure(InstanceSpec(entry.model), load)

    def _door_of(self, instance: InstanceInfo) -> str:
        """Where its driver is asked first, "host:port"."""
        return self._members.doors(instance.endpoints[-1], instance.plan.peer_ids[-1])[0]

    async def _events(
        self, entry: Entry, instance: InstanceInfo, door: str, dial: int, went_on: Callable[[Ballot], None]
    ) -> AsyncGenerator[TokenEvent | Progress, None]:
        """What comes over one stream from the driver at `door`, "host:port". dial: how many there were before it.
        went_on: see DriverChannels.generate."""
        request, plan = entry.resumption, instance.plan
        if dial:  # a driver may not have noticed yet that the stream before has broken, and takes no id twice
            request = replace(request, request_id=f"{request.request_id}~{dial}", resumed=True)
        wanted = len(request.prompt_ids) + request.max_tokens
        if wanted > plan.context_limit:
            raise ContextLengthError(
                f"{len(request.prompt_ids)} prompt tokens and up to {request.max_tokens} output tokens make {wanted}; "
                f"{plan.instance_id} has a context limit of {plan.context_limit} tokens",
                param="max_tokens",
            )
        stream = self._drivers.generate(
            door,
            plan,
            request,
            first_s=self._patience.first_s,
            next_s=self._patience.next_s,
            queue_s=self._patience.queue_s,
            on_trace=self._begin_leg(entry, plan),
            on_ballot=went_on,
        )
        time_left = partial(self._time_left, entry)
        async with contextlib.aclosing(_until_cancelled(entry, stream, time_left)) as items:
            async for item in items:
                if isinstance(item, Place):
                    yield Progress("queued", item.number)
                elif isinstance(item, int):
                    yield Progress("prefill", item, len(request.prompt_ids) + len(request.resume_ids))
                elif entry.accept(item):
                    yield item

    def _begin_leg(self, entry: Entry, plan: Plan) -> Callable[[list[FrameTrace]], None]:
        """What takes the laps of a traced request on this ring, when they come."""
        if entry.trace is None:
            return lambda frames: None
        leg = entry.trace.begin_leg(plan.instance_id, [peer_id[:8] for peer_id in plan.peer_ids], self._clock())
        return partial(setattr, leg, "frames")

    def _check_time(self, entry: Entry) -> None:
        if not self._time_left(entry):
            raise _TimeUp

    def _count_token(self, entry: Entry) -> float | None:
        """Note the time of a token; answers the time to the first one, when it is that."""
        now = self._clock()
        last, entry.last_token_at = entry.last_token_at, now
        if entry.trace is not None:
            entry.trace.token(now)
        self._metrics.tokens.labels("output").inc()
        if last is None:
            self._metrics.ttft.observe(now - entry.entered_at)
            return now - entry.entered_at
        self._metrics.itl.observe(now - last)
        return None


async def _unless_cancelled(entry: Entry, work: Coroutine[Any, Any, _T]) -> _T:
    """What `work` answers; CancelledRequestError at once when the entry is cancelled meanwhile."""
    task = asyncio.ensure_future(work)
    entry.on_cancel = task.cancel
    try:
        await asyncio.wait((task,))
        if entry.cancelled:
            raise entry.end_error
        return task.result()
    finally:
        entry.on_cancel = None
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _until_cancelled(
    entry: Entry, stream: AsyncGenerator[TokenEvent | Place | int, None], time_left: Callable[[], float]
) -> AsyncGenerator[TokenEvent | Place | int, None]:
    """The stream's items; when the entry is cancelled meanwhile, CancelledRequestError instead of the next one, and
    _TimeUp when no time is left."""
    following: asyncio.Future[TokenEvent | Place | int] | None = None
    try:
        while not entry.cancelled:
            following = asyncio.ensure_future(anext(stream))
            entry.on_cancel = following.cancel
            done, _ = await asyncio.wait((following,), timeout=time_left())
            if not done or not time_left():
                raise _TimeUp
            if following.cancelled():
                break
            try:
                item = following.result()
            except StopAsyncIteration:
                return
            yield item
        raise entry.end_error
    finally:
        entry.on_cancel = None
        if following is not None:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
        await stream.aclose()
