"""Runs one request to its end, over as many rings as it needs."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from enum import StrEnum
from typing import Any

import msgspec

from exo_mesh.base.printable import counted
from exo_mesh.base.telemetry.request_metrics import RequestMeter
from exo_mesh.domain.plan import Ballot
from exo_mesh.domain.request import (
    FinishReason,
    FrameTrace,
    Prefilled,
    Progress,
    PromptLogprobs,
    Queued,
    RequestEvent,
    TokenEvent,
)
from exo_mesh.domain.routing.choice import MOST_MOVES
from exo_mesh.domain.view import InstanceInfo
from exo_mesh.errors import (
    ContextLengthError,
    DeadlineError,
    InstanceDeletedError,
    MemoryPressureError,
    OverloadError,
    StageLostError,
)
from exo_mesh.rings.serving.dispatcher import Dispatcher
from exo_mesh.rings.serving.instance_timing import LegTimes
from exo_mesh.rings.serving.journal import JournalEntry
from exo_mesh.rings.serving.redial import Redial
from exo_mesh.wire.control_driver import DriverStreamError, Silences

PROGRESS_EVERY_S = 1.0
"""Seconds between two progress reports to the client while an instance is placed."""

LOOK_AGAIN_S = 3.0
"""Seconds until a waiting request is compared with other instances again."""

_log = logging.getLogger(__name__)


class Patience(msgspec.Struct, frozen=True):
    """Time limits of a request in seconds. queue_s: longest wait for a turn on a ring. first_s: longest silence before
    the first token (places in the queue and prefill are reported). next_s: between tokens. max_resumes: how often a
    request may continue after its ring was lost without a new token in between. total_s: of the whole request; an
    answer that is running then ends where it is."""

    queue_s: float = 120.0
    first_s: float = 120.0
    next_s: float = 30.0
    max_resumes: int = 3
    total_s: float = 300.0


class RunState(StrEnum):
    """The phase of a request."""

    REPLAYING = "replaying"
    """The kept output under its idempotency key is sent again."""
    PLACING = "placing"
    """It waits for an instance."""
    ON_RING = "on ring"
    """A driver works on it."""
    REDIALLING = "redialling"
    """The stream from the driver broke; the members are asked whether the ring is healthy."""
    RESUMING = "resuming"
    """The ring is lost."""
    ENDED = "ended"


NEXT_STATES: dict[RunState, frozenset[RunState]] = {
    RunState.REPLAYING: frozenset({RunState.PLACING, RunState.ENDED}),
    RunState.PLACING: frozenset({RunState.ON_RING, RunState.ENDED}),
    RunState.ON_RING: frozenset({RunState.PLACING, RunState.REDIALLING, RunState.RESUMING, RunState.ENDED}),
    RunState.REDIALLING: frozenset({RunState.ON_RING, RunState.RESUMING, RunState.ENDED}),
    RunState.RESUMING: frozenset({RunState.PLACING, RunState.ENDED}),
    RunState.ENDED: frozenset(),
}


class _TimeUpError(Exception):
    """A request has reached Patience.total_s."""


class _BetterElsewhereError(Exception):
    """A request that waits in a queue is expected to be done earlier at another instance."""


class RequestRun:
    """One request on its way. Call `step` until the state is ENDED or it raises, then `aclose`. An error ends the
    request in any state.

    One step does one thing: replay, wait for an instance, read one message of the driver, dial it again, or give up a
    ring. It has no timers: a watchdog calls `check`.
    """

    def __init__(self, entry: JournalEntry, rings: Dispatcher, patience: Patience, meter: RequestMeter) -> None:
        self.state = RunState.REPLAYING
        self._entry = entry
        self._rings = rings
        self._patience = patience
        self._meter = meter
        self._ends_at = entry.entered_at + patience.total_s
        self._time_is_up = False
        self._losses = 0
        self._emitted_at_loss = 0
        self._num_calls = 0
        self._wait = entry.wait
        self._instance: InstanceInfo | None = None
        self._redial: Redial | None = None
        self._trouble: StageLostError | None = None
        self._refused: tuple[InstanceInfo, MemoryPressureError] | None = None
        self._full: frozenset[str] = frozenset()
        self._is_new = True
        """Whether no ring has accepted it, so that it queues as any new request."""
        self._is_queued = False
        self._num_moves = 0
        self._wants_move = False
        self._look_at = 0.0
        self._leg: LegTimes | None = None
        self._prefill_total = 0
        self._fetched = 0

    async def step(self) -> Sequence[RequestEvent]:
        """Wait for the next events; empty if only the state changed. Raises the MeshError that ends the request."""
        try:
            self._raise_if_stopped()
            return await _STEPS[self.state](self)
        except _TimeUpError:
            return [self._end_for_time()]
        except MemoryPressureError as exc:
            if self.state is RunState.ON_RING and self._refused is None:
                await self._look_elsewhere(exc)
                return []
            if not self._entry.emitted:
                raise
            return [self._end_for_memory(exc)]
        except OverloadError as exc:
            if not self._may_ask_another():
                raise
            assert self._instance is not None
            self._full |= {self._instance.plan.instance_id}
            await self._ask_another(str(exc))
            return []
        except _BetterElsewhereError:
            self._num_moves += 1
            await self._ask_another("it waits in a queue, and another instance has room")
            return []
        except StageLostError as exc:
            self._raise_if_deleted()
            if self.state not in (RunState.ON_RING, RunState.REDIALLING):
                raise
            await self._leave_ring(RunState.RESUMING, exc)
            return []

    def check(self, now: float) -> float:
        """End a wait that is too long; returns when to check again. For a Watchdog."""
        if now >= self._ends_at:
            self._time_is_up = True
            self._wait.interrupt(self._entry.end_error if self._entry.cancelled else _TimeUpError())
            return math.inf
        if self._wait.call is None:
            return self._ends_at
        if (error := self._wait.call.overdue(now)) is not None:
            self._wait.call.interrupt(error)
        elif self._is_queued and self._moves(now):
            self._wait.call.interrupt(_BetterElsewhereError())
        return min(self._ends_at, self._wait.call.deadline, now if self._wants_move else math.inf)

    def _moves(self, now: float) -> bool:
        """Whether this request, which waits in a queue, moves to another instance now. All waiting requests have their
        turn to be compared.

        It moves one check after a better instance was found, if it still waits: after a stall of the event loop it may
        have its turn already, and the message that says so is read before the next check.
        """
        if self._wants_move:
            self._wants_move = False
            return True
        if self._instance is None or self._num_moves >= MOST_MOVES or now < self._look_at:
            return False
        found = self._rings.moves(self._entry, self._instance, self._full)
        if found is not None:
            self._look_at = now + LOOK_AGAIN_S
        self._wants_move = bool(found)
        return False

    async def aclose(self) -> None:
        """Free what the request holds in any state: its call to a driver, its part in a placement."""
        await self._let_go()

    # one step for each state

    async def _replay(self) -> Sequence[RequestEvent]:
        """Send the output that is kept under the same idempotency key."""
        events = self._entry.replay()
        is_whole = bool(events) and isinstance(events[-1], TokenEvent) and events[-1].finish is not None
        self._go(RunState.ENDED if is_whole else RunState.PLACING)
        return events

    async def _place(self) -> Sequence[RequestEvent]:
        """Report progress while an instance is found or placed; then call the driver."""
        if self._wait.work is None:
            self._entry.instance_id = ""
            self._wait.work = asyncio.ensure_future(self._rings.find(self._entry, self._refused, self._full))
        await asyncio.wait((self._wait.work,), timeout=PROGRESS_EVERY_S)
        self._raise_if_stopped()
        self._raise_if_deleted()
        if not self._wait.work.done():
            return [self._note_progress(Progress(*self._rings.progress(self._entry.model)))]
        work, self._wait.work = self._wait.work, None
        self._instance = work.result()
        self._redial = self._rings.redial(self._instance)
        self._open_call(self._instance, self._redial)
        return []

    def _note_progress(self, progress: Progress) -> Progress:
        """Pass progress on. While files arrive, the time limit of the request is extended: it counts from the last byte
        that came."""
        if progress.phase == "fetching" and progress.done != self._fetched:
            self._fetched = progress.done
            self._ends_at = self._rings.clock() + self._patience.total_s
        return progress

    async def _read(self) -> Sequence[RequestEvent]:
        """Read one message of the driver. After a broken stream the same ring is called again as long as it is healthy:
        other requests on it continue, and nothing is loaded again."""
        assert self._wait.call is not None and self._redial is not None and self._leg is not None
        assert self._instance is not None
        try:
            event = await self._wait.call.read()
        except DriverStreamError as exc:
            await self._leave_ring(RunState.REDIALLING, exc)
            return [Progress("recovering")]
        self._redial.heard()
        self._entry.prefix = self._wait.call.prefix or self._entry.prefix
        self._is_queued = isinstance(event, Queued) and bool(event.place) and not self._entry.emitted
        if self._wants_move and not self._is_queued:
            self._wants_move, self._entry.instance_id = False, self._instance.plan.instance_id
        if isinstance(event, Queued):
            if not event.place:
                self._leg.turn()
            return [Progress("queued", event.place, event.length, event.wait_s)]
        if isinstance(event, Prefilled):
            self._entry.prefilled = event.num_tokens
            return [Progress("prefill", event.num_tokens, self._prefill_total)]
        if isinstance(event, PromptLogprobs):
            new = self._entry.accept_prompt(event)
            return [] if new is None else [new]
        if event.events[-1].finish is not None:
            self._go(RunState.ENDED)
        respelling = self._entry.take_respelling()
        tokens = [*respelling, *(token for token in event.events if self._entry.accept(token))]
        if tokens and tokens[0].index == 0:
            self._first_came(tokens[0])
        self._leg.came(len(tokens))
        return tokens

    def _first_came(self, event: TokenEvent) -> None:
        """Note the first token: the instance has computed the prompt, and keeps it for the next turn."""
        assert self._instance is not None and self._leg is not None
        if event.cached:
            self._leg.copied(self._entry.cached_tokens)
        self._rings.computed(self._entry, self._instance)

    async def _dial_again(self) -> Sequence[RequestEvent]:
        """Call the same driver once its members report that the ring is healthy. Raises StageLostError if it is
        lost."""
        assert self._instance is not None and self._redial is not None
        self._wait.work = asyncio.ensure_future(self._redial.wait(len(self._entry.emitted)))
        await asyncio.wait((self._wait.work,))
        self._raise_if_stopped()
        work, self._wait.work = self._wait.work, None
        work.result()
        self._meter.redialled()
        _log.info("request %s: %s; calling the same ring again", self._entry.request.request_id, self._trouble)
        self._open_call(self._instance, self._redial)
        return []

    async def _resume(self) -> Sequence[RequestEvent]:
        """Leave a lost ring for another one. Raises the error of the loss after too many losses."""
        assert self._instance is not None and self._trouble is not None
        self._rings.avoid(self._instance)
        if self._count_loss():
            raise self._trouble
        self._meter.resumed()
        _log.warning(
            "request %s: %s; resuming after %s",
            self._entry.request.request_id,
            self._trouble,
            counted(len(self._entry.emitted), "token"),
        )
        self._go(RunState.PLACING)
        return [Progress("recovering")]

    # helpers of the steps

    def _go(self, state: RunState) -> None:
        assert state in NEXT_STATES[self.state], f"{self.state} -> {state}"
        self.state = state

    def _open_call(self, instance: InstanceInfo, redial: Redial) -> None:
        """Send the rest of the request to the driver. Raises ContextLengthError if the ring has no room for it."""
        plan = instance.plan
        request = self._entry.resumption(as_text=plan.takes_text)
        if self._num_calls:  # a driver may not have noticed yet that an earlier stream broke, and takes no id twice
            request_id = f"{request.request_id}~{self._num_calls}"
            request = replace(request, request_id=request_id, resumed=not self._is_new)
        self._num_calls, self._is_new = self._num_calls + 1, False
        self._is_queued = self._wants_move = False
        wanted = len(request.prompt_ids) + request.max_tokens
        if wanted > plan.context_limit:
            raise ContextLengthError(
                f"{len(request.prompt_ids)} prompt tokens and up to {request.max_tokens} output tokens make {wanted}; "
                f"{plan.instance_id} has a context limit of {plan.context_limit} tokens",
                param="max_tokens",
            )
        self._prefill_total = len(request.prompt_ids) + len(request.resume_ids)
        silences = Silences(self._patience.first_s, self._patience.next_s, self._patience.queue_s)
        address = redial.address(instance.endpoints[-1])
        self._wait.call = self._rings.call(
            address, instance, request, silences, self._begin_leg(instance), self._took_ballot
        )
        self._leg = self._rings.leg(self._entry, instance)
        self._go(RunState.ON_RING)

    def _may_ask_another(self) -> bool:
        """Whether the instance has refused the request because its queue is full, and another instance has not yet."""
        if self.state is not RunState.ON_RING or self._entry.emitted or self._instance is None:
            return False
        return self._rings.has_room_besides(self._entry, self._full | {self._instance.plan.instance_id})

    async def _ask_another(self, why: str) -> None:
        """Send a request to another instance; without a token it is a new request there."""
        _log.info("request %s: %s; asking another instance", self._entry.request.request_id, why)
        await self._let_go()
        self._is_new, self._is_queued = not self._entry.emitted, False
        self._go(RunState.PLACING)

    async def _look_elsewhere(self, refusal: MemoryPressureError) -> None:
        """Look for another ring after one refused or ended the request because its machine is short of memory. To the
        other rings, a request without a token is a new request."""
        assert self._instance is not None
        self._refused = self._instance, refusal
        await self._let_go()
        self._is_new = not self._entry.emitted
        self._go(RunState.PLACING)

    async def _leave_ring(self, state: RunState, trouble: StageLostError) -> None:
        self._trouble = trouble
        await self._let_go()
        self._go(state)

    async def _let_go(self) -> None:
        """Cancel everything that the request waits for, and free everything that it holds."""
        call, self._wait.call = self._wait.call, None
        work, self._wait.work = self._wait.work, None
        if work is not None:
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)
        if call is not None:
            await call.aclose()

    def _begin_leg(self, instance: InstanceInfo) -> Callable[[list[FrameTrace]], None]:
        """Begin a leg of a traced request; returns the callback for its laps on this ring."""
        trace, plan = self._entry.trace, instance.plan
        if trace is None:
            return lambda frames: None
        leg = trace.begin_leg(plan.instance_id, [peer_id[:8] for peer_id in plan.peer_ids], self._rings.clock())
        return leg.add

    def _took_ballot(self, ballot: Ballot) -> None:
        """Note that the ring has lost a stage and continues in the same stream. Raises StageLostError after too many
        losses."""
        self._meter.resumed()
        assert self._instance is not None
        self._rings.took_over(self._entry, self._instance, ballot)
        _log.warning(
            "request %s continues under ballot %s after %s",
            self._entry.request.request_id,
            ballot,
            counted(len(self._entry.emitted), "token"),
        )
        if self._count_loss():
            raise StageLostError(f"its ring has been lost more than {self._patience.max_resumes} times in a row")

    def _count_loss(self) -> bool:
        """Count a loss of the ring; returns True after more than max_resumes of them without a new token in between:
        then the request itself may be the cause."""
        emitted = len(self._entry.emitted)
        self._losses = self._losses + 1 if emitted == self._emitted_at_loss else 1
        self._emitted_at_loss = emitted
        return self._losses > self._patience.max_resumes

    def _raise_if_stopped(self) -> None:
        if self._entry.cancelled:
            raise self._entry.end_error
        if self._time_is_up:
            raise _TimeUpError

    def _raise_if_deleted(self) -> None:
        """Raise if the request's instance was deleted: placing the model again would undo the deletion."""
        if self._instance is not None and self._rings.is_deleted(self._instance):
            raise InstanceDeletedError(
                f"instance {self._instance.plan.instance_id} of {self._entry.model} was deleted while it served this "
                "request; send the request again to place the model again"
            )

    def _end_for_memory(self, error: MemoryPressureError) -> TokenEvent:
        """End a request for which no machine has memory any more: the tokens so far are its answer."""
        self._entry.is_pressure_abort = True
        _log.warning(
            "request %s ends with %s: %s",
            self._entry.request.request_id,
            counted(len(self._entry.emitted), "token"),
            error,
        )
        self._go(RunState.ENDED)
        return TokenEvent(self._entry.next_index, None, finish=FinishReason.LENGTH)

    def _end_for_time(self) -> TokenEvent:
        """End a request that has reached total_s: the tokens so far are its answer. Raises DeadlineError if there are
        none."""
        total_s = self._patience.total_s
        self._entry.timed_out = True
        if not self._entry.emitted:
            raise DeadlineError(f"no token came within the {total_s:g} s that a request may take") from None
        _log.info("request %s ends after %g s, the limit for one request", self._entry.request.request_id, total_s)
        self._go(RunState.ENDED)
        return TokenEvent(self._entry.next_index, None, finish=FinishReason.LENGTH)


_STEPS: dict[RunState, Callable[[RequestRun], Coroutine[Any, Any, Sequence[RequestEvent]]]] = {
    RunState.REPLAYING: RequestRun._replay,
    RunState.PLACING: RequestRun._place,
    RunState.ON_RING: RequestRun._read,
    RunState.REDIALLING: RequestRun._dial_again,
    RunState.RESUMING: RequestRun._resume,
}
