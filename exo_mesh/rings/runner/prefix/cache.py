"""Decides which sequences the stages keep after their end, what a new prompt takes from them, and which one gives way.
Pure.

A stage keeps the KV of a sequence until a Remove op comes. So a kept sequence is one that ended without its Remove, or
a copy that was made for keeping (a snapshot). A new prompt begins with a Copy op. All of them ride on frames, so every
stage does them in the same order, and no stage is asked.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterable, Iterator
from itertools import islice

import msgspec

from exo_mesh.domain.frame import Copy, StageReport
from exo_mesh.domain.request import PrefixReport
from exo_mesh.domain.runner.prefix_figures import PrefixFigures
from exo_mesh.rings.runner.prefix.index import (
    BLOCK_TOKENS,
    NO_MATCH,
    TOKEN_BYTES,
    Match,
    PrefixIndex,
    common_tokens,
    content_of,
)
from exo_mesh.rings.runner.scheduling.sequence import Sequence

MOST_KEPT = 1024
"""Most kept sequences, whatever their size."""

LEAST_COMMON = 16
"""Shortest common beginning that is copied. One shorter than a block is found by its first tokens alone."""

_HEAD = LEAST_COMMON * TOKEN_BYTES

MOST_WITH_HEAD = 64
"""Most sequences with equal first tokens that a lookup compares, the newest: all chats of a program begin alike."""

MOST_COPIED = 256
"""A copy shorter than a block moves at most so many positions for each that it saves: some engines copy all that a
sequence holds."""

MOST_COMPARED = 8
"""Most sequences with equal blocks whose rest a lookup compares, token by token; the newest ones."""

HALF_LIFE_S = 600.0
"""Time after which a kept sequence that nobody uses is worth half: about the pause between two turns of a chat."""

PRESSED_S = 0.5
"""While a machine is short of memory (level 1), one kept sequence goes in this time: memory is measured as often."""

MOST_SHOWN = 16
"""Tokens of a kept sequence that its own client may see, to find out why a prompt was computed again."""

MOST_FAILURES = 3
"""Copies in a row that stages could not make before the cache of a ring is switched off."""


class KeptSequence(msgspec.Struct):
    """A sequence whose KV new prompts can copy. content: the tokens of its positions. used_at: when it was last used.
    runs: it still grows, and is not the cache's own. last_stages: how many stages at the end of the ring hold it; 0:
    all. scope: only sequences of the same scope use it. prompt: positions that the same prompt can copy, if it was the
    beginning of one."""

    id: int
    content: bytes
    used_at: float
    runs: bool = False
    last_stages: int = 0
    scope: bytes = b""
    client: str = ""
    prompt: int = 0
    is_stored: bool = False
    """Whether it is on disk, or need not be asked about again."""

    @property
    def length(self) -> int:
        return len(self.content) // TOKEN_BYTES


class Reuse(msgspec.Struct, frozen=True):
    """The first `length` positions of `source`, which stages from first_stage on hold."""

    source: int
    length: int
    first_stage: int


class PrefixCache(msgspec.Struct):
    """The kept sequences of a ring. most_sequences: kept and running ones together; 0: any number."""

    num_stages: int
    most_sequences: int = 0
    cuts_back: bool = True
    """Whether every stage can cut KV back to any position. Else only all positions of a sequence can be copied, and
    snapshots are made where a prompt ends or where prompts part."""
    most_tokens: int = 2**31
    """Positions that the stage with the smallest cache may keep; 0: the cache is off."""
    tokens: int = 0
    """Positions of all kept sequences."""
    num_kept: int = 0
    hits: int = 0
    misses: int = 0
    hit_tokens: int = 0
    evictions: int = 0
    changes: int = 0
    """How often known sequences came, went or were used."""
    _indexes: dict[bytes, PrefixIndex] = msgspec.field(default_factory=dict)
    """By scope; none is empty."""
    _heads: dict[tuple[bytes, bytes], dict[int, None]] = msgspec.field(default_factory=dict)
    """The known sequences by scope and first LEAST_COMMON tokens, the newest last."""
    _kept: dict[int, KeptSequence] = msgspec.field(default_factory=dict)
    _dropped: list[int] = msgspec.field(default_factory=list)
    _evicted: list[KeptSequence] = msgspec.field(default_factory=list)
    """Sequences that `make_room` has dropped since its last call."""
    _pressed_at: float = float("-inf")
    _failures: int = 0

    @property
    def is_on(self) -> bool:
        return self.most_tokens >= BLOCK_TOKENS and self._failures < MOST_FAILURES

    def keeps(self, sequence_id: int) -> bool:
        """Whether stages keep this sequence for the cache."""
        return sequence_id in self._kept and not self._kept[sequence_id].runs

    def find(self, sequence: Sequence, now: float) -> Reuse | None:
        """The longest part of a new sequence that stages hold; notes its use, and where a snapshot would have helped.

        At least the last token is left to compute. now: seconds of any one clock.
        """
        limit = len(sequence.tokens) - 1 - sequence.forced
        if not self.is_on or limit < LEAST_COMMON or not sequence.may_begin_as_copy:
            return None
        content = content_of(sequence.content(limit))
        match = self._match(content, sequence.cache_scope)
        found = self._longest(match, content) if self.cuts_back else None
        if found is None:
            found = self._whole(match.on_the_way, content)
        if not self.cuts_back and match.blocks * BLOCK_TOKENS > (found.length if found is not None else 0):
            sequence.snapshot_at = match.blocks * BLOCK_TOKENS
        if found is None:
            self.misses += 1
            return None
        self.note_hit(found.length)
        kept = self._kept[found.source]
        kept.used_at = now
        self.changes += 1
        if self._is_taken_over(kept, found, sequence):
            self._drop(kept.id)
        return found

    def _is_taken_over(self, kept: KeptSequence, found: Reuse, sequence: Sequence) -> bool:
        """Whether a new sequence begins with all of a kept one: stages then take the memory over instead of copying it.
        The new sequence is a source for others as soon as its prompt is computed."""
        is_whole = found.length == kept.length and not found.first_stage
        return self.cuts_back and is_whole and sequence.is_kept and not kept.runs

    def nearest(self, sequence: Sequence) -> PrefixReport | None:
        """Where a new prompt parts from the known sequence that begins most like it; None if the cache is off or the
        prompt is shorter than LEAST_COMMON. Shows tokens only of sequences of the same client."""
        limit = len(sequence.tokens) - 1
        if not self.is_on or limit < LEAST_COMMON:
            return None
        content = content_of(sequence.content(limit))
        match = self._match(content, sequence.cache_scope)
        best, common = None, 0
        for kept in map(self._kept.__getitem__, reversed(match.closest[-MOST_COMPARED:])):
            length = common_tokens(kept.content, content, match.blocks * BLOCK_TOKENS)
            if best is None or length > common:
                best, common = kept, length
        if best is None:
            return PrefixReport(0)
        is_own = bool(sequence.client) and best.client == sequence.client
        theirs = best.content[common * TOKEN_BYTES : (common + MOST_SHOWN) * TOKEN_BYTES] if is_own else b""
        return PrefixReport(common, tuple(array("I", theirs)), is_own)

    @property
    def shares_running(self) -> bool:
        """Whether a prompt that is being computed can be copied in part."""
        return self.is_on and self.cuts_back

    def known(self, sequence: Sequence) -> int:
        """How many positions of a new sequence stages hold, to within a block. Changes nothing."""
        return (
            self._match(content_of(sequence.content(len(sequence.tokens) - 1)), sequence.cache_scope).blocks
            * BLOCK_TOKENS
        )

    def common_with_running(self, sequence: Sequence) -> int:
        """How many positions a new sequence has in common with a running one whose prompt is computed, at most. Changes
        nothing."""
        if not self.shares_running or not sequence.may_begin_as_copy:
            return 0
        content = content_of(sequence.content(len(sequence.tokens) - 1 - sequence.forced))
        running = (one for one in self._kept.values() if one.runs and one.scope == sequence.cache_scope)
        return max((common_tokens(one.content, content) for one in running), default=0)

    def _match(self, content: bytes, scope: bytes) -> Match:
        """The known sequences that begin like a content, as PrefixIndex finds them. Sequences shorter than a block that
        it begins with are on the way; without a common block the closest ones have a common head."""
        index = self._indexes.get(scope)
        found = NO_MATCH if index is None else index.match(content)
        newest = islice(reversed(self._heads.get((scope, content[:_HEAD]), {})), MOST_WITH_HEAD)
        if not (alike := tuple(newest)[::-1]):
            return found
        short = tuple(one for one in alike if self._kept[one].length < BLOCK_TOKENS)
        return Match(found.blocks, found.closest or alike, short + found.on_the_way)

    def note_hit(self, num_tokens: int) -> None:
        """Count a prompt with so many tokens that other requests had computed."""
        self.hits += 1
        self.hit_tokens += num_tokens

    def _longest(self, match: Match, content: bytes) -> Reuse | None:
        """A part of a sequence that can be cut back."""
        best: Reuse | None = None
        most = MOST_COMPARED if match.blocks else MOST_WITH_HEAD
        for kept in map(self._kept.__getitem__, reversed(match.closest[-most:])):
            length = common_tokens(kept.content, content, match.blocks * BLOCK_TOKENS)
            is_dear = length < BLOCK_TOKENS and kept.length > MOST_COPIED * length
            if (best is None or length > best.length) and not is_dear:
                best = Reuse(kept.id, length, self._first_of(kept))
        return best

    def _whole(self, on_the_way: tuple[int, ...], content: bytes) -> Reuse | None:
        """All of a sequence, which need not be cut back."""
        for kept in map(self._kept.__getitem__, reversed(on_the_way)):
            if not kept.runs and content.startswith(kept.content):
                return Reuse(kept.id, kept.length, self._first_of(kept))
        return None

    def _first_of(self, kept: KeptSequence) -> int:
        return self.num_stages - kept.last_stages if kept.last_stages else 0

    def computed(self, sequence: Sequence, new_id: int, now: float) -> Copy | None:
        """Note that a running sequence has sent all of its prompt round, or all before its snapshot. Others can copy it
        from now on. Returns the op of a snapshot, which gets `new_id`, if the KV cannot be cut back to here later."""
        length = sequence.settled
        if not self.is_on or not sequence.is_kept or length < LEAST_COMMON or sequence.catch_up_left:
            return None
        content = content_of(sequence.content(length))
        if self.cuts_back:
            self._drop_covered(content, sequence)
            self._put(_kept(sequence.id, content, now, sequence, runs=True))
            return None
        if self._has_whole(content, sequence.cache_scope):
            return None
        self._put(_kept(new_id, content, now, sequence))
        return Copy(new_id, sequence.id, length, length)

    def ended(self, sequence: Sequence, now: float) -> bool:
        """Whether the stages keep a sequence that has ended well: all of its positions are right. False: remove it."""
        self._forget(sequence.id)
        length = sequence.settled
        if not self.is_on or not sequence.is_kept or length < LEAST_COMMON or sequence.catch_up_left:
            return False
        if not self.cuts_back and (sequence.stale or length < sequence.computed):
            return False  # stages hold drafts behind its last token
        content, scope = content_of(sequence.content(length)), sequence.cache_scope
        if self._has_whole(content, scope) or (self.cuts_back and self._is_covered(content, scope)):
            return False
        if self.cuts_back:
            self._drop_covered(content, sequence)
        self._put(_kept(sequence.id, content, now, sequence))
        return True

    def _put(self, kept: KeptSequence) -> None:
        self._kept[kept.id] = kept
        self.changes += 1
        if kept.length >= BLOCK_TOKENS:
            self._indexes.setdefault(kept.scope, PrefixIndex()).add(kept.id, kept.content)
        self._heads.setdefault((kept.scope, kept.content[:_HEAD]), {})[kept.id] = None
        self._count(kept, 1)

    def _forget(self, sequence_id: int) -> None:
        kept = self._kept.pop(sequence_id, None)
        if kept is not None:
            self.changes += 1
            if (index := self._indexes.get(kept.scope)) is not None:
                index.remove(sequence_id)
                if not index:
                    del self._indexes[kept.scope]
            head = kept.scope, kept.content[:_HEAD]
            del self._heads[head][sequence_id]
            if not self._heads[head]:
                del self._heads[head]
            self._count(kept, -1)

    def _count(self, kept: KeptSequence, sign: int) -> None:
        if not kept.runs:
            self.tokens += sign * kept.length
            self.num_kept += sign

    def _has_whole(self, content: bytes, scope: bytes) -> bool:
        """Whether a sequence of exactly this content is kept."""
        on_the_way = map(self._kept.__getitem__, self._match(content, scope).on_the_way)
        return any(not kept.runs and not kept.last_stages and kept.content == content for kept in on_the_way)

    def _is_covered(self, content: bytes, scope: bytes) -> bool:
        """Whether a kept sequence begins with all of this content."""
        match = self._match(content, scope)
        closest = map(self._kept.__getitem__, match.closest)
        return any(not one.runs and not one.last_stages and one.content.startswith(content) for one in closest)

    def _drop_covered(self, content: bytes, sequence: Sequence) -> None:
        """Drop the kept sequences that `content` begins with: `sequence` holds them too now."""
        for kept in map(self._kept.__getitem__, self._match(content, sequence.cache_scope).on_the_way):
            if not kept.runs and kept.id != sequence.id and content.startswith(kept.content):
                self._drop(kept.id)

    def _drop(self, sequence_id: int) -> None:
        self._forget(sequence_id)
        self._dropped.append(sequence_id)

    def learn(self, reports: Iterable[StageReport]) -> None:
        """Note the limits of all stages: the smallest cache, and whether each of them can cut KV back."""
        reports = list(reports)
        cuts_back = all(report.cuts_anywhere for report in reports)
        if cuts_back != self.cuts_back:
            for kept in [one for one in self._kept.values() if one.runs]:
                self._forget(kept.id)
        self.cuts_back = cuts_back
        self.most_tokens = min(report.kept_tokens for report in reports)

    def describe(self, figures: PrefixFigures) -> None:
        """Write the figures of the cache into a heartbeat. From any thread."""
        figures.hits, figures.misses, figures.hit_tokens = self.hits, self.misses, self.hit_tokens
        figures.evictions, figures.kept_tokens, figures.is_on = self.evictions, self.tokens, self.is_on

    def lose(self, sequence_id: int) -> None:
        """Forget a sequence that some stage does not hold, or not rightly; a kept one is dropped."""
        if self.keeps(sequence_id):
            self._drop(sequence_id)
        else:
            self._forget(sequence_id)

    def copied(self, *, well: bool) -> None:
        """Note whether all stages could make a copy. After MOST_FAILURES failures in a row the cache is off."""
        self._failures = 0 if well else self._failures + 1
        if not self.is_on:
            self._drop_all()

    def make_room(self, held: int, pool: int, num_running: int, pressure: int, now: float) -> None:
        """Drop the least valuable kept sequences, as far as running ones need their room. held: positions of running
        sequences; pool: positions that all sequences may hold; pressure: see StageReport."""
        self._evicted.clear()
        most = min(self.most_tokens, pool - held) if pressure < 2 and self.is_on else 0
        most_kept = min(MOST_KEPT, self.most_sequences - num_running if self.most_sequences else MOST_KEPT)
        while self.tokens > 0 and (self.tokens > most or self.num_kept > most_kept):
            self._evict(now)
        if pressure and self.tokens and now - self._pressed_at >= PRESSED_S:
            self._pressed_at = now
            self._evict(now)

    def _evict(self, now: float) -> None:
        least = min(self.kept(), key=lambda one: self._value(one, now))
        self._drop(least.id)
        self._evicted.append(least)
        self.evictions += 1

    @property
    def evicted(self) -> Iterable[KeptSequence]:
        """The sequences that the last `make_room` has dropped."""
        return iter(self._evicted)

    def kept(self) -> list[KeptSequence]:
        """The kept sequences, the oldest first."""
        return [one for one in self._kept.values() if not one.runs]

    def _value(self, kept: KeptSequence, now: float) -> float:
        """What keeping a sequence is worth for each of its positions: the positions that would have to be computed
        again, less with the time since its last use. How often it was used does not count: else what was asked often
        an hour ago would keep new prompts out, which drive each other out before their second use."""
        alone = kept.length
        if self.cuts_back and alone >= BLOCK_TOKENS:  # else another sequence with the same beginning does not help
            common = kept.length // BLOCK_TOKENS - self._indexes[kept.scope].blocks_alone(kept.id)
            alone -= common * BLOCK_TOKENS
        age_s = max(0.0, now - kept.used_at)
        return float(alone / kept.length * 0.5 ** (age_s / HALF_LIFE_S))

    @property
    def has_dropped(self) -> bool:
        """Whether `take_dropped` has something to take."""
        return bool(self._dropped)

    def take_dropped(self) -> Iterator[int]:
        """The sequences that every stage must remove, since the last call."""
        while self._dropped:
            yield self._dropped.pop(0)

    def _drop_all(self) -> None:
        for kept in list(self._kept.values()):
            if kept.runs:
                self._forget(kept.id)
            else:
                self._drop(kept.id)

    def change(self, num_stages: int, kept_from: int, gone: Collection[int]) -> None:
        """Switch to a new plan; stages from kept_from on keep their KV. gone: sequences with rows or copies on their
        way, which some stages do not have."""
        self._dropped.clear()  # no stage keeps what `held` does not name
        last_stages = num_stages - kept_from if kept_from else 0
        for kept in list(self._kept.values()):
            if kept.runs or kept.id in gone or kept_from >= num_stages or kept.last_stages not in (0, last_stages):
                self._forget(kept.id)
            else:
                kept.last_stages = last_stages
        self.num_stages = num_stages
        self.changes += 1

    def sequences(self) -> Iterable[KeptSequence]:
        """All known sequences, also running ones."""
        return self._kept.values()

    @property
    def held(self) -> tuple[int, ...]:
        """The kept sequences."""
        return tuple(kept.id for kept in self._kept.values() if not kept.runs)


def _kept(sequence_id: int, content: bytes, now: float, like: Sequence, *, runs: bool = False) -> KeptSequence:
    """A sequence that is known from now on, of the scope and client of another one."""
    return KeptSequence(sequence_id, content, now, runs, scope=like.cache_scope, client=like.client, prompt=like.prompt)
