"""The driver: the runner of the last stage. It has the logits, so it schedules, samples and answers requests."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial

import numpy as np

from exo_mesh.domain.frame import (
    NO_COPY,
    PIXELS,
    UNKNOWN_OP,
    Copy,
    Fault,
    Frame,
    Insert,
    Keep,
    Op,
    Remove,
    Retain,
    Row,
    Shutdown,
)
from exo_mesh.domain.plan import Ballot
from exo_mesh.domain.replay import Kept
from exo_mesh.domain.request import FinishReason, GenerateRequest, TokenEvent
from exo_mesh.domain.tensor import Tensor
from exo_mesh.errors import (
    CancelledRequestError,
    InputError,
    KeyReusedError,
    MemoryPressureError,
    MeshError,
    OverloadError,
    SupersededError,
    error_from_code,
)
from exo_mesh.proto.driver_pb2 import GenerateEvents
from exo_mesh.proto.runner_pb2 import Heartbeat
from exo_mesh.runner.constraint import Constraint
from exo_mesh.runner.generation import (
    LAPS_AT_ONCE,
    Drawn,
    Generation,
    end_events,
    error_events,
    prefill_events,
    prefix_events,
    prompt_events,
    queue_events,
    token_events,
    trace_events,
    vector_events,
)
from exo_mesh.runner.grammars import Grammars
from exo_mesh.runner.laps import LapTimes
from exo_mesh.runner.mailbox import PARK_AT, Mailbox
from exo_mesh.runner.pictures.sender import PictureSender
from exo_mesh.runner.prefix.cache import PrefixCache
from exo_mesh.runner.prefix.shared_prompts import SharedPrompts
from exo_mesh.runner.replays import Replays, replay_messages
from exo_mesh.runner.sampling.prompt_logprobs import max_logit_rows, pieces
from exo_mesh.runner.scheduling.pace import Pace
from exo_mesh.runner.scheduling.scheduler import Scheduler, SchedulerLimits, Work
from exo_mesh.runner.scheduling.sequence import Sequence
from exo_mesh.runner.scheduling.turns import TurnClock
from exo_mesh.telemetry.durations import LAP_BOUNDS_S, WAIT_BOUNDS_S, Durations
from exo_mesh.transport.plan_codec import ballot_to_proto

SIGN_OF_LIFE_S = 1.0
"""Seconds between two messages to a waiting request about its place in the queue, as long as frames come round. The
entry peer gives up after 30 s of silence."""

IDLE_LAP_S = 5.0
"""Time between two frames of an idle ring whose stages keep sequences: as long as a machine that is short of memory may
wait for them."""

LEARN_EVERY_S = 0.005
"""Minimum time between samples of decode laps; sampling every lap of a fast ring would cost about 10 %."""

_log = logging.getLogger(__name__)


class Driver:
    """Starts frames and takes them back after their lap. All methods run on the event loop; `send` starts a frame.

    Invariant: a sequence is in the scheduler exactly as long as its generation is in `_live`. A stage that got Insert
    for a sequence also gets Remove, however the request ends.
    """

    def __init__(
        self,
        ballot: Ballot,
        limits: SchedulerLimits,
        send: Callable[[Frame], None],
        grammars: Grammars | None = None,
        prefix: PrefixCache | None = None,
    ) -> None:
        self._ballot = ballot
        self._ballot_proto = ballot_to_proto(ballot)
        self._pace = Pace(limits.num_stages)
        self._scheduler = Scheduler(limits, self._pace)
        self._limits = limits
        self._send = send
        self._grammars = grammars
        self._live: dict[int, Generation] = {}
        self._by_request: dict[str, int] = {}
        self._ops: list[Op] = []
        self._in_flight: dict[int, Work] = {}
        self._last_step = 0
        self._last_sequence = 0
        self._signed_at = 0.0
        self._shared = SharedPrompts()
        self.prefix = PrefixCache(limits.num_stages, most_tokens=0) if prefix is None else prefix
        self._retained: set[int] = set()
        """Sequences that stages hold over a change of the plan, and that have not begun again."""
        self._returned_at = 0.0
        self._knows_stages = False
        """Whether all stages of this plan have reported their limits of the prefix cache."""
        self._pictures = PictureSender()
        self._turns = TurnClock()
        self._news: list[tuple[Mailbox, Callable[[], GenerateEvents]]] = []
        self.replays = Replays()
        self.laps = LapTimes()
        self.hops = Durations(LAP_BOUNDS_S)
        self.waits = Durations(WAIT_BOUNDS_S)
        self.tokens = 0
        self.prompts = 0
        self.evictions = 0
        self.laps_saved = 0
        self._num_traced = 0
        self._learnt_at = 0.0

    @property
    def num_waiting(self) -> int:
        return self._scheduler.num_waiting

    @property
    def num_running(self) -> int:
        return self._scheduler.num_running

    def describe_load(self, beat: Heartbeat) -> None:
        """Write the load of this driver into a heartbeat. From any thread; the numbers may be of slightly different
        moments."""
        scheduler = self._scheduler
        beat.slots = self._limits.max_running
        beat.parked, beat.kv_tokens = scheduler.num_parked, scheduler.num_held
        beat.kv_pool_tokens = scheduler.max_tokens
        beat.evictions, beat.laps_saved = self.evictions, self.laps_saved
        beat.shared_tokens, beat.prompts = self._shared.saved_tokens, self.prompts
        self.prefix.describe(beat.prefix)
        waiting = [self._live.get(sequence.id) for sequence in list(scheduler.waiting)]
        since = min((generation.submitted_at for generation in waiting if generation is not None), default=None)
        beat.oldest_wait_s = 0.0 if since is None else max(0.0, time.perf_counter() - since)
        for told, durations in (
            (beat.laps_took, self.laps.took), (beat.hops_took, self.hops), (beat.queue_waits, self.waits)
        ):  # fmt: skip
            told.counts.extend(durations.counts)
            told.sum_s = durations.sum_s

    def change(self, ballot: Ballot, limits: SchedulerLimits, kept_from: int) -> int:
        """Continue under a new ballot with other stages. Returns how many running requests continue, at the head of the
        queue. Frames that were on their way are lost; tokens that were drawn are not.

        kept_from: stages from this one on keep the KV that they have; if it is the number of stages, no stage does.
        """
        lost = self._shared.lose()
        held = self._came_round(lost)
        if kept_from >= limits.num_stages:
            held = {}
        in_flight = {row.sequence for work in self._in_flight.values() for row in work.rows}
        self.prefix.change(limits.num_stages, kept_from, in_flight.union(lost))
        self._knows_stages = False
        self._ballot, self._ballot_proto = ballot, ballot_to_proto(ballot)
        self._limits, self._pace = limits, Pace(limits.num_stages)
        self._in_flight.clear()
        for generation in self._live.values():
            generation.late = None  # its row goes round again
        self.laps.forget_sent()
        self._last_step = 0
        self._pictures.restart()
        resumed = self._scheduler.rewind(limits, self._pace, kept_from, held)
        self._retained = set(held)
        self._ops = [Retain((*held, *self.prefix.held)), *map(Keep, self.prefix.held)]
        self.reassure()  # by which entry peers learn of the ballot
        self.pump()
        return resumed

    def look(self) -> None:
        """Send an empty frame round if none has come for IDLE_LAP_S while stages keep sequences: its reports show if
        some machine needs their memory."""
        if self.prefix.tokens and not self._in_flight and time.perf_counter() - self._returned_at >= IDLE_LAP_S:
            self._start(Work((), ()))

    def reassure(self) -> None:
        """Notify all callers that their requests are alive: entry peers take silence for the end of the ring."""
        for generation in self._live.values():
            self._tell(generation, prefill_events, 0)

    def _came_round(self, lost_copies: list[int]) -> dict[int, int]:
        """The positions whose rows every stage has computed, by running sequence."""
        held = {sequence.id: sequence.computed for sequence in self._scheduler.running}
        for work in self._in_flight.values():
            for row in work.rows:
                if row.sequence in held:
                    held[row.sequence] = min(held[row.sequence], row.pos0)
        return {**held, **{lost: 0 for lost in lost_copies if lost in held}}

    def submit(self, request: GenerateRequest, mailbox: Mailbox) -> None:
        """Queue a request, or refuse it through its mailbox."""
        self._last_sequence += 1
        kept: Kept | None = None
        if request.key_hash:
            try:
                kept = self.replays.open(request)
            except KeyReusedError as exc:
                self._fail(Generation.begin(request, self._last_sequence, mailbox), exc)
                return
            assert kept is not None, "it has a key"
            request = self._take_over(request, kept, mailbox)
            if kept.finish is not None:
                return
        generation = Generation.begin(request, self._last_sequence, mailbox)
        generation.take_kept(kept)
        if request.request_id in self._by_request:
            self._refuse(generation, InputError(f"request {request.request_id} is already running here"))
        elif generation.is_done:
            self._refuse(generation, None)
        elif not self._scheduler.submit(generation.sequence):
            self._refuse(generation, self._overload())
        else:
            self._live[self._last_sequence] = generation
            self._num_traced += bool(request.trace_id)
            self._by_request[request.request_id] = self._last_sequence
            self._constrain(generation)
            self.pump()
            if any(sequence is generation.sequence for sequence in self._scheduler.waiting):
                self._tell_places(generation)

    def _take_over(self, request: GenerateRequest, kept: Kept, mailbox: Mailbox) -> GenerateRequest:
        """Send the caller what is kept of an answer and was not received yet, and end the sequence that works on it
        now. Returns the request for the rest."""
        worker = self.replays.worker(request.key_hash)
        if worker is not None:
            self._end(worker, SupersededError("the same request was sent again; the newer call continues it"))
        request, events = self.replays.begin(request, kept, self._last_sequence)
        for piece in pieces(kept.prompt if request.num_scores else ()):
            self._news.append((mailbox, partial(prompt_events, self._ballot_proto, piece)))
        for message in replay_messages(self._ballot_proto, events):
            self._news.append((mailbox, partial(_the, message)))
        if kept.finish is not None:
            self.replays.release(kept)
        return request

    def cancel(self, request_id: str, mailbox: Mailbox) -> None:
        """Free the sequence everywhere: the caller behind `mailbox` is gone. An unknown request changes nothing;
        neither does a request with the same id and another mailbox."""
        sequence_id = self._by_request.get(request_id)
        if sequence_id is not None and self._live[sequence_id].mailbox is mailbox:
            self._end(sequence_id, CancelledRequestError("the request was cancelled"))
            self.pump()

    def unpark(self, request_id: str, mailbox: Mailbox) -> None:
        """Continue a parked sequence: the caller behind `mailbox` has read all that was in it."""
        mailbox.parked = False
        sequence_id = self._by_request.get(request_id)
        if sequence_id is not None and self._live[sequence_id].mailbox is mailbox:
            self._scheduler.unpark(self._live[sequence_id].sequence)
            self.pump()

    def returned(
        self, frame: Frame, logits: np.ndarray | None, hidden: np.ndarray | None = None, *, is_apart: bool = False
    ) -> None:
        """Take back a frame that came round and that the last stage has computed; logits are float32
        `[sum(num_logits), vocab]`, hidden states float32 `[sum(num_hidden), width]`.

        is_apart: the engine computes meanwhile in another thread. The ring waits for the next frame, so that frame is
        sent before anything is learnt from this one.
        """
        now = self._returned_at = time.perf_counter()
        lap_s = self.laps.returned(frame.step, now)
        work = self._in_flight.pop(frame.step, None)
        if work is not None:
            self._scheduler.came_round(work)
        if self._scheduler.num_waiting and now - self._signed_at > SIGN_OF_LIFE_S:
            self._signed_at = now
            self._tell_places()
        if lap_s is not None and self._num_traced:
            self._note_lap(frame, now - lap_s, lap_s)
        if frame.reports:
            levels = [report.pressure for report in frame.reports]
            self._scheduler.pressure = max(levels)
            self._scheduler.pressed_stage = levels.index(self._scheduler.pressure)
            self._scheduler.room = min(report.kv_tokens for report in frame.reports)
            if (lone := self._scheduler.lone_at_critical(now)) is not None:
                text = f"the machine of stage {self._scheduler.pressed_stage} has no memory left for this request"
                self._end(lone.id, MemoryPressureError(text))
            if not self._knows_stages:
                self._knows_stages = True
                self.prefix.learn(frame.reports)
        for fault in frame.faults:
            self._take_fault(fault)
        if self._shared.came_round(frame.step):
            self.prefix.copied(well=True)
        self._pictures.came_round(frame.step)
        if logits is not None:
            self._draw(frame, logits)
        if work is not None and work.is_prefill:
            self._pool(frame, hidden)
        draw_s = time.perf_counter() - now
        for row in frame.rows if work is not None and work.is_prefill else ():
            if row.sequence in self._live:
                self._tell(self._live[row.sequence], prefill_events, row.pos0 + row.n)
        self.pump()
        if work is not None and lap_s is not None and (work.is_prefill or now - self._learnt_at > LEARN_EVERY_S):
            self._learnt_at = now
            self._learn(work, lap_s + draw_s, frame, 0.0 if is_apart else draw_s)

    def shut_down(self) -> None:
        """End all requests and send every stage the op to stop."""
        for sequence_id in list(self._live):
            self._end(sequence_id, CancelledRequestError("the instance was stopped"))
        self._ops.append(Shutdown())
        self._start(Work((), ()))

    def deliver_news(self) -> None:
        """Deliver all events since the last call to the callers. A step of its own, so that the next frame can leave
        first."""
        for mailbox, make in self._news:
            mailbox.post(make())
        self._news.clear()

    def pump(self) -> None:
        """Start frames as long as there is work and fewer than the useful number are on the ring."""
        now, num_turns = time.perf_counter(), 0
        self._make_room(now)
        for sequence in self._scheduler.evict():
            if not sequence.waits:
                self._ops.append(Remove(sequence.id))
            sequence.source = None
            self._shared.forget(sequence.id)
            self.prefix.lose(sequence.id)
            self._pictures.forget(sequence.id)
            self.evictions += 1
        for sequence in self._scheduler.admit():
            generation = self._live[sequence.id]
            self._retained.discard(sequence.id)
            if not generation.index:  # not one that has been running before
                self.waits.add(now - generation.submitted_at)
            if not self._shared.must_wait(sequence, self._scheduler.running):
                self._begin(sequence, now, may_wait=True)
            if generation.queued:
                generation.queued = False
                num_turns += 1
                self._tell(generation, queue_events, 0)
        self._turns.note(self._scheduler.num_waiting, num_turns, now)
        self._copy_ready()
        if self._ops:  # a sequence has begun, maybe
            self._make_room(now)
        self._send_picture()
        scheduler = self._scheduler
        while (work := scheduler.next_work()) is not None:
            self._start(work)
            if work.is_prefill:
                self._note_prompts(work, now)
                self._copy_ready()
            elif scheduler.is_exhausted:
                break
        if self._ops and not self._in_flight:
            self._start(Work((), ()))  # nothing to compute, but stages must hear of the end of a sequence

    def _begin(self, sequence: Sequence, now: float, *, may_wait: bool = False) -> None:
        """Let every stage begin a sequence, with the part of its prompt that the prefix cache has. Images in the rest
        go first. may_wait: if a running request computes more of it at this moment, the sequence begins later, as a
        copy of that."""
        generation = self._live[sequence.id]
        if may_wait and self.prefix.shares_running:
            known = self.prefix.known(sequence)
            if self._shared.must_follow(sequence, known, self._scheduler.running):
                return
        if not generation.is_compared and (report := self.prefix.nearest(sequence)) is not None:
            generation.is_compared = True
            self._tell(generation, prefix_events, report)
        reuse = self.prefix.find(sequence, now)
        if reuse is None:
            self._ops.append(Insert(sequence.id, generation.max_positions))
            self._show_rest(sequence, 0)
            return
        op = Copy(sequence.id, reuse.source, reuse.length, generation.max_positions, reuse.first_stage)
        self._ops.append(self._shared.made(op, saves=reuse.length))
        self._scheduler.copied(sequence, reuse.length, reuse.first_stage)
        self._show_rest(sequence, 0 if reuse.first_stage else reuse.length)
        generation.cached = min(reuse.length, len(generation.request.prompt_ids))
        self._tell(generation, prefill_events, generation.cached)

    def _note_prompts(self, work: Work, now: float) -> None:
        """Let other prompts begin with the prompts that this chunk has completed."""
        for row in work.rows:
            sequence = self._live[row.sequence].sequence
            if sequence.prefill_left and sequence.computed != sequence.snapshot_at:
                continue
            op = self.prefix.computed(sequence, self._last_sequence + 1, now)
            if op is not None:
                self._last_sequence += 1
                self._ops += [self._shared.made(op), Keep(op.sequence)]

    def _make_room(self, now: float) -> None:
        """Free what the prefix cache keeps, as far as running requests need its memory: they are never touched before
        that."""
        if self.prefix.tokens:
            scheduler = self._scheduler
            level = scheduler.pressure
            self.prefix.make_room(scheduler.num_held, scheduler.max_tokens, scheduler.num_running, level, now)
            if level >= 2:
                scheduler.memory_freed()
        for sequence_id in self.prefix.take_dropped():
            self._ops.append(Remove(sequence_id))

    def _show_rest(self, sequence: Sequence, held: int) -> None:
        """Queue the images with tokens behind the positions that every stage holds."""
        pictures = self._live[sequence.id].request.pictures
        self._pictures.begin(sequence, [one for one in pictures if one.spec.stop > held])

    def _send_picture(self) -> None:
        """Start a frame with the next image, if no other image is on its way."""
        if (found := self._pictures.next()) is not None:
            op, picture = found
            self._ops.append(op)
            shape = (op.picture.height, op.picture.width, 3)
            self._start(Work((), ()), {PIXELS: Tensor("uint8", shape, picture.pixels)})
            self._pictures.sent(self._last_step)

    def _copy_ready(self) -> None:
        """Start the sequences that have waited for another one to compute the same prompt."""
        for sequence, source in self._shared.ready(self._scheduler.running):
            if source is None:
                self._begin(sequence, time.perf_counter())
            else:
                size, max_positions = sequence.num_shared, self._live[sequence.id].max_positions
                self._ops.append(self._shared.made(Copy(sequence.id, source.id, size, max_positions), saves=size))
                self._scheduler.copied(sequence, size)
                self._show_rest(sequence, size)
                if not sequence.share_id:
                    self._live[sequence.id].cached = size
                    self.prefix.note_hit(size)

    def _take_fault(self, fault: Fault) -> None:
        """End a sequence that a stage could not compute. Its copies are not trusted: they compute their prompts
        themselves, and so does a sequence whose own copy could not be made, which is no error."""
        if fault.code == NO_COPY:
            self._lose_copy(fault.sequence)
            self._begin_anew(fault.sequence)
            return
        for sequence_id in self._shared.copies_of(fault.sequence):
            self.prefix.lose(sequence_id)
            self._begin_anew(sequence_id)
        if fault.code == UNKNOWN_OP and self.prefix.keeps(fault.sequence):
            self.prefix.copied(well=False)  # a stage of an older version cannot keep sequences
        self.prefix.lose(fault.sequence)
        self._end(fault.sequence, error_from_code(fault.code, fault.message))

    def _lose_copy(self, sequence_id: int) -> None:
        """Note that a stage could not make a copy: the prefix cache does not use its source again."""
        generation = self._live.get(sequence_id)
        if self.prefix.keeps(sequence_id) or (generation is not None and generation.cached):
            self.prefix.copied(well=False)
            if (source := self._shared.source_of(sequence_id)) is not None:
                self.prefix.lose(source)
            self.prefix.lose(sequence_id)

    def _begin_anew(self, sequence_id: int) -> None:
        """Compute all of a request again, under a new id: rows of the old id may still be on their way, and may have
        faults."""
        generation = self._live.pop(sequence_id, None)
        if generation is None:
            return
        self._shared.forget(sequence_id)
        self.prefix.lose(sequence_id)
        self._pictures.forget(sequence_id)
        if self._scheduler.remove(sequence_id) or sequence_id in self._retained:
            self._retained.discard(sequence_id)
            self._ops.append(Remove(sequence_id))
        self._last_sequence += 1
        generation.begin_anew(self._last_sequence)
        if generation.kept is not None:
            self.replays.goes_on(generation.request.key_hash, sequence_id, self._last_sequence)
        self._live[self._last_sequence] = generation
        self._by_request[generation.request.request_id] = self._last_sequence
        self._scheduler.submit(generation.sequence)

    def _tell_places(self, only: Generation | None = None) -> None:
        """Report their places in the queue to all waiting requests, or to one: silence would mean that the ring does
        not move."""
        now, length = time.perf_counter(), self._scheduler.num_waiting
        for place, sequence in self._scheduler.places():
            generation = self._live[sequence.id]
            if only is None or only is generation:
                generation.queued = True
                self._tell(generation, queue_events, place, length, self._turns.wait_s(place, now))

    def _overload(self) -> OverloadError:
        """Make the error for one more request. Half of the queue will have moved on when the client tries again."""
        place = max(1, self._scheduler.num_waiting // 2)
        wait_s = self._turns.wait_s(place, time.perf_counter())
        kind = MemoryPressureError if self._scheduler.is_short_of_memory else OverloadError
        return kind(self._scheduler.why_refused, retry_after_s=max(1.0, wait_s or 0.0))

    def _start(self, work: Work, tensors: dict[str, Tensor] | None = None) -> None:
        self._last_step += 1
        frame = Frame(
            ballot=self._ballot,
            step=self._last_step,
            batch=self._last_step % self._limits.num_stages,
            rows=work.rows,
            token_ids=work.token_ids,
            ops=tuple(self._ops),
            tensors=tensors or {},
            upto=work.upto,
        )
        if self._ops:
            self._ops.clear()
            self._shared.sent(frame.step)
        self._in_flight[frame.step] = work
        self.laps.sent(frame.step, time.perf_counter())
        self._send(frame)

    def _note_lap(self, frame: Frame, sent_at: float, lap_s: float) -> None:
        for row in frame.rows:
            if (generation := self._live.get(row.sequence)) is not None:
                generation.note_lap(frame, sent_at, lap_s)

    def _learn(self, work: Work, lap_s: float, frame: Frame, draw_s: float) -> None:
        """Feed one lap into the measured pace. draw_s: time for which drawing kept the last stage from computing
        another frame, counted like its layers."""
        waited_s = sum(report.waited_s for report in frame.reports)
        if (num_stages := len(frame.reports)) > 1:
            on_links_s = lap_s - waited_s - sum(report.compute_s for report in frame.reports)
            self.hops.add(max(0.0, on_links_s) / num_stages)
        if work.upto or work.is_scoring:
            return  # it says little of a chunk that all stages compute, and that has no logits
        if len(work.token_ids) > len(work.rows) and not work.is_prefill:
            return  # nor of rows of one token
        if work.is_prefill:
            compute_s = [report.compute_s for report in frame.reports]
            self._pace.prefilled(len(work.token_ids), lap_s, waited_s, compute_s)
        elif work.rows and frame.reports:
            compute_s = [report.compute_s for report in frame.reports]
            compute_s[-1] += draw_s
            self._pace.decoded(len(work.rows), lap_s, compute_s, waited_s)

    def _draw(self, frame: Frame, logits: np.ndarray) -> None:
        stop = 0
        for row in frame.rows:
            stop += row.num_logits
            if row.num_logits and (generation := self._live.get(row.sequence)) is not None:
                if generation.vector is not None:
                    self._pool_one(generation, row, None, logits[stop - row.num_logits : stop])
                elif row.pos0 < generation.sequence.scores:
                    self._score(generation, row, logits[stop - row.num_logits : stop])
                else:
                    self._draw_one(generation, logits[stop - 1])

    def _pool(self, frame: Frame, hidden: np.ndarray | None) -> None:
        """Take the hidden states of rows that want them, and send each vector that is complete."""
        stop = 0
        for row in frame.rows:
            stop += row.num_hidden
            if row.num_hidden and (generation := self._live.get(row.sequence)) is not None:
                states = None if hidden is None else hidden[stop - row.num_hidden : stop]
                self._pool_one(generation, row, states)

    def _pool_one(
        self, generation: Generation, row: Row, states: np.ndarray | None, logits: np.ndarray | None = None
    ) -> None:
        """Take what a row gave for a vector or a score, and send the result once it is complete."""
        try:
            if logits is not None:
                vector = generation.judge(row, logits)
            elif states is not None:
                vector = generation.pool(row, states)
            else:
                raise InputError("the engine of the last stage does not give hidden states of this model")
        except MeshError as exc:
            self._end(row.sequence, exc)
            return
        if vector is not None:
            self.prompts += 1
            self._tell_laps(generation)
            self._tell(generation, vector_events, vector)
            self._end(row.sequence, None)

    def _score(self, generation: Generation, row: Row, logits: np.ndarray) -> None:
        """Send the log-probabilities of the prompt, and the end if nothing is to be drawn."""
        self._scheduler.max_logit_rows = max_logit_rows(logits.shape[1])
        try:
            entries = generation.score(row, logits)
        except MeshError as exc:
            self._end(generation.sequence.id, exc)
            return
        if generation.kept is not None:
            generation.kept.prompt += entries
        for piece in pieces(entries):
            self._tell(generation, prompt_events, piece)
        if generation.is_done:
            self._finish_empty(generation)
            self._end(generation.sequence.id, None)
        elif generation.constraint is not None and generation.constraint.is_ready and not generation.constrained:
            self._begin_output(generation)

    def _finish_empty(self, generation: Generation) -> None:
        """Send the end of a request that draws nothing."""
        if generation.kept is not None:
            generation.kept.add(TokenEvent(generation.index, None, finish=FinishReason.LENGTH))
        self._tell_laps(generation)
        self._tell(generation, end_events, generation.index)

    def _draw_one(self, generation: Generation, logits: np.ndarray) -> None:
        if generation.forced:  # known by now, and the logits are of the token before them
            forced, generation.forced = generation.forced, []
            self._put_out(generation, generation.add((), forced), num_drawn=0)
            return
        constraint = generation.constraint
        if constraint is not None and not (generation.constrained and constraint.is_ready):
            generation.late = logits.copy()
            if generation.constrained:
                constraint.when_ready(partial(self._draw_late, generation))
            return
        try:
            drawn = generation.draw(logits)
        except MeshError as exc:
            self._end(generation.sequence.id, exc)
            return
        self._put_out(generation, drawn, num_drawn=1)

    def _put_out(self, generation: Generation, drawn: Drawn, *, num_drawn: int) -> None:
        """Send tokens to the caller, and let the sequence continue or end. num_drawn: how many of the tokens took a
        lap."""
        index = generation.index - len(drawn.draws)
        if not index and generation.cached:
            drawn = drawn._replace(cached=generation.cached)
        self.tokens += len(drawn.draws)
        self.prompts += not index and bool(drawn.draws)
        self.laps_saved += max(0, len(drawn.draws) - num_drawn)
        if generation.kept is not None:
            for event in drawn.events(index):
                generation.kept.add(event)
        if generation.laps:
            self._tell_laps(generation, 1 if drawn.finish else LAPS_AT_ONCE)
        self._tell(generation, token_events, index, drawn)
        if drawn.finish:
            self._end(generation.sequence.id, None)
            return
        self._scheduler.token_drawn(generation.sequence, *(draw.token_id for draw in drawn.draws))
        if generation.mailbox.backlog >= PARK_AT:
            generation.mailbox.parked = generation.sequence.parked = True

    def _constrain(self, generation: Generation) -> None:
        """Attach a grammar or a thinking budget to a request that asks for one, as soon as it is ready; the prompt is
        computed meanwhile."""
        request = generation.request
        if (request.grammar is None and request.thinking is None) or not generation.sequence.draws:
            return
        if self._grammars is None:
            self._end(generation.sequence.id, InputError("this driver cannot apply grammars or thinking budgets"))
            return
        generation.constraint = Constraint(request, self._grammars)
        if generation.constraint.is_ready:
            self._begin_output(generation)
        else:
            generation.constraint.when_ready(partial(self._begin_output, generation))

    def _begin_output(self, generation: Generation) -> None:
        """Start the constrained output, now that the grammar is compiled. Forced first tokens are output now, or after
        the row that is on its way; in any case after the log-probabilities of the prompt."""
        if self._live.get(generation.sequence.id) is not generation or generation.sequence.wants_scores:
            return
        generation.constrained = True
        try:
            forced = generation.follow()
        except MeshError as exc:
            self._end(generation.sequence.id, exc)
            forced = []
        else:
            self._put_first(generation, forced)
        self.pump()

    def _put_first(self, generation: Generation, forced: list[int]) -> None:
        assert generation.constraint is not None, "it has begun"
        if generation.constraint.is_complete or (forced and not generation.sequence.decoding):
            self._put_out(generation, generation.add((), forced), num_drawn=0)
        elif forced:
            generation.forced = forced
        if generation.late is not None:
            self._draw_late(generation)

    def _draw_late(self, generation: Generation) -> None:
        """Draw from logits that waited until the allowed tokens were known."""
        logits, generation.late = generation.late, None
        if logits is not None and self._live.get(generation.sequence.id) is generation:
            self._draw_one(generation, logits)
            self.pump()

    def _end(self, sequence_id: int, error: MeshError | None) -> None:
        """Forget a request; `error` is posted unless the request ended well. An unknown sequence changes nothing."""
        generation = self._live.pop(sequence_id, None)
        if generation is None:
            return
        del self._by_request[generation.request.request_id]
        if generation.kept is not None:
            self.replays.end(generation.request.key_hash, generation.kept, sequence_id)
        self._num_traced -= bool(generation.request.trace_id)
        is_sound = error is None or isinstance(error, CancelledRequestError | SupersededError)
        is_whole = self._shared.source_of(sequence_id) is None  # its copy is at every stage
        self._shared.forget(sequence_id)
        self.prefix.lose(sequence_id)
        self._pictures.forget(sequence_id)
        if self._scheduler.remove(sequence_id):
            is_kept = is_sound and is_whole and self.prefix.ended(generation.sequence, time.perf_counter())
            self._ops.append(Keep(sequence_id) if is_kept else Remove(sequence_id))
        elif sequence_id in self._retained:
            self._retained.discard(sequence_id)
            self._ops.append(Remove(sequence_id))
        if error is not None:
            self._tell_laps(generation)
            self._fail(generation, error)

    def _refuse(self, generation: Generation, error: MeshError | None) -> None:
        """Answer a request that never enters the queue. error: None if there is nothing to do."""
        if error is None:
            self._finish_empty(generation)
        if generation.kept is not None:
            self.replays.end(generation.request.key_hash, generation.kept, generation.sequence.id)
        if error is not None:
            self._fail(generation, error)

    def _fail(self, generation: Generation, error: MeshError) -> None:
        self._tell(generation, error_events, error)

    def _tell_laps(self, generation: Generation, least: int = 1) -> None:
        """Send the laps of a traced request that were not sent yet, if there are at least `least`."""
        if len(generation.laps) >= least:
            self._tell(generation, trace_events, generation.take_laps())

    def _tell(self, generation: Generation, make: Callable[..., GenerateEvents], *arguments: object) -> None:
        self._news.append((generation.mailbox, partial(make, self._ballot_proto, *arguments)))


def _the(message: GenerateEvents) -> GenerateEvents:
    """Returns a message that is already made."""
    return message
