"""The driver: the runner of the last stage. It has the logits, so it schedules, samples and answers requests."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import numpy as np

from exo_mesh.base.telemetry.durations import LAP_BOUNDS_S, Durations
from exo_mesh.domain.frame import NO_COPY, PIXELS, Fault, Frame, ListDisk, Op, ReadAhead
from exo_mesh.domain.plan import Ballot
from exo_mesh.domain.replay import Kept
from exo_mesh.domain.request import GenerateRequest, Prefilled
from exo_mesh.domain.routing.digest import SALT_BYTES
from exo_mesh.domain.runner.heartbeat import Heartbeat
from exo_mesh.domain.tensor import Tensor
from exo_mesh.errors import (
    CancelledRequestError,
    InputError,
    KeyReusedError,
    MemoryPressureError,
    MeshError,
    SupersededError,
    error_from_code,
)
from exo_mesh.rings.runner.callers import Callers
from exo_mesh.rings.runner.drafting.drafts import Drafts
from exo_mesh.rings.runner.drafting.sources import SourceMaker
from exo_mesh.rings.runner.generation import Generation
from exo_mesh.rings.runner.grammars import Grammars
from exo_mesh.rings.runner.laps import LapTimes
from exo_mesh.rings.runner.mailbox import Mailbox
from exo_mesh.rings.runner.outputs import Outputs
from exo_mesh.rings.runner.prefix.cache import PrefixCache
from exo_mesh.rings.runner.prefix.digest import DigestMaker
from exo_mesh.rings.runner.prefix.disk_index import DiskIndex
from exo_mesh.rings.runner.queue_places import QueuePlaces
from exo_mesh.rings.runner.replays import Replays
from exo_mesh.rings.runner.scheduling.limits import SchedulerLimits
from exo_mesh.rings.runner.scheduling.memory_reports import most_pressed, room, shares_from
from exo_mesh.rings.runner.scheduling.pace import Pace
from exo_mesh.rings.runner.scheduling.scheduler import Scheduler
from exo_mesh.rings.runner.scheduling.sequence import SequenceIds, Work, those_that_fit
from exo_mesh.rings.runner.sequence_starts import SequenceStarts

IDLE_LAP_S = 5.0
"""Time between two frames of an idle ring whose stages keep sequences: as long as a machine that is short of memory may
wait for them."""

CALM_LAP_S = 60.0
"""The same once no request has used the ring for a while. A machine that becomes short of memory then asks for a lap,
see RingLink.knock."""

LEARN_EVERY_S = 0.005
"""Minimum time between samples of decode laps; sampling every lap of a fast ring would cost about 10 %."""


class Driver:
    """Starts frames and takes them back after their lap. All methods run on the event loop; `send` starts a frame.

    Its parts: `beginnings` begins and ends sequences at the stages, `outputs` takes what the last stage computed,
    `callers` has the messages to callers, and `places` tells waiting requests their places.

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
        disk: DiskIndex | None = None,
        make_source: SourceMaker | None = None,
    ) -> None:
        self._ballot = ballot
        self._pace = Pace(limits.num_stages)
        self.prefix = PrefixCache(limits.num_stages, most_tokens=0) if prefix is None else prefix
        self._scheduler = Scheduler(
            limits,
            self._pace,
            expect_shared=self.prefix.common_with_running,
            ends_prompts=lambda: self.prefix.cuts_back,
        )
        self._limits = limits
        self._send = send
        self._live: dict[int, Generation] = {}
        self._by_request: dict[str, int] = {}
        self._ids = SequenceIds()
        self._ops: list[Op] = [] if disk is None else [ListDisk()]
        """Operations of the next frame. Shared with `beginnings`, so it is always the same list."""
        self._in_flight: dict[int, Work] = {}
        self._last_step = 0
        self._returned_at = 0.0
        self._knows_stages = False
        """Whether all stages of this plan have reported their limits of the prefix cache."""
        self.disk = disk
        self.digests = DigestMaker(self.prefix, os.urandom(SALT_BYTES))
        self.drafts = Drafts(self._live, self._pace, make_source)
        self._scheduler.drafter = None if make_source is None else self.drafts
        self.callers = Callers(ballot)
        self.places = QueuePlaces(self._scheduler, self._live, self.callers)
        self.beginnings = SequenceStarts(
            self._scheduler, self._live, self.callers, self._ops, self._ids, self.prefix, disk
        )
        self.outputs = Outputs(self._scheduler, self._live, self.callers, grammars, self._end, self.pump, self.drafts)
        self.replays = Replays()
        self.laps = LapTimes()
        self.hops = Durations(LAP_BOUNDS_S)
        self.evictions = 0
        self._num_traced = 0
        self._learnt_at = 0.0

    @property
    def num_waiting(self) -> int:
        return self._scheduler.num_waiting

    @property
    def num_running(self) -> int:
        return self._scheduler.num_running

    @property
    def holds(self) -> bool:
        """Whether stages hold sequences that nobody computes: kept for later prompts, or parked. From any thread."""
        return self.prefix.tokens > 0 or self._scheduler.num_parked > 0

    def describe_load(self, beat: Heartbeat) -> None:
        """Write the load of this driver into a heartbeat. From any thread; the numbers may be of slightly different
        moments."""
        scheduler = self._scheduler
        beat.slots = self._limits.max_running
        beat.parked, beat.kv_tokens = scheduler.num_parked, scheduler.num_held
        beat.kv_pool_tokens = scheduler.max_tokens
        beat.evictions, beat.laps_saved = self.evictions, self.outputs.laps_saved
        beat.drafts_accepted, beat.drafts_rejected = (
            tuple(self.drafts.tally.accepted),
            tuple(self.drafts.tally.rejected),
        )
        beat.shared_tokens, beat.prompts = self.beginnings.shared.saved_tokens, self.outputs.prompts
        self.prefix.describe(beat.prefix)
        if self.disk is not None:
            self.disk.describe(beat.prefix)
        beat.prefix.digest = self.digests.digest
        beat.oldest_wait_s = self.places.oldest_wait_s()
        beat.laps_took, beat.hops_took = self.laps.took.snapshot(), self.hops.snapshot()
        beat.queue_waits = self.places.waits.snapshot()

    def change(self, ballot: Ballot, limits: SchedulerLimits, kept_from: int) -> int:
        """Continue under a new ballot with other stages. Returns how many running requests continue, at the head of the
        queue. Frames that were on their way are lost; tokens that were drawn are not.

        kept_from: stages from this one on keep the KV that they have; if it is the number of stages, no stage does.
        """
        lost = self.beginnings.shared.lose()
        held = self._came_round(lost)
        if kept_from >= limits.num_stages:
            held = {}
        held = those_that_fit(held, self._scheduler.running, min(limits.max_tokens, self._scheduler.room))
        in_flight = {row.sequence for work in self._in_flight.values() for row in work.rows}
        self.beginnings.change(limits.num_stages, kept_from, in_flight.union(lost), held)
        self._knows_stages = False
        self._ballot = ballot
        self.callers.change(ballot)
        self._limits, self._pace = limits, Pace(limits.num_stages)
        self.drafts.change(self._pace)
        self._in_flight.clear()
        for generation in self._live.values():
            generation.late.clear()  # its row goes round again
        self.laps.forget_sent()
        self._last_step = 0
        resumed = self._scheduler.rewind(limits, self._pace, kept_from, held)
        self.reassure()  # by which entry peers learn of the ballot
        self.pump()
        return resumed

    def look(self, lap_s: float | None = None) -> None:
        """Send an empty frame round if none has come for lap_s (by default IDLE_LAP_S) while stages hold sequences that
        nobody computes: its reports show if some machine needs their memory. Another one leaves if a sequence is to be
        written to disk, and while one is."""
        lap_s = IDLE_LAP_S if lap_s is None else lap_s
        now = time.perf_counter()
        self.beginnings.store_settled(now)
        waits = bool(self._ops) or (self.disk is not None and self.disk.is_writing)
        if self.holds and not self._in_flight and (waits or now - self._returned_at >= lap_s):
            self._start(Work((), ()))

    def make_digest(self) -> None:
        """Make a digest of what the ring keeps, for the next heartbeat."""
        self.digests.make(time.perf_counter())

    def reassure(self) -> None:
        """Notify all callers that their requests are alive: entry peers take silence for the end of the ring."""
        for generation in self._live.values():
            self.callers.tell(generation, Prefilled(0))

    def _came_round(self, lost_copies: list[int]) -> dict[int, int]:
        """The positions whose rows every stage has computed, by running sequence."""
        held = {sequence.id: sequence.settled for sequence in self._scheduler.running}
        for work in self._in_flight.values():
            for row in work.rows:
                if row.sequence in held:
                    held[row.sequence] = min(held[row.sequence], row.pos0)
        return {**held, **{lost: 0 for lost in lost_copies if lost in held}}

    def submit(self, request: GenerateRequest, mailbox: Mailbox) -> None:
        """Queue a request, or refuse it through its mailbox."""
        sequence_id = self._ids.next()
        kept: Kept | None = None
        if request.key_hash:
            try:
                kept = self.replays.open(request)
            except KeyReusedError as exc:
                self.callers.tell(Generation.begin(request, sequence_id, mailbox), exc)
                return
            assert kept is not None, "it has a key"
            request = self._take_over(request, kept, mailbox, sequence_id)
            if kept.finish is not None:
                return
        generation = Generation.begin(request, sequence_id, mailbox)
        generation.take_kept(kept)
        if request.request_id in self._by_request:
            self._refuse(generation, InputError(f"request {request.request_id} is already running here"))
        elif generation.is_done:
            self._refuse(generation, None)
        elif not self._scheduler.submit(generation.sequence):
            self._refuse(generation, self.places.overload())
        else:
            self._live[sequence_id] = generation
            self.drafts.begin(generation)
            self._num_traced += bool(request.trace_id)
            self._by_request[request.request_id] = sequence_id
            if request.grammar is None:
                self.outputs.constrain(generation)
            self.pump()
            if any(sequence is generation.sequence for sequence in self._scheduler.waiting):
                self.places.tell_places(generation)

    def _take_over(self, request: GenerateRequest, kept: Kept, mailbox: Mailbox, sequence_id: int) -> GenerateRequest:
        """Send the caller the kept part of an answer that it has not received, and end the sequence that works on it
        now. Returns the request for the rest, on which sequence `sequence_id` works."""
        worker = self.replays.worker(request.key_hash)
        if worker is not None:
            self._end(worker, SupersededError("the same request was sent again; the newer call continues it"))
        request, events = self.replays.begin(request, kept, sequence_id)
        self.callers.replay(mailbox, request, kept, events)
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
        num_running, num_tokens = self._scheduler.num_running, self.outputs.tokens
        lap_s = self.laps.returned(frame.step, now)
        work = self._in_flight.pop(frame.step, None)
        is_prefill = work is not None and work.is_prefill
        stale = [] if work is None else self._scheduler.came_round(work)
        if self._scheduler.has_waiting:
            self.places.reassure(now)
        if lap_s is not None and self._num_traced:
            self._note_lap(frame, now - lap_s, lap_s, is_prefill=is_prefill)
        if frame.reports:
            self._take_reports(frame, now)
        for fault in frame.faults:
            self._take_fault(fault)
        self.beginnings.came_round(frame.step)
        for row in frame.rows if is_prefill else ():
            if row.sequence in self._live:
                self.callers.tell(self._live[row.sequence], Prefilled(row.pos0 + row.n))
        if logits is not None:
            self.outputs.draw(frame, logits, stale)
        if is_prefill:
            self.outputs.pool(frame, hidden)
        if work is not None:
            self.drafts.came_round(work, now, num_running, self.outputs.tokens - num_tokens)
        draw_s = time.perf_counter() - now
        self.pump()
        if work is not None and lap_s is not None and (is_prefill or now - self._learnt_at > LEARN_EVERY_S):
            self._learnt_at = now
            self._learn(work, lap_s + draw_s, frame, 0.0 if is_apart else draw_s)

    def _take_reports(self, frame: Frame, now: float) -> None:
        """Learn from the reports of all stages how much memory they have, and what they keep."""
        scheduler, reports = self._scheduler, frame.reports
        scheduler.pressure, scheduler.pressed_stage = most_pressed(reports)
        scheduler.room, scheduler.slack = room(reports, is_shared=scheduler.shared.least > 0)
        if (lone := scheduler.lone_at_critical(now)) is not None:
            text = f"the machine of stage {scheduler.pressed_stage} has no memory left for this request"
            self._end(lone.id, MemoryPressureError(text))
        for sequence in scheduler.take_untried():
            self._end(sequence.id, MemoryPressureError(scheduler.why_refused))
        if self.disk is not None:
            self._note_disks(frame, now)
        if not self._knows_stages:
            self._knows_stages = True
            self.prefix.learn(reports)
            self.drafts.learn(reports)
            scheduler.shared.least = shares_from(reports)

    def _note_disks(self, frame: Frame, now: float) -> None:
        """Learn what has happened on the disks of the stages."""
        assert self.disk is not None, "asked before"
        self.disk.note_lap()
        if any(isinstance(op, ListDisk) for op in frame.ops):
            self.disk.learn([None if report.disk is None else report.disk.listed for report in frame.reports], now)
        for index, report in enumerate(frame.reports):
            if report.disk is not None:
                self.disk.note(index, report.disk, now)

    def pump(self) -> None:
        """Start frames as long as there is work and fewer than the useful number are on the ring."""
        now, beginnings = time.perf_counter(), self.beginnings
        if self.disk is not None and not self._knows_stages:
            if not self._in_flight:
                self._start(Work((), ()))  # a prompt may begin with what is on disk, so its stages list that first
            return
        if self.disk is not None and self.disk.must_list(now):
            self._ops.append(ListDisk())
        beginnings.make_room(now)
        self._evict()
        if self._scheduler.has_waiting or self.places.is_counting:
            self._admit(now)
        beginnings.copy_ready()
        if self._ops:  # a sequence has begun, maybe, and shares less than was expected
            beginnings.make_room(now)
            self._evict()
        if self.disk is not None and self.disk.is_waiting:
            if any(isinstance(op, ReadAhead) for op in self._ops):
                self._start(Work((), ()))  # stages begin to read at once
            beginnings.load_ready(now)
        self._send_picture()
        scheduler = self._scheduler
        while (work := scheduler.next_work()) is not None:
            self._start(work)
            if work.is_prefill:
                beginnings.note_prompts(work, now)
                beginnings.copy_ready()
            elif scheduler.is_exhausted:
                break
        if self._ops and not self._in_flight:
            self._start(Work((), ()))  # nothing to compute, but stages must hear of the end of a sequence

    def _admit(self, now: float) -> None:
        """Let waiting sequences run. Only then is a grammar compiled, so that grammars of waiting requests take no
        memory; the prompt is computed meanwhile."""
        unconstrained = []
        for sequence in self._scheduler.admit():
            generation = self._live[sequence.id]
            if generation.request.grammar is not None and generation.constraint is None:
                unconstrained.append(generation)
            self.places.note_wait(generation, now)
            self.beginnings.admitted(sequence, now)
            self.places.leave(generation)
        self.places.note_turns(now)
        for generation in unconstrained:
            self.outputs.constrain(generation)

    def _evict(self) -> None:
        for sequence in self._scheduler.evict():
            self.beginnings.evicted(sequence)
            self.evictions += 1

    def _send_picture(self) -> None:
        """Start a frame with the next image, if no other image is on its way."""
        if (found := self.beginnings.pictures.next()) is not None:
            op, picture = found
            self._ops.append(op)
            shape = (op.picture.height, op.picture.width, 3)
            self._start(Work((), ()), {PIXELS: Tensor("uint8", shape, picture.pixels)})
            self.beginnings.pictures.sent(self._last_step)

    def _take_fault(self, fault: Fault) -> None:
        """End a sequence that a stage could not compute. Its copies are not trusted: they compute their prompts
        themselves, and so does a sequence whose own copy could not be made, which is no error."""
        if fault.code == NO_COPY:
            self.beginnings.lose_copy(fault.sequence)
            self._begin_anew(fault.sequence)
            return
        for sequence_id in self.beginnings.lose_source(fault):
            self._begin_anew(sequence_id)
        self._end(fault.sequence, error_from_code(fault.code, fault.message))

    def _begin_anew(self, sequence_id: int) -> None:
        """Compute all of a request again, under a new id: rows of the old id may still be on their way, and may have
        faults."""
        generation = self._live.pop(sequence_id, None)
        if generation is None:
            return
        self.beginnings.end(generation.sequence, is_sound=False)
        new_id = self._ids.next()
        generation.begin_anew(new_id)
        if generation.kept is not None:
            self.replays.goes_on(generation.request.key_hash, sequence_id, new_id)
        self._live[new_id] = generation
        self._by_request[generation.request.request_id] = new_id
        self._scheduler.submit(generation.sequence)

    def _start(self, work: Work, tensors: dict[str, Tensor] | None = None) -> None:
        self._last_step += 1
        frame = Frame(
            self._ballot,
            self._last_step,
            work.rows,
            work.token_ids,
            tuple(self._ops),
            tensors or {},
            upto=work.upto,
            is_chunk=work.is_prefill,
        )
        if self._ops:
            self._ops.clear()
            self.beginnings.shared.sent(frame.step)
        self._in_flight[frame.step] = work
        self.laps.sent(frame.step, time.perf_counter())
        self._send(frame)

    def _note_lap(self, frame: Frame, sent_at: float, lap_s: float, *, is_prefill: bool) -> None:
        for row in frame.rows:
            if (generation := self._live.get(row.sequence)) is not None:
                generation.note_lap(frame, sent_at, lap_s, is_prefill=is_prefill)

    def _learn(self, work: Work, lap_s: float, frame: Frame, draw_s: float) -> None:
        """Feed one lap into the measured pace. draw_s: time for which drawing kept the last stage from computing
        another frame, counted like its layers."""
        waited_s = sum(report.waited_s for report in frame.reports)
        if (num_stages := len(frame.reports)) > 1:
            on_links_s = lap_s - waited_s - sum(report.compute_s for report in frame.reports)
            self.hops.add(max(0.0, on_links_s) / num_stages)
        if work.upto or work.is_scoring:
            return  # it says little of a chunk that all stages compute, and that has no logits
        if any(sequence.on_way or sequence.stale for sequence in work.drawing) and len(work.token_ids) == len(
            work.rows
        ):
            return  # nor of frames without drafts, because stages may share cores, and those ahead of it took some
        if len(work.token_ids) > len(work.rows) and not work.is_prefill:
            compute_s = [report.compute_s for report in frame.reports]
            compute_s[-1:] = [seconds + draw_s for seconds in compute_s[-1:]]
            self._pace.drafted(len(work.rows), len(work.token_ids), compute_s)
        elif work.is_prefill:
            compute_s = [report.compute_s for report in frame.reports]
            self._pace.prefilled(len(work.token_ids), lap_s, waited_s, compute_s)
        elif work.rows and frame.reports:
            compute_s = [report.compute_s for report in frame.reports]
            compute_s[-1] += draw_s
            self._pace.decoded(len(work.rows), lap_s, compute_s, waited_s)

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
        self.beginnings.end(generation.sequence, is_sound=is_sound)
        if error is not None:
            self.callers.tell_laps(generation)
            self.callers.tell(generation, error)

    def _refuse(self, generation: Generation, error: MeshError | None) -> None:
        """Answer a request that never enters the queue. error: None if there is nothing to do."""
        if error is None:
            self.outputs.finish_empty(generation)
        if generation.kept is not None:
            self.replays.end(generation.request.key_hash, generation.kept, generation.sequence.id)
        if error is not None:
            self.callers.tell(generation, error)
