"""Decides what stages write to their disks, and which file a new prompt begins with. Pure.

A file is known by the hash of its content: the token ids, what images show, the scope of the request, and the ring that
computed it. The hashes of blocks are chained, so that equal hashes mean equal beginnings. Hashes are keyed in a closed
mesh, so that nobody can find out by guessing which prompts a file belongs to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Ordered
from hashlib import blake2b

import msgspec

from exo_mesh.domain.frame import DiskNews, ReadAhead, StoreKv
from exo_mesh.domain.runner.prefix_figures import PrefixFigures
from exo_mesh.rings.prefix_disk.file_format import HASH_BYTES, StoredPrefix
from exo_mesh.rings.runner.prefix.cache import KeptSequence, PrefixCache
from exo_mesh.rings.runner.prefix.index import BLOCK_TOKENS, TOKEN_BYTES, content_of
from exo_mesh.rings.runner.scheduling.sequence import Sequence

LEAST_TOKENS = 256
"""A shorter sequence is not written, and a file is not read for fewer tokens: computing them takes about as long."""

SETTLED_S = 2.0
"""A kept sequence is written once nobody has used it for so long; a conversation usually has its next turn later."""

BUSY_LAPS = 200
"""While requests run, one sequence is copied out of the engines in so many laps, so that less than 1 % of the gaps
between tokens become longer."""

WRITE_S = 300.0
"""A write that is not confirmed in this time does not hold up the next one. A sequence of 1 GiB is copied out in
1,024 laps beside a stream at most, and then checked and written for 16 s."""

FETCH_S = 10.0
"""Longest time that a sequence waits for its file while others run; then it is computed."""

RETRY_S = 60.0
"""Time without writes after a stage could not write, for example because its disk is full."""

LIST_AGAIN_S = 30.0
"""Time after which stages list their files again, if one of them could not use its disk: for example because a process
that is about to end still had it locked."""

MOST_BLOCKS = 2**18
"""Most hashes of blocks in the index, 16.7 million tokens; files beyond are not used."""

_BLOCK = BLOCK_TOKENS * TOKEN_BYTES


class OnDisk(msgspec.Struct, frozen=True):
    """The first `length` positions of the file `key`, which every stage has."""

    key: bytes
    length: int


class _Wait(msgspec.Struct):
    """Sequences that wait until every stage has read a file. stages: have read it already."""

    since: float
    length: int
    sequences: list[int]
    stages: set[int] = msgspec.field(default_factory=set)


class _OpenWrite(msgspec.Struct):
    """A file that stages write. stages: have written it already."""

    about: StoredPrefix
    kept: KeptSequence
    replaces: tuple[bytes, ...]
    since: float
    stages: set[int] = msgspec.field(default_factory=set)


class DiskIndex(msgspec.Struct):
    """The files of a ring's stages, as its driver knows them. ring: describes model, stages and engines. mine: gives
    the files at the driver's own stage, the last used ones last. secret: keys the hashes; empty in an open mesh."""

    num_stages: int
    ring: bytes
    mine: Callable[[], Iterable[StoredPrefix]]
    secret: bytes = b""
    is_on: bool = False
    """Whether all stages have listed their files."""
    hits: int = 0
    hit_tokens: int = 0
    misses: int = 0
    """Files that some stage did not have, or could not use."""
    _files: dict[bytes, StoredPrefix] = msgspec.field(default_factory=dict)
    _blocks: dict[bytes, dict[bytes, None]] = msgspec.field(default_factory=dict)
    """The files that have a block, by its chained hash."""
    _ends: dict[bytes, dict[bytes, None]] = msgspec.field(default_factory=dict)
    """The files whose last whole block it is, by its chained hash."""
    _writing: dict[bytes, _OpenWrite] = msgspec.field(default_factory=dict)
    _waits: dict[bytes, _Wait] = msgspec.field(default_factory=dict)
    _loading: dict[int, bytes] = msgspec.field(default_factory=dict)
    _paused_until: float = float("-inf")
    _listed_at: float = float("-inf")
    _laps: int = 0

    def change(self, num_stages: int) -> list[int]:
        """Go on with other stages, which must list their files. Returns the sequences that waited for a file."""
        waited = [sequence for wait in self._waits.values() for sequence in wait.sequences]
        self.num_stages, self.is_on = num_stages, False
        self._clear_files()
        for write in self._writing.values():
            write.kept.is_stored = False
        self._writing.clear()
        self._waits.clear()
        self._loading.clear()
        return waited

    def _clear_files(self) -> None:
        self._files.clear()
        self._blocks.clear()
        self._ends.clear()

    def must_list(self, now: float) -> bool:
        """Whether stages are to list their files again, because one of them had no disk the last time. Says so at most
        once in LIST_AGAIN_S."""
        if self.is_on or now - self._listed_at < LIST_AGAIN_S:
            return False
        self._listed_at = now
        return True

    def learn(self, lists: Ordered[tuple[bytes, ...] | None], now: float) -> None:
        """Note which files all stages have listed; None: a stage has no disk for them."""
        self._listed_at = now
        known = [set(one) for one in lists if one is not None]
        self.is_on = len(known) == len(lists) == self.num_stages
        self._clear_files()
        if self.is_on:
            on_all = set.intersection(*known)
            for about in reversed([about for about in self.mine() if about.key in on_all]):
                self._add(about)

    def note(self, stage: int, news: DiskNews, now: float) -> None:
        """Note what has happened on the disk of a stage."""
        for key in news.stored:
            if (write := self._writing.get(key)) is not None:
                write.stages.add(stage)
                if len(write.stages) == self.num_stages:
                    del self._writing[key]
                    self._add(write.about)
                    for old in write.replaces:
                        self._remove(old)
        for key in news.lost:
            self._remove(key)
            if (failed := self._writing.pop(key, None)) is not None:
                failed.kept.is_stored = False
                self._paused_until = now + RETRY_S
        for key in news.fetched:
            if (wait := self._waits.get(key)) is not None:
                wait.stages.add(stage)

    def _add(self, about: StoredPrefix) -> None:
        blocks = list(_split(about.blocks))
        if not blocks or len(self._blocks) + len(blocks) > MOST_BLOCKS:
            return
        self._files[about.key] = about
        self._ends.setdefault(blocks[-1], {})[about.key] = None
        for block in blocks:
            self._blocks.setdefault(block, {})[about.key] = None

    def _remove(self, key: bytes) -> None:
        about = self._files.pop(key, None)
        if about is None:
            return
        blocks = list(_split(about.blocks))
        _discard(self._ends, blocks[-1], key)
        for block in blocks:
            _discard(self._blocks, block, key)

    def find(self, sequence: Sequence, cuts_back: bool) -> OnDisk | None:
        """The file with the longest part of a new sequence; None if there is none of use. At least the last token is
        left to compute. Changes nothing."""
        limit = len(sequence.tokens) - 1 - sequence.forced
        if not self.is_on or not self._files or limit < LEAST_TOKENS or not sequence.may_begin_as_copy:
            return None
        content = content_of(sequence.content(limit))
        best: OnDisk | None = None
        common, last = 0, b""
        for block in self._chain(content, sequence.cache_scope):
            if block not in self._blocks:
                break
            common, last = common + BLOCK_TOKENS, block
            for key in self._ends.get(block, ()):
                if self._is_whole(key, content, block):
                    best = OnDisk(key, self._files[key].length)
        if cuts_back and common > (best.length if best is not None else 0):
            best = OnDisk(min(self._blocks[last], key=lambda key: self._files[key].length), common)
        if cuts_back and common:
            best = self._prompt_behind(last, common, content, best)
        return best if best is not None and best.length >= LEAST_TOKENS else None

    def _prompt_behind(self, block: bytes, common: int, content: bytes, best: OnDisk | None) -> OnDisk | None:
        """The file whose prompt ends in the block behind `block` and begins a content; `best` if that is longer, or if
        there is none."""
        for key in self._blocks[block]:
            about, least = self._files[key], best.length if best is not None else common
            if least < about.prompt < common + BLOCK_TOKENS and about.prompt * TOKEN_BYTES <= len(content):
                rest = content[common * TOKEN_BYTES : about.prompt * TOKEN_BYTES]
                if about.prompt_key == self._key(block, rest):
                    best = OnDisk(key, about.prompt)
        return best

    def _is_whole(self, key: bytes, content: bytes, block: bytes) -> bool:
        """Whether a content begins with all of a file, whose last whole block is the given one."""
        size = self._files[key].length * TOKEN_BYTES
        return size <= len(content) and key == self._key(block, content[size // _BLOCK * _BLOCK : size])

    def _chain(self, content: bytes, scope: bytes) -> Iterator[bytes]:
        """The chained hashes of the whole blocks of a content."""
        last = blake2b(self.ring + scope, digest_size=HASH_BYTES, key=self.secret).digest()
        for start in range(0, len(content) - _BLOCK + 1, _BLOCK):
            last = blake2b(last + content[start : start + _BLOCK], digest_size=HASH_BYTES, key=self.secret).digest()
            yield last

    def _key(self, last_block: bytes, rest: bytes) -> bytes:
        return blake2b(last_block + rest, digest_size=HASH_BYTES, key=self.secret, person=b"whole").digest()

    def wait_for(self, found: OnDisk, sequence: Sequence, now: float) -> ReadAhead | None:
        """Let a sequence wait for a file. Returns the op that makes stages read it, unless they do that already."""
        sequence.awaits_disk = True
        if (wait := self._waits.get(found.key)) is not None:
            wait.sequences.append(sequence.id)
            return None
        self._waits[found.key] = _Wait(now, found.length, [sequence.id])
        return ReadAhead(sequence.id, found.key)

    @property
    def is_waiting(self) -> bool:
        return bool(self._waits)

    def ready(self, now: float, is_idle: bool) -> Iterator[tuple[list[int], OnDisk | None]]:
        """The sequences that no longer wait, with the file that the first of them begins with; None: it took too long.
        is_idle: nothing else runs, so the stages may as well wait for their disks."""
        for key, wait in list(self._waits.items()):
            if is_idle or len(wait.stages) == self.num_stages:
                del self._waits[key]
                yield wait.sequences, OnDisk(key, wait.length)
            elif now - wait.since > FETCH_S:
                del self._waits[key]
                yield wait.sequences, None

    def loads(self, sequence_id: int, found: OnDisk) -> None:
        """Note that a sequence begins with a file."""
        self._loading[sequence_id] = found.key
        self.hits += 1
        self.hit_tokens += found.length

    def forget(self, sequence_id: int) -> None:
        """Forget a sequence that has ended, or begins anew."""
        self._loading.pop(sequence_id, None)
        for key, wait in list(self._waits.items()):
            if sequence_id in wait.sequences:
                wait.sequences.remove(sequence_id)
                if not wait.sequences:
                    del self._waits[key]

    def failed(self, sequence_id: int) -> bool:
        """Note that a stage could not begin a sequence. Whether the sequence began with a file, which is then not used
        again."""
        key = self._loading.pop(sequence_id, None)
        if key is None:
            return False
        self._remove(key)
        self.misses += 1
        return True

    def note_lap(self) -> None:
        """Count a frame that has come round."""
        self._laps += 1

    @property
    def is_writing(self) -> bool:
        """Whether some stage has not confirmed a write."""
        return bool(self._writing)

    def _is_settled(self, kept: KeptSequence, now: float) -> bool:
        return not kept.is_stored and kept.length >= LEAST_TOKENS and now - kept.used_at >= SETTLED_S

    def next_to_store(self, cache: PrefixCache, now: float, num_running: int) -> StoreKv | None:
        """The op that writes a kept sequence which nobody has used for a while; None: nothing is to be written now."""
        if not self._may_store(now, num_running):
            return None
        for kept in cache.kept():
            if self._is_settled(kept, now) and (op := self._store(kept, cache.cuts_back, now)) is not None:
                return op
        return None

    def store_evicted(self, kept: KeptSequence, cuts_back: bool, now: float, num_running: int) -> StoreKv | None:
        """The op that writes a sequence which memory gives up; None if it is on disk, or cannot be written now. If one
        request runs, it is the one that needs the room, and no stream waits for the copy."""
        num_others = num_running if num_running > 1 else 0
        if kept.is_stored or kept.length < LEAST_TOKENS or not self._may_store(now, num_others):
            return None
        return self._store(kept, cuts_back, now)

    def _may_store(self, now: float, num_running: int) -> bool:
        for key, write in list(self._writing.items()):
            if now - write.since > WRITE_S:
                del self._writing[key]
        if not self.is_on or self._writing or now < self._paused_until:
            return False
        return not num_running or self._laps >= BUSY_LAPS * self.num_stages

    def _store(self, kept: KeptSequence, cuts_back: bool, now: float) -> StoreKv | None:
        """The op that writes a kept sequence; None if disks have it. Not asked again for the same sequence."""
        kept.is_stored = True
        if kept.last_stages:
            return None
        chain = list(self._chain(kept.content, kept.scope))
        key = self._key(chain[-1], kept.content[len(chain) * _BLOCK :])
        if key in self._files or (cuts_back and chain[-1] in self._blocks):
            return None
        replaces = tuple(self._covered(chain, kept.content)) if cuts_back else ()
        prompt = kept.prompt if cuts_back and LEAST_TOKENS <= kept.prompt < kept.length else 0
        about = StoredPrefix(
            "", key, kept.length, kept.length, b"".join(chain), prompt, self._prompt_key(chain, kept.content, prompt)
        )
        self._writing[key] = _OpenWrite(about, kept, replaces, now)
        self._laps = 0
        return StoreKv(kept.id, key, kept.length, about.blocks, replaces, about.prompt, about.prompt_key)

    def _prompt_key(self, chain: list[bytes], content: bytes, prompt: int) -> bytes:
        """The key of the first `prompt` positions of a content; chain: the hashes of its blocks. b"" for none."""
        blocks = prompt // BLOCK_TOKENS
        return self._key(chain[blocks - 1], content[blocks * _BLOCK : prompt * TOKEN_BYTES]) if prompt else b""

    def _covered(self, chain: list[bytes], content: bytes) -> Iterator[bytes]:
        """The files that begin a content."""
        for block in chain:
            for key in self._ends.get(block, ()):
                if self._is_whole(key, content, block):
                    yield key

    def describe(self, figures: PrefixFigures) -> None:
        """Write the figures of the driver's index into a heartbeat. From any thread."""
        figures.disk_hits, figures.disk_hit_tokens, figures.disk_misses = self.hits, self.hit_tokens, self.misses
        figures.disk_is_on, figures.disk_known = self.is_on, len(self._files)


def _split(blocks: bytes) -> Iterator[bytes]:
    for start in range(0, len(blocks), HASH_BYTES):
        yield blocks[start : start + HASH_BYTES]


def _discard(files: dict[bytes, dict[bytes, None]], block: bytes, key: bytes) -> None:
    held = files.get(block)
    if held is not None:
        held.pop(key, None)
        if not held:
            del files[block]
