"""Decides what runs next on the ring: a waiting and a running queue, decode rows and prefill chunks. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from operator import attrgetter

from exo_mesh.domain.frame import LONGEST_DRAFT
from exo_mesh.engine.shared_positions import SharedPositions
from exo_mesh.rings.runner.scheduling.chunk_shares import chunk_of, deal_chunk
from exo_mesh.rings.runner.scheduling.decode_rows import MOST_DRAFTED, Drafter, decode_rows, row_ahead
from exo_mesh.rings.runner.scheduling.limits import SchedulerLimits
from exo_mesh.rings.runner.scheduling.memory_reports import LoneTime
from exo_mesh.rings.runner.scheduling.pace import Pace, shares
from exo_mesh.rings.runner.scheduling.queue import OUTPUT_WEIGHT, PROMPT_WEIGHT, FairQueue, is_flex
from exo_mesh.rings.runner.scheduling.sequence import Sequence, Work

LOGIT_ROWS_BESIDE = 32
"""Most positions of prompts whose logits one frame asks for beside running streams: the driver takes about 1 ms for
each with a vocabulary of 152,000 tokens, and draws nothing meanwhile."""

EVICTION_TURNS = 64
"""Decode frames between two evictions while some machine is short of memory: seconds, like the readings of memory. Also
the frames for which a parked sequence keeps its place while others wait for one."""

CHUNK_TURNS = 16
"""A chunk of prefill counts as so many decode frames between two evictions: it takes about as long."""

EXPECT_TURNS = 8
"""Decode frames between two lookups of what the first waiting sequence would share: a long prompt takes 0.1 ms."""


_last_turn = attrgetter("last_turn")


@dataclass(slots=True)
class Scheduler:
    """Owns the waiting and the running sequences. Nothing here blocks; the driver asks for work whenever a frame came
    round.

    Decode frames: as many on the ring as `pace` finds useful, with the running sequences spread over them. Prefill
    chunks: as many as stages while nothing decodes; otherwise a number and size that delay the other sequences by at
    most prefill_budget_s, in turns with their frames.
    """

    limits: SchedulerLimits
    pace: Pace
    _queue: FairQueue[Sequence] = field(init=False)
    _running: dict[int, Sequence] = field(default_factory=dict)
    _aside: dict[int, Sequence] = field(default_factory=dict)
    """Parked sequences that lost their places; they wait for their readers."""
    _held: int = 0
    """Tokens of all running sequences together: their part of the KV pool, now or soon."""
    _decodes: list[int] = field(default_factory=list)
    """Rows of each decode frame that is on its way."""
    _prefills: int = 0
    """Number of prefill frames on their way."""
    _turn: int = 0
    """Number of the last decode frame."""
    _chunk_turn: int = -1
    """`_turn` when the last chunk of prefill was sent."""
    _rest: int = 0
    """Decode frames that go before the next chunk, if that has only texts for vectors: a call has many of them, and a
    stream would otherwise wait for a chunk at each token."""
    _last_eviction: int = -EVICTION_TURNS
    _age: int = 0
    """Decode frames so far; a chunk of prefill counts as CHUNK_TURNS."""
    _kept_from: int = 0
    """Stages from this one on hold the positions of `Sequence.held`."""
    pressure: int = 0
    """The worst memory pressure of all stages' machines, in the last frame: see StageReport."""
    pressed_stage: int = 0
    """The stage with that pressure."""
    _lone: LoneTime = field(default_factory=LoneTime)
    _untried: list[Sequence] = field(default_factory=list)
    """New sequences that were taken or begun while nothing ran. How much memory the machines have is in the next
    report: they end if it is critically little."""
    room: int = 2**31
    """Positions that the stage with the least memory can hold, in the last frame; shared ones count once if all stages
    share them."""
    slack: int = 0
    """Positions beyond `room` that running sequences may grow by, in memory that they have already."""
    _is_full: bool = False
    """Whether a sequence was evicted for want of room, and none has left since."""
    shared: SharedPositions = field(default_factory=SharedPositions)
    """The positions that sequences hold together at every stage."""
    expect_shared: Callable[[Sequence], int] = lambda _: 0
    """The positions that a waiting sequence will probably hold together with running ones."""
    ends_prompts: Callable[[], bool] = lambda: False
    """Whether the last token of a prompt is computed with the tokens before it, see Sequence.ends_in_chunk: not if some
    stage cannot cut KV back."""
    _expected: tuple[int, int, int] = (-1, 0, 0)
    """The last answer of `expect_shared`: sequence, turn and positions."""
    is_exhausted: bool = False
    """After `next_work`: another call would return None until a frame comes round or a request comes or goes."""
    max_logit_rows: int = 16
    """Most positions of prompts whose logits one frame may ask for."""
    drafter: Drafter | None = None
    """Where drafts come from; None: there are none."""

    def __post_init__(self) -> None:
        self._queue = FairQueue(self.limits.max_waiting)

    @property
    def waiting(self) -> Iterable[Sequence]:
        return iter(self._queue)

    def places(self) -> Iterator[tuple[int, Sequence]]:
        """The places of all waiting sequences: 1 is next. Clients of equal priority count in order of arrival, although
        the one that has used the ring least will go first."""
        return enumerate(sorted(self._queue, key=lambda one: (not one.resumed, -one.priority, one.id)), 1)

    @property
    def running(self) -> Iterable[Sequence]:
        return self._running.values()

    @property
    def num_waiting(self) -> int:
        return len(self._queue)

    @property
    def has_waiting(self) -> bool:
        return bool(self._queue)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_parked(self) -> int:
        return len(self._aside) + sum(sequence.parked for sequence in list(self._running.values()))

    @property
    def num_held(self) -> int:
        """Positions that all running sequences hold together, now or soon."""
        return self._held

    @property
    def max_tokens(self) -> int:
        """Positions that all running sequences may hold together, each counted at its full length: what was planned, or
        less if a stage has less, and more by those that are shared."""
        return min(self.limits.max_tokens, self.room) + self.shared.saved

    def submit(self, sequence: Sequence) -> bool:
        """Queue a sequence; False if it is refused for the reason in `why_refused`. A resumed sequence is always
        taken."""
        if self.is_short_of_memory and not sequence.resumed:
            return False
        if not self._queue.push(sequence):
            return False
        if not self._running:
            self.pressure = 0  # as far as known: the last frame came round some time ago
        if not sequence.resumed and (self._untried or not self._running):
            self._untried.append(sequence)
        return True

    @property
    def why_refused(self) -> str:
        if self.pressure >= 2:
            return f"the machine of stage {self.pressed_stage} is short of memory: its ring takes no new requests"
        return f"{self.limits.max_waiting} requests are waiting already"

    @property
    def is_short_of_memory(self) -> bool:
        """Whether new requests are refused because a machine is critically short of memory."""
        return self.pressure >= 2 and bool(self._running)

    def take_untried(self) -> list[Sequence]:
        """The sequences that must end now because they are new and a machine is critically short of memory. Call it
        with each report."""
        if not self._untried:
            return self._untried
        untried, self._untried = self._untried, []
        return untried if self.pressure >= 2 else []

    def remove(self, sequence_id: int) -> bool:
        """Forget a sequence. True if it was running and stages hold KV of it."""
        if (aside := self._aside.pop(sequence_id, None)) is not None:
            self._queue.left(aside.client)
            return False
        running = self._running.pop(sequence_id, None)
        if running is None:
            self._queue.remove(sequence_id)
            return False
        self._held -= len(running.tokens) - running.expected
        self._is_full = False
        self._queue.left(running.client)
        return not running.waits

    def unpark(self, sequence: Sequence) -> None:
        """Continue a sequence whose reader has read all: it gets rows again, or goes to the head of the queue if it
        lost its place."""
        sequence.parked = False
        if self._aside.pop(sequence.id, None) is not None:
            self._queue.push_back(sequence)

    def evict(self) -> Iterator[Sequence]:
        """Move the youngest sequences back to the head of the queue while the running ones outgrow the KV pool; parked
        ones first, then those of the lowest priority. While a machine is short of memory, evict one more from time to
        time. Also set aside parked sequences whose places others wait for, and flex requests whose places requests that
        are not flex wait for.

        A parked sequence that runs alone gives way too while memory is critically short: nobody reads it.

        Yields each evicted sequence: the length of an output is not known at admission. An evicted sequence is computed
        again later: its tokens stay, and a token that is on its way round is still drawn. One sequence always runs.
        """
        while self._running and ((outgrown := self._is_outgrown()) or self._must_shrink()):
            last = max(reversed(self._running.values()), key=lambda one: (one.parked, -one.priority))
            if len(self._running) == 1 and not (last.parked and self.pressure >= 2):
                break
            self._last_eviction = self._age
            yield self._take_off(last)
            self._is_full = outgrown
        if not self._queue:
            return
        while (parked := self._in_the_way()) is not None:
            yield self._take_off(parked)
        while (flex := self._giving_way()) is not None:
            yield self._take_off(flex)

    def _take_off(self, sequence: Sequence) -> Sequence:
        del self._running[sequence.id]
        self._held -= len(sequence.tokens) - sequence.expected
        self._is_full = False
        sequence.computed = sequence.held = sequence.expected = 0
        if sequence.parked and len(self._aside) < self.limits.max_running:
            self._aside[sequence.id] = sequence
        else:
            self._queue.push_back(sequence)
        return sequence

    def _in_the_way(self) -> Sequence | None:
        """A parked sequence whose place another one waits for; at once if all running sequences are parked, because
        nothing moves then."""
        first = self._queue.first()
        if first is None or self._fits(first) or len(self._aside) >= self.limits.max_running:
            return None
        parked = [one for one in self._running.values() if one.parked]
        all_are = len(parked) == len(self._running)
        return next((one for one in parked if all_are or self._turn - one.last_turn >= EVICTION_TURNS), None)

    def _giving_way(self) -> Sequence | None:
        """The youngest running flex request, if a request that is not flex needs its place, and would fit without all
        flex requests."""
        first = self._queue.first()
        if first is None or is_flex(first) or self.pressure or self._fits(first):
            return None
        flex = [one for one in self._running.values() if is_flex(one)]
        others = len(self._running) - len(flex)
        held = self._held - sum(len(one.tokens) for one in flex)
        has_place = others < self.limits.max_running
        fits = has_place and (not others or held + len(first.tokens) <= self.max_tokens)
        return flex[-1] if flex and fits else None

    def _is_outgrown(self) -> bool:
        return self._held > self.max_tokens + self.slack

    def _fits(self, sequence: Sequence) -> bool:
        """Whether one more sequence fits. One sequence always runs. After an eviction for want of room there must be
        twice the room, or all that was planned, until a sequence has left: else the evicted one would be computed again
        and again."""
        if len(self._running) >= self.limits.max_running:
            return False
        if not self._running:
            return True
        times = 2 if self._is_full and self.room < self.limits.max_tokens else 1
        needed = self._held + times * len(sequence.tokens) - self.max_tokens
        return not self.pressure and (needed <= 0 or needed <= self._may_share(sequence))

    def _may_share(self, sequence: Sequence) -> int:
        """Positions that a waiting sequence will probably share. Not looked up in every turn while it waits."""
        if not self.shared.least:
            return 0
        asked, turn, positions = self._expected
        if asked != sequence.id or self._turn - turn >= EXPECT_TURNS:
            positions = self.expect_shared(sequence)
            positions = positions if positions >= self.shared.least else 0
            self._expected = sequence.id, self._turn, positions
        return positions

    def _must_shrink(self) -> bool:
        """Whether to evict for memory pressure; the memory freed last must have time to show in a reading. If all are
        parked, no frame with rows comes to count the time."""
        if self.pressure < 2:
            return False
        return self._age - self._last_eviction >= EVICTION_TURNS or all(one.parked for one in self._running.values())

    def memory_freed(self) -> None:
        """Note that memory was freed without an eviction: it must have time to show in a reading."""
        self._last_eviction = self._age

    def lone_at_critical(self, now: float) -> Sequence | None:
        """The only sequence that runs, once it has been alone for a while on a machine that is critically short of
        memory: no other can be evicted, because those that wait hold nothing. Call it with each frame that came round.
        now: seconds of any one clock."""
        is_lone = self.pressure >= 2 and len(self._running) == 1
        return next(iter(self._running.values())) if self._lone.is_over(is_lone=is_lone, now=now) else None

    def rewind(self, limits: SchedulerLimits, pace: Pace, kept_from: int, held: Mapping[int, int]) -> int:
        """Continue under a higher ballot, with no frame on its way: all running sequences go back to the head of the
        queue, to be computed again. Returns how many. Their tokens stay.

        held: by sequence, the positions that stages from kept_from on hold and do not compute again.
        """
        running = list(self._running.values())
        for sequence in chain(self._queue, self._aside.values()):
            sequence.lose_rows()
            sequence.held = 0
        for sequence in reversed(running):
            there = held.get(sequence.id, 0)
            sequence.lose_rows()
            sequence.source, sequence.expected = None, 0
            sequence.computed, sequence.held = (0, there) if kept_from else (there, 0)
            self._queue.push_back(sequence)
        self._running.clear()
        self._held = self._prefills = 0
        self._is_full = False
        self.shared = SharedPositions()  # whatever stages still share counts for each sequence from now on
        self._decodes.clear()
        self.limits, self.pace, self._kept_from = limits, pace, kept_from
        self.pressure = 0  # that of other machines than before, maybe
        return len(running)

    def admit(self) -> Iterator[Sequence]:
        """Move sequences from waiting to running while they fit; yields each, in the order of the queue."""
        while (sequence := self._queue.first()) is not None and self._fits(sequence):
            self._queue.pop()
            if self.pressure >= 2 and not sequence.resumed:
                self._untried.append(sequence)
            self._queue.charge(sequence.client, PROMPT_WEIGHT * len(sequence.tokens))
            is_short = len(self._running) > 0 and self._held + len(sequence.tokens) > self.max_tokens
            sequence.expected = self._may_share(sequence) if is_short else 0
            self._running[sequence.id] = sequence
            self._held += len(sequence.tokens) - sequence.expected
            yield sequence

    def next_work(self) -> Work | None:
        """The next frame's rows, or None if none should be sent before another frame comes round.

        A long prompt does not stop running streams: a sequence that has waited for one chunk goes before the next
        chunk, also where the number of batches has just become smaller. Texts for vectors leave running streams
        pace.STREAM_SHARE of their speed.
        """
        decoding: list[Sequence] = []
        ready: list[Sequence] = []
        prefilling, hurries = False, False
        for sequence in self._running.values():
            if sequence.prefill_left:
                prefilling = True
                hurries = hurries or not sequence.embeds
            elif sequence.awaits_disk:
                continue
            elif sequence.draws and sequence.source is None and not sequence.awaits_images:
                decoding.append(sequence)
                if not sequence.decoding and not sequence.parked:
                    ready.append(sequence)
        self.is_exhausted = not prefilling and not ready
        if self.is_exhausted:
            work = self._go_ahead(decoding)
            self.is_exhausted = work is None
            return work
        batches = self._batches(decoding, prefilling)
        if prefilling and self._has_room_for_chunk(decoding):
            held_up = any(sequence.last_turn <= self._chunk_turn for sequence in ready)
            streams = bool(ready or self._decodes)
            rests = streams and not hurries and self._turn - self._chunk_turn < self._rest
            if not held_up and not rests:
                self._chunk_turn = self._turn
                work = self._prefill_chunk(beside_streams=bool(decoding), hurries=hurries)
                self._rest = self.pace.steps_between(len(work.token_ids))
                return work
        if not ready or len(self._decodes) >= batches:
            return None
        share = self._share(len(decoding), batches) if len(ready) > 1 else 1
        work = self._decode_batch(ready, share, len(decoding))
        may_go_ahead = self.drafter is not None and len(decoding) < self.limits.num_stages
        is_last = len(work.rows) == len(ready) or len(self._decodes) >= batches
        self.is_exhausted = is_last and not prefilling and not may_go_ahead
        return work

    def came_round(self, work: Work) -> list[int]:
        """Note that a frame with this work is back, or will never be. Returns the sequences whose rows in it are
        stale."""
        if work.is_prefill:
            self._prefills -= 1
        elif work.rows and not work.goes_ahead:
            self._decodes.remove(len(work.rows))
        return [sequence.id for sequence in work.drawing if not sequence.came_round()]

    def token_drawn(self, sequence: Sequence, *token_ids: int) -> None:
        """Note a token drawn from a row that came round, and the tokens that must follow it, or output that was known
        before; the sequence can take its next step."""
        sequence.extend(token_ids)
        self._queue.charge(sequence.client, OUTPUT_WEIGHT * len(token_ids))
        if sequence.id in self._running:
            self._held += len(token_ids)

    def began(self, sequence: Sequence) -> None:
        """Note that stages begin a running sequence: `shared` knows its positions from now on."""
        self._held += sequence.expected
        sequence.expected = 0

    def copied(self, sequence: Sequence, positions: int, first_stage: int = 0) -> None:
        """Note that stages from first_stage on hold the first positions of its prompt, which have cost nothing. If not
        all stages do, first_stage is the one from which on stages kept their KV over the last change of the plan."""
        if first_stage:
            sequence.held = positions
        else:
            sequence.computed = positions
        self._queue.charge(sequence.client, -PROMPT_WEIGHT * positions)

    def _has_room_for_chunk(self, decoding: list[Sequence]) -> bool:
        return self._prefills < (self._chunks_beside()[0] if decoding else self.limits.num_stages)

    def _batches(self, decoding: list[Sequence], prefilling: bool) -> int:
        """The number of decode frames to keep on the ring: the useful number, but chunks replace all but one of them.
        One frame does the same work as several, or less."""
        batches = self.pace.batches(len(decoding))
        if decoding and prefilling:
            batches = max(1, batches + 1 - self._chunks_beside()[0])
        return batches

    def _chunks_beside(self) -> tuple[int, int]:
        """The number of chunks that may be on the ring beside running streams, and their tokens."""
        return self.pace.chunks(self.limits.prefill_budget_s, self.limits.prefill_chunk)

    def _prefill_chunk(self, *, beside_streams: bool, hurries: bool) -> Work:
        catching_up = any(sequence.catch_up_left for sequence in self._running.values())
        size = self._chunks_beside()[1] if beside_streams else self._chunk_alone()
        if beside_streams and not hurries:
            size = self.pace.vector_chunk(size)
        logit_rows = min(self.max_logit_rows, LOGIT_ROWS_BESIDE) if beside_streams else self.max_logit_rows
        ends = not catching_up and self.ends_prompts()
        dealt = deal_chunk(self._running, size, logit_rows, self.limits.max_rows, catching_up=catching_up, ends=ends)
        self._prefills += 1
        self._age += CHUNK_TURNS
        return chunk_of(self._running, dealt, self._turn, upto=self._kept_from if catching_up else 0)

    def _chunk_alone(self) -> int:
        """Tokens of a chunk while nothing streams."""
        left = sum(sequence.prefill_left for sequence in self._running.values())
        return self.pace.chunk(self.limits.prefill_alone_s, self.limits.prefill_chunk, left)

    def _share(self, rows: int, batches: int) -> int:
        """Rows of the next decode frame: no more of the larger frames than needed, or the rest would be small."""
        large, num_large = shares(rows, batches)
        return large if sum(size >= large for size in self._decodes) < num_large else max(1, large - 1)

    def _go_ahead(self, decoding: list[Sequence]) -> Work | None:
        """A row of drafts behind the rows of its sequence that are on their way; None if there is none. Only while
        fewer sequences decode than there are stages: else others keep the stages busy."""
        if self.drafter is None or not 0 < len(decoding) < self.limits.num_stages:
            return None
        for sequence in decoding:
            if sequence.may_go_ahead and (draft := self._draft(sequence, len(decoding))):
                return row_ahead(sequence, draft, self._turn, at_rows=self.drafter.cuts_at_rows)
        return None

    def _draft(self, sequence: Sequence, num_decoding: int, most: int = MOST_DRAFTED) -> tuple[int, ...]:
        """What a sequence drafts behind all that is known or on its way, at most `most` tokens, as far as KV has room
        for them."""
        assert self.drafter is not None, "asked before"
        most = min(most, LONGEST_DRAFT - 1 - sequence.forced, self.max_tokens - self._held - len(sequence.ahead))
        return tuple(self.drafter.propose(sequence, num_decoding, most)) if most > 0 else ()

    def _decode_batch(self, ready: list[Sequence], share: int, num_decoding: int) -> Work:
        chosen = ready
        if len(ready) > 1:
            # the sequence that waited longest comes first; one big batch would leave all but one stage idle
            ready.sort(key=_last_turn)
            chosen = ready[: max(1, min(share, self.limits.max_rows))]
        self._turn += 1
        self._age += 1
        self._decodes.append(len(chosen))
        if self.drafter is None:
            return decode_rows(chosen, {}, self._turn, at_rows=False)
        most = MOST_DRAFTED // len(chosen)
        drafts = {sequence.id: self._draft(sequence, num_decoding, most) for sequence in chosen}
        return decode_rows(chosen, drafts, self._turn, at_rows=self.drafter.cuts_at_rows)
