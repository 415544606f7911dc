"""The disk tier at one stage: two threads write and read files, and the engine's thread never waits for a write.

The engine's thread copies a sequence out of the engine (`store`, and then `copy_part` until all of it is copied), or
into it (`take`). What a stage has written, read
ahead or lost rides on the next frame as its `DiskNews`, from which the driver knows what all stages have.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from queue import Full, Queue

import msgspec

from exo_mesh.domain.frame import DiskNews, StoreKv
from exo_mesh.domain.runner.prefix_figures import PrefixFigures
from exo_mesh.domain.tensor import Tensor
from exo_mesh.engine.contract import SavedSequence
from exo_mesh.errors import EngineError
from exo_mesh.rings.prefix_disk.file_format import StoredPrefix, StoredPrefixError
from exo_mesh.rings.prefix_disk.folder import StageFolder

MOST_WRITES = 1
"""Sequences that wait while another is written; each is a copy in memory. Further ones are not stored."""

PART_BYTES = 2**20
"""Bytes after which the copying of a sequence pauses until the next frame, so that the streams that run wait for one
part at a time: 0.3 to 1 ms. A part ends with a tensor, so one that is larger is a part of its own."""

MOST_READ_AHEAD = 2
"""Sequences in memory that were read ahead of their first frame; the oldest one is dropped."""

WRITE_BYTES_PER_S = 128 * 2**20
"""Fastest writing, and fastest checksums before it, so that a slow disk, the cores and the memory are left to the
requests that run."""

TAKE_S = 10.0
"""Longest time that the engine's thread waits for a file which is being read: as long as a driver waits for it."""

RANK_TAKE_S = 5.0
"""The same at a rank of a tensor group, for all files of one frame together. Its other ranks wait meanwhile: the group
ends if a frame takes longer than 10 s (SHORTEST_DEADLINE_S)."""

FULL_PAUSE_S = 30.0
"""Time without writes after one has failed, for example because the disk is full."""

MOST_LISTED = 4096
"""Most keys that a stage lists: the last used ones."""

_log = logging.getLogger(__name__)


class _FileInMemory(msgspec.Struct):
    """A file that is read ahead. saved: None if it could not be read."""

    done: threading.Event = msgspec.field(default_factory=threading.Event)
    saved: SavedSequence | None = None


class _OpenCopy(msgspec.Struct):
    """A sequence that is being copied out of the engine. parts: still to be copied."""

    op: StoreKv
    parts: Iterator[SavedSequence]
    positions: int = 0
    tensors: dict[str, Tensor] = msgspec.field(default_factory=dict)


class DiskStore:
    """The files of a stage. `store`, `copy_part`, `finish_copy`, `fetch`, `take`, `list_all` and `take_news` are called
    in the engine's thread."""

    def __init__(
        self, folder: StageFolder, bytes_per_s: float = WRITE_BYTES_PER_S, why_not: Callable[[], str] = lambda: ""
    ) -> None:
        """why_not: returns why the files cannot be used yet; "" once they can be, after which it is not called."""
        self._folder = folder
        self._bytes_per_s = bytes_per_s
        self._why_not: Callable[[], str] | None = why_not
        self._writes: Queue[tuple[StoreKv, SavedSequence] | None] = Queue(MOST_WRITES)
        self._reads: Queue[tuple[bytes, _FileInMemory] | None] = Queue(MOST_READ_AHEAD)
        self._ahead: dict[bytes, _FileInMemory] = {}
        self._copy: _OpenCopy | None = None
        self._stored: list[bytes] = []
        self._lost: list[bytes] = []
        self._fetched: list[bytes] = []
        self._listed: tuple[bytes, ...] | None = None
        self._has_news = False
        self._turn = threading.Lock()
        self._stopping = threading.Event()
        self._paused_until = 0.0
        self._threads: list[threading.Thread] = []
        self.writes = self.errors = self.reads = 0
        self.num_files = self.num_bytes = 0
        self.problem = ""
        """Why nothing is written now, for people; "" if all is well."""

    def start(self) -> None:
        """Open the folder, and start the threads."""
        self.opens()
        for name, work in (("prefix disk writer", self._write_all), ("prefix disk reader", self._read_all)):
            thread = threading.Thread(target=work, name=name, daemon=True)
            thread.start()
            self._threads.append(thread)

    def close(self, patience_s: float = 0.5) -> None:
        """Stop the threads and release the folder. A write that does not end in time leaves no file behind."""
        self._stopping.set()
        for queue in (self._writes, self._reads):
            with contextlib.suppress(Full):
                queue.put_nowait(None)
        for thread in self._threads:
            thread.join(patience_s)
        self._folder.close()

    def opens(self) -> bool:
        """Whether the folder can be used: it is open, or has been opened now."""
        if self._why_not is not None:
            if why := self._why_not():
                self._fails(why)
                return False
            self._why_not = None
        try:
            is_open = self._folder.open()
        except OSError as exc:
            self._fails(f"{self._folder.path} cannot be used: {exc.strerror or exc}")
            return False
        if not is_open:
            self._fails(f"another process uses {self._folder.path}")
            return False
        self.problem = ""
        self._count()
        return True

    def _fails(self, problem: str) -> None:
        if problem != self.problem:
            _log.warning("the prefix cache writes nothing to disk: %s", problem)
        self.problem = problem

    def _count(self) -> None:
        self.num_files, self.num_bytes = len(self._folder.known()), self._folder.num_bytes

    def list_all(self) -> None:
        """Report all files with the next frame, if the folder can be used."""
        if self.opens():
            keys = tuple(about.key for about in self._folder.known()[-MOST_LISTED:])
            self._tell(lambda: setattr(self, "_listed", keys))

    def describe(self, figures: PrefixFigures) -> None:
        """Write the figures of this stage's disk into a heartbeat. From any thread."""
        figures.has_disk, figures.disk_files, figures.disk_bytes = True, self.num_files, self.num_bytes
        figures.disk_writes, figures.disk_errors, figures.disk_problem = self.writes, self.errors, self.problem

    def known(self) -> list[StoredPrefix]:
        """The files here, the last used ones last. From any thread."""
        return self._folder.known()

    def store(self, op: StoreKv, save: Callable[[int], Iterator[SavedSequence]]) -> None:
        """Begin to copy a sequence out of the engine, to let it be written. Does nothing if that is not possible now:
        the key is then reported as lost. save: the parts of a sequence; it must not change until all are copied."""
        is_busy = self._copy is not None or self._writes.full()
        if is_busy or time.monotonic() < self._paused_until or self._folder_is_closed():
            self._lose(op.key)
            return
        self._copy = _OpenCopy(op, save(op.sequence))

    @property
    def copied(self) -> int | None:
        """The sequence that is being copied out of the engine."""
        return None if self._copy is None else self._copy.op.sequence

    def copy_part(self) -> None:
        """Copy the next PART_BYTES of that sequence; after the last ones it is written."""
        self._go_on(PART_BYTES)

    def finish_copy(self) -> None:
        """Copy all that is left of that sequence."""
        self._go_on(None)

    def _go_on(self, most_bytes: int | None) -> None:
        copy, num_bytes = self._copy, 0
        if copy is None:
            return
        try:
            for part in copy.parts:
                copy.positions = part.length
                copy.tensors |= part.tensors
                num_bytes += sum(tensor.num_bytes for tensor in part.tensors.values())
                if most_bytes is not None and num_bytes >= most_bytes:
                    return
            if copy.positions < copy.op.length:
                raise EngineError(f"it holds {copy.positions} positions of {copy.op.length}")
            self._writes.put_nowait((copy.op, SavedSequence(copy.positions, copy.tensors)))
        except (EngineError, Full) as exc:
            _log.debug("sequence %d is not stored: %s", copy.op.sequence, exc)
            self._lose(copy.op.key)
        except Exception:  # noqa: BLE001 - logged; nothing is on disk then, and no running sequence needs it
            self.errors += 1
            _log.exception("sequence %d cannot be copied out of the engine", copy.op.sequence)
            self._lose(copy.op.key)
        self._copy = None

    def _folder_is_closed(self) -> bool:
        return bool(self.problem) and not self.opens()

    def fetch(self, key: bytes) -> None:
        """Begin to read a file into memory."""
        with self._turn:
            if key in self._ahead:
                return
            while len(self._ahead) >= MOST_READ_AHEAD:
                self._ahead.pop(next(iter(self._ahead)))
            read = self._ahead[key] = _FileInMemory()
        try:
            self._reads.put_nowait((key, read))
        except Full:
            self._drop(key)

    def take(self, key: bytes, patience_s: float = TAKE_S) -> SavedSequence:
        """The sequence of a file, which is read now unless `fetch` has done so. Raises EngineError if there is none, or
        a damaged one, or if that takes longer than patience_s."""
        self.fetch(key)
        with self._turn:
            read = self._ahead.get(key)
        if read is None or not read.done.wait(patience_s):
            self._drop(key)
            raise EngineError("the prefix on disk was not read in time")
        self._drop(key)
        if read.saved is None:
            self._lose(key)
            raise EngineError("the prefix on disk is missing or damaged")
        return read.saved

    def refuse(self, key: bytes) -> None:
        """Remove a file whose content the engine does not take."""
        self._folder.remove(key)
        self._lose(key)

    def take_news(self) -> DiskNews | None:
        """What has happened since the last call; None: nothing."""
        if not self._has_news:  # nearly always, and each frame asks
            return None
        with self._turn:
            news = DiskNews(self._listed, tuple(self._stored), tuple(self._lost), tuple(self._fetched))
            self._listed, self._stored, self._lost, self._fetched = None, [], [], []
            self._has_news = False
        return news

    def _tell(self, change: Callable[[], None]) -> None:
        with self._turn:
            change()
            self._has_news = True

    def _lose(self, key: bytes) -> None:
        self._tell(lambda: self._lost.append(key))

    def _drop(self, key: bytes) -> None:
        with self._turn:
            self._ahead.pop(key, None)

    def _read_all(self) -> None:
        while (item := self._reads.get()) is not None:
            key, read = item
            try:
                about, tensors = self._folder.read(key)
                read.saved = SavedSequence(about.positions, tensors)
                self.reads += 1
            except StoredPrefixError as exc:
                _log.debug("a prefix on disk is not used: %s", exc)
            except Exception:  # noqa: BLE001 - logged; the prompt is computed
                _log.exception("a prefix on disk cannot be read")
            read.done.set()
            self._tell(lambda key=key: self._fetched.append(key))  # type: ignore[misc]

    def _write_all(self) -> None:
        while (item := self._writes.get()) is not None and not self._stopping.is_set():
            op, saved = item
            try:
                self._write(op, saved.length, saved.tensors)
            except OSError as exc:
                if self._stopping.is_set():
                    return
                self.errors += 1
                self._paused_until = time.monotonic() + FULL_PAUSE_S
                self._fails(f"{exc.strerror or exc} at {self._folder.root}")
                self._lose(op.key)
            except Exception:  # noqa: BLE001 - logged; nothing is on disk then
                self.errors += 1
                _log.exception("a prefix cannot be written")
                self._lose(op.key)
            del item, saved  # else the memory is held until the next one

    def _write(self, op: StoreKv, positions: int, tensors: Mapping[str, Tensor]) -> None:
        began, written = time.monotonic(), 0

        def pause(num_bytes: int) -> None:
            nonlocal written
            written += num_bytes
            ahead_s = written / self._bytes_per_s - (time.monotonic() - began)
            if self._stopping.wait(max(0.0, ahead_s)):
                raise OSError("the stage ends")

        about = StoredPrefix(self._folder.maker, op.key, op.length, positions, op.blocks, op.prompt, op.prompt_key)
        self._folder.write(about, tensors, pause)
        for key in op.replaces:
            if not self._folder.is_pinned(key):
                self._folder.remove(key)
        self.problem = ""
        self._count()
        self._tell(lambda: self._stored.append(op.key))
        self.writes += 1  # after the news: a write that is counted is one that the next frame reports
