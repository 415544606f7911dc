"""Fetches bytes into a model's directory: a few chunks at once, each from the first of its sources that has it.

A chunk that fails at one source continues at the next, from the byte where it stopped. Bytes that have arrived are kept
whatever happens later.
"""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future
from concurrent.futures import wait as wait_for_futures
from dataclasses import dataclass, field

import msgspec

from exo_mesh.domain.spans import Pieces, Span, Spans, cut
from exo_mesh.errors import CancelledRequestError, FetchError, MeshError
from exo_mesh.models.fetcher.duty import DutyCycle
from exo_mesh.models.fetcher.source import ModelFiles, NoRangesError, Sink, SourceError
from exo_mesh.models.fetcher.writing import DiskError, ModelWriter
from exo_mesh.models.file_server.listing import Listing

MAX_AT_ONCE = 8
"""Most chunks in flight, of all requests together."""

CHUNK_BYTES = 16 * 2**20
WRITE_BYTES = 2**20

TRIES = 6
"""Consecutive attempts without a byte, at the last source, before a chunk fails: 15 s of back-off."""

TRIES_BEFORE_OTHERS = 2
"""The same for a source that others follow."""

FIRST_PAUSE_S, LAST_PAUSE_S = 0.5, 8.0
MAX_RETRY_AFTER_S = 600.0
REST_S = 10.0
"""How long a source that does not answer is skipped while there are others."""

PROGRESS_INTERVAL_S = 0.5
BLOCKED_INTERVAL_S = 0.1


class SourceLostError(FetchError):
    """A source did not answer several times in a row."""


OpenFiles = Callable[[], ModelFiles]


@dataclass(eq=False)
class UsedSource:
    """A source during one request, opened on first use. is_local: it reads no network, so its bytes are not counted."""

    peer: str
    open_files: OpenFiles
    is_local: bool = False
    is_given_up: bool = False
    rests_until: float = 0.0
    _files: ModelFiles | None = None
    _listing: Listing | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def files(self) -> ModelFiles:
        """Opens the source if necessary. Raises FetchError and SourceError."""
        with self._lock:
            if self._files is None:
                self._files = self.open_files()
            return self._files

    def listing(self) -> Listing:
        """What the source lists, read once. Raises FetchError and SourceError."""
        if self._listing is None:
            self._listing = self.files().listing()
        return self._listing

    def close(self) -> None:
        with self._lock:
            if self._files is not None:
                self._files.close()


class Order(msgspec.Struct, frozen=True):
    """Bytes of one file to be fetched in one piece, and the sources to try in this order."""

    name: str
    span: Span
    sources: tuple[UsedSource, ...]


@dataclass(eq=False)
class Context:
    """The state of a request. received: bytes from each source, by peer id, "" for the hub.

    stop: set while everything that runs for the request must end.
    """

    executor: Executor
    duty: DutyCycle
    stop: threading.Event = field(default_factory=threading.Event)
    is_cancelled: bool = False
    received: Counter[str] = field(default_factory=Counter)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def cancel(self) -> None:
        self.is_cancelled = True
        self.stop.set()

    def go_on_after_failure(self) -> None:
        """Resets `stop` after a failure, when no work of the request runs any more, to allow another attempt."""
        if not self.is_cancelled:
            self.stop.clear()

    def check(self) -> None:
        if self.stop.is_set():
            raise CancelledRequestError("the download was cancelled; what was fetched is kept")

    def go_on(self) -> None:
        """Called between pieces of work: stops a cancelled request, and slows down on a busy machine."""
        self.check()
        self.duty.rest()

    def pause(self, pause_s: float) -> None:
        self.stop.wait(pause_s)
        self.check()

    def count(self, source: UsedSource, num_bytes: int) -> None:
        if not source.is_local:
            with self._lock:
                self.received[source.peer] += num_bytes


def read_persistently(
    source: UsedSource, name: str, span: Span, sink: Sink, context: Context, *, tries: int = TRIES
) -> None:
    """Passes all bytes of a span to the sink in order, with any number of attempts as long as bytes arrive.

    Raises FetchError if no byte arrives in `tries` consecutive attempts, or if the source refuses; NoRangesError once.
    """
    position, failed = span[0], 0

    def take(data: memoryview) -> None:
        nonlocal position
        context.count(source, len(data))
        sink(data)
        position += len(data)

    while position < span[1]:
        context.check()
        begun_at = position
        try:
            source.files().read(name, position, span[1], take)
        except NoRangesError:
            raise
        except SourceError as exc:
            failed = failed + 1 if position == begun_at else 0
            if failed >= tries or (exc.retry_after_s or 0) > MAX_RETRY_AFTER_S:
                raise SourceLostError(str(exc)) from exc
            context.pause(_pause_s(failed) if exc.retry_after_s is None else exc.retry_after_s)


def _pause_s(failed: int) -> float:
    """Back-off: doubles with each attempt without a byte, and is random so that threads do not retry at once."""
    if not failed:
        return 0.0
    doubled: float = FIRST_PAUSE_S * 2 ** (failed - 1)
    return min(doubled, LAST_PAUSE_S) * random.uniform(0.7, 1.0)


def read_whole(source: UsedSource, name: str, size: int, context: Context) -> bytes:
    """Reads a small file into memory. Raises FetchError."""
    content = bytearray()

    def keep(data: memoryview) -> None:
        content.extend(data)

    try:
        read_persistently(source, name, (0, size), keep, context)
    except NoRangesError:  # the read was interrupted: restart it from the beginning
        content.clear()
        read_persistently(source, name, (0, size), keep, context)
    return bytes(content)


class Download:
    """Fetches the bytes of some orders into one directory, and verifies the files that become complete. on_progress:
    called with the bytes that are there, and those of all orders."""

    def __init__(
        self,
        writer: ModelWriter,
        wanted: Sequence[tuple[Pieces, tuple[UsedSource, ...]]],
        context: Context,
        on_progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> None:
        self._writer = writer
        self._on_progress = on_progress
        self._context = context
        self._wanted = wanted
        self._orders: deque[Order] = deque()
        self._blocked: list[Order] = []  # other requests fetch some of these bytes
        self._running: dict[Future[list[Order]], str] = {}  # by file name
        self._checked: set[str] = set()
        self._reported_at = 0.0
        self._streamed: set[str] = set()  # files of sources without ranges
        self._dropped: set[str] = set()
        self._ahead: Future[None] | None = None

    def run(self) -> None:
        """Returns when all bytes are there, and complete files have their final names. Raises FetchError."""
        self._writer.require_free(sum(self._writer.missing_bytes(pieces) for pieces, _ in self._wanted))
        self._orders.extend(self._missing())  # after the check: a false file size would make an endless list
        self._progress()
        try:
            while self._orders or self._running or self._blocked or self._is_more_to_do():
                self._turn()
            self._writer.sync()
        except BaseException:
            self._context.stop.set()
            if self._context.is_cancelled:
                self._close_sources()
            wait_for_futures(self._running)
            self._await_hashing()
            self._context.go_on_after_failure()
            raise
        self._await_hashing()
        self._progress()

    def _turn(self) -> None:
        """Starts as many orders as allowed, and handles the ended ones."""
        self._context.check()
        while self._orders and len(self._running) < MAX_AT_ONCE:
            self._begin(self._orders.popleft())
        if self._running:
            done, _ = wait_for_futures(self._running, PROGRESS_INTERVAL_S, FIRST_COMPLETED)
            for future in done:
                self._orders.extendleft(reversed(future.result()))
                self._check_soon(self._running.pop(future))
        elif self._blocked:
            self._writer.wait(BLOCKED_INTERVAL_S)
            self._orders, self._blocked = deque(self._blocked), []
        if time.monotonic() - self._reported_at >= PROGRESS_INTERVAL_S:
            self._progress()
            if self._ahead is None or self._ahead.done():
                self._ahead = self._context.executor.submit(self._hash_ahead)

    def _close_sources(self) -> None:
        """Ends reads that wait for a silent source."""
        for source in {source for _, sources in self._wanted for source in sources}:
            source.close()

    def _await_hashing(self) -> None:
        if self._ahead is not None:
            wait_for_futures((self._ahead,))

    def _hash_ahead(self) -> None:
        """Hashes the beginnings of files while the rest is arriving."""
        with contextlib.suppress(CancelledRequestError):
            for name in dict.fromkeys(name for pieces, _ in self._wanted for name in pieces):
                self._writer.hash_ahead(name, self._context.go_on)

    def _missing(self) -> list[Order]:
        return [
            Order(name, span, sources)
            for pieces, sources in self._wanted
            for name, spans in pieces.items()
            for span in cut(self._writer.missing(name, tuple(spans)), CHUNK_BYTES)
        ]

    def _is_more_to_do(self) -> bool:
        """When nothing runs: starts to verify files, and orders bytes again that another request found corrupt."""
        for name in dict.fromkeys(name for pieces, _ in self._wanted for name in pieces):
            self._check_soon(name)
        if not self._running:
            self._orders.extend(self._missing())
        return bool(self._running or self._orders)

    def _check_soon(self, name: str) -> None:
        """Verifies a file once it is complete, and again only after it was fetched again."""
        if name not in self._checked and self._writer.is_whole(name):
            self._checked.add(name)
            self._running[self._context.executor.submit(self._finish, name)] = name

    def _begin(self, order: Order) -> None:
        """Starts the parts of an order that no other request fetches."""
        free, is_busy = self._writer.claim(order.name, order.span)
        if is_busy:
            self._blocked.append(order)
        if order.name in self._streamed:
            free = ((free[0][0], free[-1][1]),) if free else ()
        for span in free:
            mine = Order(order.name, span, order.sources)
            self._running[self._context.executor.submit(self._fetch, mine)] = order.name

    def _fetch(self, order: Order) -> list[Order]:
        """Fetches the bytes of an order; returns orders that must be fetched in another way."""
        try:
            sink = _Writing(self._writer, self._context, order)
            try:
                self._from_any(order, sink)
            finally:
                sink.flush()
        except NoRangesError:
            return self._stream(order)
        finally:
            self._writer.release(order.name, (order.span,))
        return []

    def _from_any(self, order: Order, sink: _Writing) -> None:
        problem: MeshError = FetchError(f"no source has {order.name} any more")
        left = [source for source in order.sources if not source.is_given_up]
        sources = [source for source in left if source.rests_until <= time.monotonic()] or left
        for source in sources:
            tries = TRIES if source is sources[-1] else TRIES_BEFORE_OTHERS
            span = (sink.position, order.span[1])
            try:
                return read_persistently(source, order.name, span, sink, self._context, tries=tries)
            except (DiskError, CancelledRequestError):
                raise
            except MeshError as exc:
                problem = exc
                source.is_given_up = getattr(exc, "is_final", True) and len(order.sources) > 1
                if isinstance(exc, SourceLostError):
                    source.rests_until = time.monotonic() + REST_S
        raise problem

    def _stream(self, order: Order) -> list[Order]:
        """Handles a source that sends whole files only: the first order of a file then takes all its wanted bytes."""
        if order.name in self._streamed:
            return []
        self._streamed.add(order.name)
        spans = [span for pieces, _ in self._wanted for name, spans in pieces.items() if name == order.name
                 for span in spans]  # fmt: skip
        return [Order(order.name, (min(start for start, _ in spans), max(stop for _, stop in spans)), order.sources)]

    def _finish(self, name: str) -> list[Order]:
        """Verifies a complete file. A corrupt file is fetched once more, from the last of its sources."""
        if self._writer.finish(name, self._context.go_on):
            return []
        self._checked.discard(name)
        if name in self._dropped:
            raise FetchError(
                f"{name} does not match its sha256, also after it was fetched again",
                remedy="try again later; if that does not help, the file at the source is corrupt",
                is_final=True,
            )
        self._dropped.add(name)
        sources = next(sources for pieces, sources in reversed(self._wanted) if name in pieces)
        honest = tuple(source for source in sources if not source.is_given_up)[-1:] or sources[-1:]
        size = self._writer.manifest.files[name].size
        return [Order(name, span, honest) for span in cut(((0, size),), CHUNK_BYTES)]

    def _progress(self) -> None:
        self._reported_at = time.monotonic()
        total = missing = 0
        for pieces, _ in self._wanted:
            total += sum(stop - start for spans in pieces.values() for start, stop in spans)
            missing += self._writer.missing_bytes(pieces)
        self._on_progress(total - missing, total)


class _Writing:
    """A sink that writes an order's bytes in large pieces, and skips bytes that are present."""

    def __init__(self, writer: ModelWriter, context: Context, order: Order) -> None:
        self.position = order.span[0]
        self._writer = writer
        self._context = context
        self._name = order.name
        self._buffer = bytearray()

    def __call__(self, data: memoryview) -> None:
        self._buffer += data
        self.position += len(data)
        self._context.check()  # what has arrived is kept, also after the request was cancelled
        if len(self._buffer) >= WRITE_BYTES:
            self.flush()
            self._context.go_on()

    def flush(self) -> None:
        buffer, self._buffer = self._buffer, bytearray()
        start = self.position - len(buffer)
        missing: Spans = self._writer.missing(self._name, ((start, self.position),)) if buffer else ()
        view = memoryview(buffer)
        for begin, end in missing:
            self._writer.write(self._name, begin, view[begin - start : end - start])
