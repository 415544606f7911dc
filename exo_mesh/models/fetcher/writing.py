"""Writes into a model's directory: its lock, its manifest, and the bytes that arrive.

A span is entered into the manifest only after its bytes were flushed to the disk, so that a manifest never lists bytes
that a crash destroyed. Threads of several requests may write into one directory; none fetches what another fetches.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from exo_mesh.domain.spans import Digests, Pieces, Span, Spans, common, merged, minus, num_bytes
from exo_mesh.errors import FetchError, ModelError
from exo_mesh.weights.fetched import (
    FetchedFile,
    Manifest,
    open_own_file,
    part_of,
    read_manifest,
    stamp_of,
    write_manifest,
)
from exo_mesh.weights.model_files import label

LOCK_FILE = "exo-mesh.lock"
LOCK_LIMIT_S = 2.0
"""How long to wait for another process: a process that was just killed may still be ending."""

SYNC_INTERVAL_S = 0.25
"""Shortest time between two writes of the manifest; a crash loses what arrived in this time."""

_HASHED_BYTES = 4 * 2**20
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class DiskError(FetchError):
    """The disk refuses bytes, whatever their source."""


class RunningDigest:
    """SHA-256 over the beginning of a file. It runs while the rest is arriving, so it costs little time at the end."""

    def __init__(self) -> None:
        self._sha = hashlib.sha256()
        self._position = 0
        self._lock = threading.Lock()

    def extend(self, file: Path, stop: int, meanwhile: Callable[[], None]) -> str:
        """Continues to byte `stop` and returns the digest in hex. Raises OSError, and what `meanwhile` raises."""
        with self._lock, file.open("rb", buffering=0) as stream:
            stream.seek(self._position)
            while self._position < stop:
                block = stream.read(min(_HASHED_BYTES, stop - self._position))
                if not block:
                    raise OSError(errno.EIO, "the file has become shorter")
                self._sha.update(block)
                self._position += len(block)
                meanwhile()
            return self._sha.hexdigest()


class ModelWriter:
    """Writes into one directory, from several threads. Raises DiskError if the disk refuses."""

    def __init__(self, model_dir: Path, floor_bytes: int) -> None:
        """Raises FetchError if another process writes there, or if the directory was not created by a fetcher."""
        self.model_dir = model_dir
        self.name = label(model_dir)
        self.floor_bytes = floor_bytes
        self._changed = threading.Condition()
        self._syncing = threading.RLock()  # held by the thread that changes the manifest
        self._checking = threading.Lock()
        self._written: dict[str, Spans] = {}
        self._flushing: dict[str, Spans] = {}
        self._claimed: dict[str, Spans] = {}
        self._descriptors: dict[str, int] = {}
        self._digests: dict[str, RunningDigest] = {}
        self._problem: FetchError | None = None
        self._is_closing = False
        self._lock = lock_directory(model_dir)
        try:
            self.manifest = self._recovered()
            self.name = self.manifest.name
        except BaseException:
            self.close()
            raise
        self._syncer = threading.Thread(target=self._keep_synced, name=f"sync {model_dir.name}", daemon=True)
        self._syncer.start()

    def close(self) -> None:
        """Enters what was written into the manifest, as far as the disk allows, and releases the directory's lock."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        with contextlib.suppress(FetchError):  # errors of the disk were raised to the writers
            if hasattr(self, "_syncer"):
                self._syncer.join()
                self.sync()
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors.clear()
        os.close(self._lock)

    def missing(self, name: str, spans: Spans) -> Spans:
        """Returns which of these bytes are not written yet."""
        with self._changed:
            return self._missing(name, spans)

    def missing_bytes(self, pieces: Pieces) -> int:
        with self._changed:
            return sum(num_bytes(self._missing(name, spans)) for name, spans in pieces.items())

    def claim(self, name: str, span: Span) -> tuple[Spans, bool]:
        """Returns (the bytes of a span that the caller must fetch, whether others fetch some). `release` them later."""
        with self._changed:
            missing = self._missing(name, (span,))
            free = minus(missing, self._claimed.get(name, ()))
            self._claimed[name] = merged((*self._claimed.get(name, ()), *free))
            return free, free != missing

    def release(self, name: str, spans: Spans) -> None:
        with self._changed:
            self._claimed[name] = minus(self._claimed.get(name, ()), spans)
            self._changed.notify_all()

    def wait(self, timeout_s: float) -> None:
        """Waits until something was released, or for timeout_s."""
        with self._changed:
            self._changed.wait(timeout_s)

    def write(self, name: str, offset: int, data: memoryview) -> None:
        """Writes bytes into a file's part. Raises DiskError."""
        if self._problem is not None:
            raise self._problem
        self.require_free(len(data))
        start = offset
        try:
            while data:
                count = os.pwrite(self._descriptor(name), data, offset)
                offset, data = offset + count, data[count:]
        except OSError as exc:
            raise self._refused(exc) from exc
        finally:
            with self._changed:
                self._written[name] = merged((*self._written.get(name, ()), (start, offset)))
                self._changed.notify_all()

    def require_free(self, more_bytes: int) -> None:
        """Raises DiskError unless this many bytes can be written without going below the floor."""
        try:
            free = shutil.disk_usage(self.model_dir).free
        except OSError as exc:
            raise self._refused(exc) from exc
        if free - more_bytes < self.floor_bytes:
            kept = f", and {_gib(self.floor_bytes)} must stay free" if self.floor_bytes else ""
            raise _full(self.name, f"{_gib(more_bytes)} more are needed, {_gib(free)} are free{kept}")

    def sync(self) -> None:
        """Flushes what was written and enters it into the manifest. Raises DiskError."""
        with self._syncing:
            with self._changed:
                self._flushing, self._written = self._written, {}
                flushing = {name: self._descriptors[name] for name in self._flushing}
            if not flushing:
                return
            try:
                for descriptor in flushing.values():
                    os.fsync(descriptor)
                with self._changed:
                    for name, spans in self._flushing.items():
                        file = self.manifest.files[name]
                        file.present = list(merged((*file.present, *spans)))
                        file.stamp = file.stamp and stamp_of(self.model_dir, name)
                    self._flushing = {}
                write_manifest(self.model_dir, self.manifest)
            except OSError as exc:
                raise self._refused(exc) from exc

    def note_made(self, names: Iterable[str]) -> None:
        """Notes text files that were made here. Raises OSError."""
        with self._syncing:
            self.manifest.made = sorted({*self.manifest.made, *names})
            write_manifest(self.model_dir, self.manifest)

    def note_verified(self, name: str, spans: Spans, pieces: Digests = ()) -> None:
        """Notes bytes that belong to a file with the right digest. pieces: see FetchedFile. Raises DiskError."""

        def note(file: FetchedFile) -> None:
            file.verified = list(merged((*file.verified, *spans)))
            file.pieces = pieces or file.pieces
            file.stamp = stamp_of(self.model_dir, name)

        self._change_file(name, note)
        file = self.manifest.files[name]
        if file.is_whole and not file.is_unverified and part_of(self.model_dir, name).exists():
            self._change_file(name, lambda file: setattr(file, "is_checked", bool(file.sha256)))
            try:
                _take_name(self.model_dir, name)
            except OSError as exc:
                raise self._refused(exc) from exc

    def drop(self, name: str, spans: Spans) -> None:
        """Forgets bytes that are wrong: they count as missing from now on. Raises DiskError."""
        self.sync()

        with self._syncing:
            _give_name_back(self.model_dir, name)

        def forget(file: FetchedFile) -> None:
            file.present = list(minus(tuple(file.present), spans))
            file.verified = list(minus(tuple(file.verified), spans))
            file.is_checked = False

        self._change_file(name, forget)

    def _change_file(self, name: str, change: Callable[[FetchedFile], None]) -> None:
        with self._syncing:
            try:
                with self._changed:
                    change(self.manifest.files[name])
                write_manifest(self.model_dir, self.manifest)
            except OSError as exc:
                raise self._refused(exc) from exc

    def is_whole(self, name: str) -> bool:
        with self._changed:
            return not self._missing(name, ((0, self.manifest.files[name].size),))

    def hash_ahead(self, name: str, meanwhile: Callable[[], None]) -> None:
        """Hashes a file's bytes up to the first gap, so that `finish` has less to do. meanwhile: as in `finish`."""
        file = self.manifest.files[name]
        with self._changed:
            spans = merged((*file.present, *self._flushing.get(name, ()), *self._written.get(name, ())))
            arrived = spans[0][1] if spans and not spans[0][0] else 0
            if not file.sha256 or file.is_checked or arrived == file.size:
                return
            digest = self._digests.setdefault(name, RunningDigest())
        with contextlib.suppress(OSError):  # `finish` reports the error
            digest.extend(part_of(self.model_dir, name), arrived, meanwhile)

    def finish(self, name: str, meanwhile: Callable[[], None]) -> bool:
        """Verifies a complete file and gives it its final name. Drops the bytes of a corrupt file and returns False.

        A file that is incomplete or already done is left unchanged. meanwhile: called often while the file is read; may
        raise.
        """
        with self._checking:
            self.sync()
            file, part = self.manifest.files[name], part_of(self.model_dir, name)
            if not file.is_whole or not part.exists():
                return True
            try:
                digest = self._digests.pop(name, None) or RunningDigest()
                is_right = (
                    not file.sha256 or file.is_checked or digest.extend(part, file.size, meanwhile) == file.sha256
                )
                with self._syncing:
                    with self._changed:
                        file.is_checked = is_right and bool(file.sha256)
                        file.stamp = stamp_of(self.model_dir, name) if is_right else ()
                        if not is_right:
                            file.present, file.verified = [], []
                    write_manifest(self.model_dir, self.manifest)
                if is_right:
                    _take_name(self.model_dir, name)
            except OSError as exc:
                raise self._refused(exc) from exc
            return is_right

    def _missing(self, name: str, spans: Spans) -> Spans:
        file = self.manifest.files.get(name)
        if file is None:
            raise FetchError(f"{self.name} has no file {name}", is_final=True)
        spans = common(spans, ((0, file.size),))
        return minus(
            spans, merged((*file.present, *self._flushing.get(name, ()), *self._written.get(name, ())))
        )  # fmt: skip

    def _descriptor(self, name: str) -> int:
        with self._changed:
            if name not in self._descriptors:
                _give_name_back(self.model_dir, name)
                self._descriptors[name] = open_own_file(part_of(self.model_dir, name))
            return self._descriptors[name]

    def _keep_synced(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_closing or self._written)
                if self._is_closing:
                    return
            try:
                self.sync()
            except FetchError as exc:
                self._problem = exc
                return
            with self._changed:
                self._changed.wait_for(lambda: self._is_closing, SYNC_INTERVAL_S)

    def _recovered(self) -> Manifest:
        """Reads the manifest, and corrects it by the files that are there."""
        try:
            manifest = read_manifest(self.model_dir)
        except ModelError as exc:
            raise FetchError(str(exc), remedy=_delete(self.name), is_final=True) from exc
        if manifest is None:
            raise FetchError(f"{self.name} was not fetched by exo-mesh: its directory has no manifest", is_final=True)
        try:
            for name, file in manifest.files.items():
                self._recover(name, file)
        except OSError as exc:
            raise self._refused(exc) from exc
        return manifest

    def _recover(self, name: str, file: FetchedFile) -> None:
        if file.is_altered_in(self.model_dir, name):
            file.is_checked, file.verified, file.stamp = False, [], ()
        whole, part = self.model_dir / name, part_of(self.model_dir, name)
        if part.is_symlink():
            part.unlink()  # the author of the model may have put the link there; never write through it
        if whole.exists():
            if whole.stat().st_size != file.size:
                raise FetchError(
                    f"{self.name}: {name} has {whole.stat().st_size} bytes instead of {file.size}",
                    remedy=_delete(self.name),
                    is_final=True,
                )
            part.unlink(missing_ok=True)
            file.present = [(0, file.size)] if file.size else []
        elif not part.exists() or part.stat().st_size != file.size:
            file.present, file.is_checked, file.verified = [], False, []
            make_part(part, file.size)
        elif file.is_whole and (file.is_checked or not file.sha256):
            _take_name(self.model_dir, name)

    def _refused(self, exc: OSError) -> DiskError:
        if exc.errno in _FULL:
            return _full(self.name, exc.strerror or "it is full")
        reason = exc.strerror or type(exc).__name__
        return DiskError(f"the files of {self.name} cannot be written: {reason}")


class Writers:
    """The writers of this process: one per directory, as long as a request uses it."""

    def __init__(self) -> None:
        self.floor_bytes = 0
        self._lock = threading.Lock()
        self._open: dict[Path, tuple[ModelWriter, int]] = {}

    @contextlib.contextmanager
    def opened(self, model_dir: Path) -> Iterator[ModelWriter]:
        key = model_dir.resolve()
        with self._lock:
            writer, users = self._open.get(key) or (ModelWriter(model_dir, self.floor_bytes), 0)
            self._open[key] = writer, users + 1
        try:
            yield writer
        finally:
            with self._lock:
                _, users = self._open[key]
                self._open[key] = writer, users - 1
                if users == 1:
                    del self._open[key]
                    writer.close()


def lock_directory(directory: Path) -> int:
    """Locks a directory against other processes; closing the returned descriptor unlocks it. Raises FetchError."""
    try:
        lock = open_own_file(directory / LOCK_FILE, os.O_CREAT, 0o600)
    except OSError as exc:
        reason = exc.strerror or type(exc).__name__
        raise DiskError(f"the directory of {label(directory)} cannot be written: {reason}") from exc
    end = time.monotonic() + LOCK_LIMIT_S
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return lock
        except OSError as exc:
            if time.monotonic() > end:
                os.close(lock)
                raise FetchError(f"another process is already fetching {label(directory)} into this directory") from exc
            time.sleep(0.05)


def make_part(part: Path, size: int) -> None:
    """Creates a file of this size without content, which takes no disk space until it is written. Raises OSError."""
    with os.fdopen(open_own_file(part, os.O_CREAT | os.O_TRUNC), "wb") as stream:
        stream.truncate(size)


def sync_directory(directory: Path) -> None:
    """Makes the names in a directory durable. Raises OSError."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def new_manifest(name: str, repo: str, revision: str, files: Mapping[str, tuple[int, str]]) -> Manifest:
    """Creates the manifest of a model without any bytes. files: {name: (size, sha256)}."""
    return Manifest(name, repo, revision, {file: FetchedFile(size, sha) for file, (size, sha) in files.items()})


def _take_name(model_dir: Path, name: str) -> None:
    part_of(model_dir, name).replace(model_dir / name)
    sync_directory(model_dir)


def _give_name_back(model_dir: Path, name: str) -> None:
    """Makes a whole file a part again, because some of its bytes are wrong."""
    if not part_of(model_dir, name).exists() and (model_dir / name).exists():
        (model_dir / name).replace(part_of(model_dir, name))
        sync_directory(model_dir)


def _full(name: str, why: str) -> DiskError:
    return DiskError(
        f"there is no room on the disk for {name}: {why}; what was fetched is kept",
        remedy="free disk space, or choose another disk for models, then try again",
        is_final=True,
    )


def _delete(name: str) -> str:
    return f"delete the model with `exo-mesh rm {name}` and fetch it again"


def _gib(num: int) -> str:
    return f"{num / 2**30:.1f} GiB" if num >= 2**30 else f"{num / 2**20:.1f} MiB"
