"""The driver: the runner of the last stage. It has the logits, so it schedules, samples and answers."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial

import numpy as np

from exo_mesh.domain.frame import Frame, Insert, Op, Remove, Shutdown
from exo_mesh.domain.plan import Ballot
from exo_mesh.domain.request import GenerateRequest
from exo_mesh.errors import CancelledRequestError, InputError, MeshError, OverloadError, error_from_code
from exo_mesh.proto.driver_pb2 import GenerateEvents
from exo_mesh.proto.runner_pb2 import Heartbeat
from exo_mesh.runner.generation import Generation, error_events, prefill_events, token_events, trace_events
from exo_mesh.runner.laps import LapTimes
from exo_mesh.runner.mailbox import PARK_AT, Mailbox
from exo_mesh.runner.pace import Pace
from exo_mesh.runner.scheduler import Limits, Scheduler, Work
from exo_mesh.transport.plan_codec import ballot_to_proto

SIGN_OF_LIFE_S = 5.0
"""How often a request that waits in the queue hears of the ring; its entry peer gives up after 30 s of silence."""

MAX_RETRY_AFTER_S = 30.0

LEARN_EVERY_S = 0.005
"""Decode laps are looked at no more often than this: of a ring as fast as that, a look at each would be a tenth."""

_log = logging.getLogger(__name__)


class Driver:
    """Frames begin and end here. All methods run on the event loop; `send` starts a frame round the ring.

    Invariant: a sequence is in the scheduler exactly as long as its generation is in `_live`; a stage that was told
    Insert is told Remove, however the request ends.
    """

    def __init__(self, ballot: Ballot, limits: Limits, send: Callable[[Frame], None]) -> None:
        self._ballot = ballot
        self._ballot_proto = ballot_to_proto(ballot)
        self._pace = Pace(limits.num_stages)
        self._scheduler = Scheduler(limits, self._pace)
        self._limits = limits
        self._send = send
        self._live: dict[int, Generation] = {}
        self._by_request: dict[str, int] = {}
        self._ops: list[Op] = []
        self._in_flight: dict[int, Work] = {}
        self._last_step = 0
        self._last_sequence = 0
        self._signed_at = 0.0
        self._news: list[tuple[Mailbox, Callable[[], GenerateEvents]]] = []
        self.laps = LapTimes()
        self.tokens = 0
        self.evictions = 0
        self._num_traced = 0
        self._learnt_at = 0.0

    @property
    def num_waiting(self) -> int:
        return self._scheduler.num_waiting

    @property
    def num_running(self) -> int:
        return self._scheduler.num_running

    def describe_load(self, beat: Heartbeat) -> None:
        """Write into a heartbeat how the requests here are. From any thread: numbers of one moment or the next."""
        scheduler = self._scheduler
        beat.parked, beat.kv_tokens = scheduler.num_parked, scheduler.num_held
        beat.kv_pool_tokens = scheduler.max_tokens
        beat.evictions = self.evictions
        waiting = [self._live.get(sequence.id) for sequence in list(scheduler.waiting)]
        since = min((generation.submitted_at for generation in waiting if generation is not None), default=None)
        beat.oldest_wait_s = 0.0 if since is None else max(0.0, time.perf_counter() - since)

    def submit(self, request: GenerateRequest, mailbox: Mailbox) -> None:
        """Queue a request, or refuse it through its mailbox."""
        self._last_sequence += 1
        generation = Generation.begin(request, self._last_sequence, mailbox)
        if request.request_id in self._by_request:
            self._fail(generation, InputError(f"request {request.request_id} is already running here"))
        elif not self._scheduler.submit(generation.sequence):
            self._fail(generation, OverloadError(self._scheduler.why_refused))
        else:
            self._live[self._last_sequence] = generation
            self._num_traced += bool(request.trace_id)
            self._by_request[request.request_id] = self._last_sequence
            self.pump()

    def cancel(self, request_id: str, mailbox: Mailbox) -> None:
        """Whoever waits at `mailbox` is gone: free the sequence everywhere. An unknown request changes nothing, and one
        of the same id that somebody else waits for goes on."""
        sequence_id = self._by_request.get(request_id)
        if sequence_id is not None and self._live[sequence_id].mailbox is mailbox:
            self._end(sequence_id, CancelledRequestError("the request was cancelled"))
            self.pump()

    def unpark(self, request_id: str, mailbox: Mailbox) -> None:
        """Whoever waits at `mailbox` has taken all that was in it: the sequence goes on."""
        mailbox.parked = False
        sequence_id = self._by_request.get(request_id)
        if sequence_id is not None and self._live[sequence_id].mailbox is mailbox:
            self._live[sequence_id].sequence.parked = False
            self.pump()

    def returned(self, frame: Frame, logits: np.ndarray | None, *, is_apart: bool = False) -> None:
        """A frame came round and the last stage has computed it; logits are float32 `[sum(num_logits), vocab]`.

        is_apart: the engine goes on meanwhile, in another thread. The next frame leaves before anything is learnt from
        this one, for the ring waits for it.
        """
        now = time.perf_counter()
        lap_s = self.laps.returned(frame.step, now)
        work = self._in_flight.pop(frame.step, None)
        if work is not None:
            self._scheduler.came_round(work)
        if self._scheduler.num_waiting and now - self._signed_at > SIGN_OF_LIFE_S:
            self._look_after_waiting(now)
        if lap_s is not None and self._num_traced:
            self._note_lap(frame, now - lap_s, lap_s)
        if frame.reports:
            self._scheduler.pressure = max(report.pressure for report in frame.reports)
            self._scheduler.room = min(report.kv_tokens for report in frame.reports)
        for fault in frame.faults:
            self._end(fault.sequence, error_from_code(fault.code, fault.message))
        if logits is not None:
            self._draw(frame, logits)
        draw_s = time.perf_counter() - now
        for row in frame.rows:
            if not row.num_logits and row.sequence in self._live:
                self._tell(self._live[row.sequence], prefill_events, row.pos0 + row.n)
        self.pump()
        if work is not None and lap_s is not None and (work.is_prefill or now - self._learnt_at > LEARN_EVERY_S):
            self._learnt_at = now
            self._learn(work, lap_s + draw_s, frame, 0.0 if is_apart else draw_s)

    def shut_down(self) -> None:
        """End all requests and tell every stage to stop."""
        for sequence_id in list(self._live):
            self._end(sequence_id, CancelledRequestError("the instance was stopped"))
        self._ops.append(Shutdown())
        self._start(Work((), ()))

    def deliver_news(self) -> None:
        """Tell the callers what happened since the last call. Apart, so that the next frame can leave first."""
        for mailbox, make in self._news:
            mailbox.post(make())
        self._news.clear()

    def pump(self) -> None:
        """Start frames as long as there is work and fewer than the useful number are on the ring."""
        for sequence in self._scheduler.evict():
            self._ops.append(Remove(sequence.id))
            self.evictions += 1
        for sequence in self._scheduler.admit():
            self._ops.append(Insert(sequence.id, self._live[sequence.id].max_positions))
        while (work := self._scheduler.next_work()) is not None:
            self._start(work)
        if self._ops and not self._in_flight:
            self._start(Work((), ()))  # nothing to compute, but stages must hear of the end of a sequence

    def _look_after_waiting(self, now: float) -> None:
        """Tell those who wait in the queue that the ring moves on: silence would mean to them that it does not. Whoever
        has waited too long is refused, unless it was running already."""
        self._signed_at = now
        for sequence in list(self._scheduler.waiting):
            generation = self._live[sequence.id]
            waited_s = now - generation.submitted_at
            if waited_s > self._limits.max_wait_s and not sequence.resumed:
                retry_after_s = min(MAX_RETRY_AFTER_S, self._limits.max_wait_s)
                error = OverloadError(f"waited {waited_s:.0f} s for a turn on the ring", retry_after_s=retry_after_s)
                self._end(sequence.id, error)
            else:
                self._tell(generation, prefill_events, 0)

    def _start(self, work: Work) -> None:
        self._last_step += 1
        frame = Frame(
            ballot=self._ballot,
            step=self._last_step,
            batch=self._last_step % self._limits.num_stages,
            rows=work.rows,
            token_ids=work.token_ids,
            ops=tuple(self._ops),
        )
        self._ops.clear()
        self._in_flight[frame.step] = work
        self.laps.sent(frame.step, time.perf_counter())
        self._send(frame)

    def _note_lap(self, frame: Frame, sent_at: float, lap_s: float) -> None:
        for row in frame.rows:
            if (generation := self._live.get(row.sequence)) is not None:
                generation.note_lap(frame, sent_at, lap_s)

    def _learn(self, work: Work, lap_s: float, frame: Frame, draw_s: float) -> None:
        """draw_s: what drawing kept the last stage from computing another frame, like its layers."""
        waited_s = sum(report.waited_s for report in frame.reports)
        if work.is_prefill:
            self._pace.prefilled(len(work.token_ids), lap_s, waited_s)
        elif work.rows and frame.reports:
            compute_s = [report.compute_s for report in frame.reports]
            compute_s[-1] += draw_s
            self._pace.decoded(len(work.rows), lap_s, compute_s, waited_s)

    def _draw(self, frame: Frame, logits: np.ndarray) -> None:
        stop = 0
        for row in frame.rows:
            stop += row.num_logits
            if row.num_logits and (generation := self._live.get(row.sequence)) is not None:
                self._draw_one(generation, logits[stop - 1])

    def _draw_one(self, generation: Generation, logits: np.ndarray) -> None:
        index = generation.index
        try:
            draw, finish = generation.draw(logits)
        except MeshError as exc:
            self._end(generation.sequence.id, exc)
            return
        self.tokens += 1
        if finish and generation.laps:
            self._tell(generation, trace_events, generation.laps)
        self._tell(generation, token_events, index, draw, finish)
        if finish:
            self._end(generation.sequence.id, None)
        else:
            self._scheduler.token_drawn(generation.sequence, draw.token_id)
            if generation.mailbox.backlog >= PARK_AT:
                generation.mailbox.parked = generation.sequence.parked = True

    def _end(self, sequence_id: int, error: MeshError | None) -> None:
        """Forget a request; `error` is posted unless the request ended well. Unknown sequences change nothing."""
        generation = self._live.pop(sequence_id, None)
        if generation is None:
            return
        del self._by_request[generation.request.request_id]
        self._num_traced -= bool(generation.request.trace_id)
        if self._scheduler.remove(sequence_id):
            self._ops.append(Remove(sequence_id))
        if error is not None:
            if generation.laps:
                self._tell(generation, trace_events, generation.laps)
            self._fail(generation, error)

    def _fail(self, generation: Generation, error: MeshError) -> None:
        self._tell(generation, error_events, error)

    def _tell(self, generation: Generation, make: Callable[..., GenerateEvents], *arguments: object) -> None:
        self._news.append((generation.mailbox, partial(make, self._ballot_proto, *arguments)))
