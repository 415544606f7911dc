"""Starts and ends sequences at the stages: with the whole prompt, or as a copy of KV that the stages hold."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping

from exo_mesh.domain.frame import UNKNOWN_OP, Copy, Fault, Insert, Keep, ListDisk, Op, Remove, Retain
from exo_mesh.domain.request import Prefilled
from exo_mesh.rings.runner.callers import Callers
from exo_mesh.rings.runner.generation import Generation
from exo_mesh.rings.runner.picture_sender import PictureSender
from exo_mesh.rings.runner.prefix.cache import PrefixCache
from exo_mesh.rings.runner.prefix.disk_index import LEAST_TOKENS, DiskIndex, OnDisk
from exo_mesh.rings.runner.prefix.shared_prompts import SharedPrompts
from exo_mesh.rings.runner.scheduling.scheduler import Scheduler
from exo_mesh.rings.runner.scheduling.sequence import Sequence, SequenceIds, Work

_log = logging.getLogger(__name__)


class SequenceStarts:
    """Begins and ends sequences at all stages, by operations that leave with the next frame.

    A sequence begins as a copy if the prefix cache keeps the start of its prompt, or if a running sequence computes the
    same prompt. The images in the rest of the prompt go before its rows. At its end, stages remove its KV or keep it
    for the prefix cache.

    live: all requests of the driver, by sequence; only read. ops: the operations of the next frame; only appended to,
    except by `change`.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        live: Mapping[int, Generation],
        callers: Callers,
        ops: list[Op],
        ids: SequenceIds,
        prefix: PrefixCache,
        disk: DiskIndex | None = None,
    ) -> None:
        self._scheduler = scheduler
        self._live = live
        self._callers = callers
        self._ops = ops
        self._ids = ids
        self._prefix = prefix
        self._disk = disk
        self._retained: set[int] = set()
        """Sequences that stages hold over a change of the plan, and that have neither begun again nor been removed."""
        self._gives_way = False
        """Whether the log has been told that kept sequences go because memory is short."""
        self.shared = SharedPrompts()
        self.pictures = PictureSender()

    def change(self, num_stages: int, kept_from: int, gone: set[int], held: Mapping[int, int]) -> None:
        """Switch to a new plan. Stages from kept_from on keep their KV; frames in flight and operations that have not
        left are lost. gone: sequences with rows or copies on their way. held: positions that stages keep, by running
        sequence."""
        self._prefix.change(num_stages, kept_from, gone)
        self.pictures.restart()
        self._retained = set(held)
        self._ops[:] = [Retain((*held, *self._prefix.held)), *map(Keep, self._prefix.held)]
        if self._disk is not None:
            for sequence_id in self._disk.change(num_stages):
                self._live[sequence_id].sequence.awaits_disk = False
            self._ops.append(ListDisk())

    def admitted(self, sequence: Sequence, now: float) -> None:
        """Begin a sequence that has just got its place, unless it waits to become a copy of a running one."""
        if not self.shared.must_wait(sequence, self._scheduler.running):
            self._begin(sequence, now, may_wait=True)

    def evicted(self, sequence: Sequence) -> None:
        """Remove a sequence that has lost its place; it begins again later."""
        if not sequence.waits:
            self._do(Remove(sequence.id))
        sequence.source = None
        sequence.awaits_disk = False
        self._forget(sequence.id)

    def end(self, sequence: Sequence, *, is_sound: bool) -> None:
        """Take a sequence from the scheduler and from all stages that have begun it. is_sound: its KV is right, so the
        prefix cache may keep it."""
        is_whole = self.shared.source_of(sequence.id) is None  # its copy is at every stage
        self._forget(sequence.id)
        if self._scheduler.remove(sequence.id):
            is_kept = is_sound and is_whole and self._prefix.ended(sequence, time.perf_counter())
            self._do(Keep(sequence.id) if is_kept else Remove(sequence.id))
        elif sequence.id in self._retained:
            self._do(Remove(sequence.id))

    def _do(self, op: Op) -> None:
        """Queue an operation for all stages, and count what sequences share after it."""
        self._ops.append(op)
        self._scheduler.shared.note(op)
        if isinstance(op, Insert | Copy | Remove):
            self._retained.discard(op.sequence)

    def _forget(self, sequence_id: int) -> None:
        self.shared.forget(sequence_id)
        self._prefix.lose(sequence_id)
        self.pictures.forget(sequence_id)
        if self._disk is not None:
            self._disk.forget(sequence_id)

    def came_round(self, step: int) -> None:
        """Note that a frame is back, and that all stages have made the copies and have the image in it."""
        if self.shared.came_round(step):
            self._prefix.copied(well=True)
        self.pictures.came_round(step)

    def lose_source(self, fault: Fault) -> list[int]:
        """Note that a stage could not compute a sequence. Returns its copies, which are not trusted either."""
        copies = self.shared.copies_of(fault.sequence)
        for sequence_id in copies:
            self._prefix.lose(sequence_id)
        if fault.code == UNKNOWN_OP and self._prefix.keeps(fault.sequence):
            self._prefix.copied(well=False)  # a stage of an older version cannot keep sequences
        self._prefix.lose(fault.sequence)
        return copies

    def lose_copy(self, sequence_id: int) -> None:
        """Note that a stage could not make a copy: the prefix cache does not use its source again."""
        if self._disk is not None and self._disk.failed(sequence_id):
            return  # a file that one stage has lost is a miss, and no reason to do without the cache
        generation = self._live.get(sequence_id)
        if self._prefix.keeps(sequence_id) or (generation is not None and generation.cached):
            self._prefix.copied(well=False)
            if (source := self.shared.source_of(sequence_id)) is not None:
                self._prefix.lose(source)
            self._prefix.lose(sequence_id)

    def note_prompts(self, work: Work, now: float) -> None:
        """Let other prompts begin with the prompts that this chunk has completed."""
        for row in work.rows:
            sequence = self._live[row.sequence].sequence
            if sequence.prefill_left and sequence.computed != sequence.snapshot_at:
                continue
            op = self._prefix.computed(sequence, self._ids.last + 1, now)
            if op is not None:
                self._ids.last += 1
                self._do(self.shared.made(op))
                self._do(Keep(op.sequence))

    def make_room(self, now: float) -> None:
        """Free what the prefix cache keeps, as far as running requests need its memory: they are never touched before
        that."""
        scheduler = self._scheduler
        level = scheduler.pressure
        if not (level or self._prefix.tokens or self._prefix.has_dropped or self._gives_way):
            return
        if self._prefix.tokens and level >= 2:
            scheduler.memory_freed()
        self._tell_pressure(level)
        dropped = True
        while dropped:
            if self._prefix.tokens:
                self._prefix.make_room(scheduler.num_held, scheduler.max_tokens, scheduler.num_running, level, now)
                self._store_evicted(now)
            dropped = False
            for sequence_id in self._prefix.take_dropped():
                dropped = True  # of a sequence that shared its positions, less was freed: look again
                self._do(Remove(sequence_id))

    def _tell_pressure(self, level: int) -> None:
        """Log once, while memory is short, that the prefix cache gives way."""
        if level and self._prefix.tokens and not self._gives_way:
            text = "the machine of stage %d is short of memory: the prefix cache gives its %d tokens up"
            _log.info(text, self._scheduler.pressed_stage, self._prefix.tokens)
        self._gives_way = level > 0 and (self._gives_way or self._prefix.tokens > 0)

    def _store_evicted(self, now: float) -> None:
        """Let stages write what has just given way to disk, before they remove it."""
        if self._disk is not None and not self._scheduler.pressure:
            for kept in self._prefix.evicted:
                op = self._disk.store_evicted(kept, self._prefix.cuts_back, now, self._scheduler.num_running)
                self._ops += [] if op is None else [op]

    def store_settled(self, now: float) -> None:
        """Let stages write a kept sequence to disk that nobody has used for a while, unless memory is short."""
        if self._disk is not None and self._prefix.tokens and not self._scheduler.pressure:
            op = self._disk.next_to_store(self._prefix, now, self._scheduler.num_running)
            self._ops += [] if op is None else [op]

    def load_ready(self, now: float) -> None:
        """Begin the sequences whose files the stages have read, or, if nothing else runs, can wait for."""
        assert self._disk is not None, "nothing waits for a disk"
        is_idle = all(one.awaits_disk or one.waits for one in self._scheduler.running)
        for waiting, found in self._disk.ready(now, is_idle):
            sequences = [self._live[one].sequence for one in waiting]
            for sequence in sequences:
                sequence.awaits_disk = False
            if found is not None:
                self._load(sequences.pop(0), found)
            for sequence in sequences:
                self._begin(sequence, now, may_wait=True, may_load=False)

    def _load(self, sequence: Sequence, found: OnDisk) -> None:
        """Let every stage begin a sequence with a file from its disk."""
        assert self._disk is not None, "the file is on disk"
        generation = self._live[sequence.id]
        self._disk.loads(sequence.id, found)
        self._prefix.note_hit(found.length)
        self._copied(Copy(sequence.id, 0, found.length, generation.max_positions, disk=found.key), sequence)

    def copy_ready(self) -> None:
        """Start the sequences that have waited for another one to compute the same prompt."""
        for sequence, source in self.shared.ready(self._scheduler.running):
            if source is None:
                self._begin(sequence, time.perf_counter())
            else:
                size, max_positions = sequence.num_shared, self._live[sequence.id].max_positions
                self._do(self.shared.made(Copy(sequence.id, source.id, size, max_positions), saves=size))
                self._scheduler.began(sequence)
                self._scheduler.copied(sequence, size)
                self._show_rest(sequence, size)
                if not sequence.share_id:
                    self._live[sequence.id].cached = size
                    self._prefix.note_hit(size)

    def _begin(self, sequence: Sequence, now: float, *, may_wait: bool = False, may_load: bool = True) -> None:
        """Let every stage begin a sequence, with the part of its prompt that the prefix cache has. Images in the rest
        go first. may_wait: if a running request computes more of it at this moment, the sequence begins later, as a
        copy of that. may_load: if disks have more of it, the sequence begins as soon as they have been read."""
        generation = self._live[sequence.id]
        if may_wait and self._prefix.shares_running:
            known = self._prefix.known(sequence)
            if self.shared.must_follow(sequence, known, self._scheduler.running):
                return
        if not generation.is_compared and (report := self._prefix.nearest(sequence)) is not None:
            generation.is_compared = True
            self._callers.tell(generation, report)
        if self._disk is not None and may_load and self._awaits_disk(sequence, self._disk, now):
            return
        reuse = self._prefix.find(sequence, now)
        if reuse is None:
            self._scheduler.began(sequence)
            self._do(Insert(sequence.id, generation.max_positions))
            self._show_rest(sequence, 0)
            return
        self._copied(
            Copy(sequence.id, reuse.source, reuse.length, generation.max_positions, reuse.first_stage), sequence
        )

    def _copied(self, op: Copy, sequence: Sequence) -> None:
        """Begin a sequence with this copy, and compute the rest."""
        generation = self._live[sequence.id]
        self._do(self.shared.made(op, saves=op.upto))
        self._scheduler.began(sequence)
        self._scheduler.copied(sequence, op.upto, op.first_stage)
        self._show_rest(sequence, 0 if op.first_stage else op.upto)
        generation.cached = min(op.upto, len(generation.request.prompt_ids))
        self._callers.tell(generation, Prefilled(generation.cached))

    def _awaits_disk(self, sequence: Sequence, disk: DiskIndex, now: float) -> bool:
        """Whether disks have much more of a sequence than memory: it then waits until they have been read."""
        found = disk.find(sequence, self._prefix.cuts_back) if self._prefix.is_on else None
        if found is None or found.length < self._prefix.known(sequence) + LEAST_TOKENS:
            return False
        op = disk.wait_for(found, sequence, now)
        self._ops += [] if op is None else [op]
        return True

    def _show_rest(self, sequence: Sequence, held: int) -> None:
        """Queue the images with tokens behind the positions that every stage holds."""
        pictures = self._live[sequence.id].request.pictures
        self.pictures.begin(sequence, [one for one in pictures if one.spec.stop > held])
