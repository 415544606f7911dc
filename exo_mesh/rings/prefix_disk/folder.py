"""The folder with the files of one stage: locked by one process, limited in size, age and free space of its volume.

Files are named `<key>-<positions>.kv`; a file `<key>.pin` beside it keeps it from expiring and from giving way. What a
file was last used at is its time of modification.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO

import msgspec

from exo_mesh.domain.tensor import Tensor
from exo_mesh.rings.prefix_disk import file_format
from exo_mesh.rings.prefix_disk.file_format import StoredPrefix, StoredPrefixError

FLOOR_SHARE, FLOOR_BYTES = 0.05, 2**30
"""Nothing is written if less than this would be left: 5 % of the volume, but no more than 1 GiB."""

MOST_FILES = 4096
"""Most files of all stages below a root; the least recently used ones go first."""

DAY_S = 86_400.0

LOCK = "lock"
_NAME = re.compile(r"([0-9a-f]{32})-([0-9]{1,9})\.kv")
_log = logging.getLogger(__name__)


class FileLimits(msgspec.Struct, frozen=True):
    """Limits of all files below a root. most_bytes: of all files together. days: a file that was not used for so long
    is removed."""

    most_bytes: int
    days: float


class StoredFile(msgspec.Struct, frozen=True):
    """A file as its folder shows it, without reading it. stage: the folder, relative to the root. used_at: Unix time of
    its last use."""

    path: Path
    stage: str
    key: str
    tokens: int
    num_bytes: int
    used_at: float
    pinned: bool

    @property
    def pin(self) -> Path:
        return self.path.with_name(f"{self.key}.pin")

    def remove(self) -> None:
        """Remove the file and its pin; a file that is gone already is no error."""
        for path in (self.path, self.pin):
            with contextlib.suppress(OSError):
                path.unlink()


def stored_files(root: Path) -> Iterator[StoredFile]:
    """All files below a root. A folder that cannot be read counts as empty."""
    for folder, _, names in os.walk(root):
        pins = {name for name in names if name.endswith(".pin")}
        for name in names:
            if (match := _NAME.fullmatch(name)) is None:
                continue
            path = Path(folder, name)
            try:
                status = path.stat()
            except OSError:
                continue
            stage, key = str(Path(folder).relative_to(root)), match[1]
            pinned = f"{key}.pin" in pins
            yield StoredFile(path, stage, key, int(match[2]), status.st_size, status.st_mtime, pinned)


def _free_bytes(path: Path) -> tuple[int, int]:
    usage = shutil.disk_usage(path)
    return usage.total, usage.free


class StageFolder(msgspec.Struct):
    """The files of one stage. From any thread.

    root: with the folders of all stages of this machine; name: of this one below it. maker: the stage that the files
    must come from. secret: seals the files; None in an open mesh.
    """

    root: Path
    name: str
    maker: str
    limits: FileLimits
    secret: bytes | None = None
    now: Callable[[], float] = time.time
    free_bytes: Callable[[Path], tuple[int, int]] = _free_bytes
    """Returns the total and the free bytes of a volume, or raises OSError."""
    _files: dict[bytes, tuple[StoredPrefix, Path]] = msgspec.field(default_factory=dict)
    _lock: IO[str] | None = None
    _turn: threading.RLock = msgspec.field(default_factory=threading.RLock)

    @property
    def path(self) -> Path:
        return self.root / self.name

    def open(self) -> bool:
        """Lock the folder, remove what has expired and what this stage cannot use, and learn which files there are.
        False if another process uses it. Raises OSError."""
        with self._turn:
            if self._lock is not None:
                return True
            self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
            lock = (self.path / LOCK).open("w")
            if not _locked(lock):
                lock.close()
                return False
            self._lock = lock
            for scratch in self.path.glob("*.new"):
                scratch.unlink(missing_ok=True)
            self.make_room(0)
            for found in sorted(stored_files(self.path), key=lambda one: one.used_at):
                self._learn(found)
            return True

    def close(self) -> None:
        """Release the folder for other processes."""
        with self._turn:
            if self._lock is not None:
                self._lock.close()
                self._lock = None

    def _learn(self, found: StoredFile) -> None:
        try:
            with found.path.open("rb") as stream:
                about = file_format.read_about(stream, self.secret)
            self._check(about, bytes.fromhex(found.key))
        except StoredPrefixError as exc:
            _log.warning("removed %s: %s", found.path.name, exc)
            found.remove()
        except OSError as exc:
            _log.warning("cannot read %s: %s", found.path.name, exc.strerror or exc)
        else:
            self._files[about.key] = (about, found.path)

    def _check(self, about: StoredPrefix, key: bytes) -> None:
        if about.key != key:
            raise StoredPrefixError("its name and its content differ")
        if about.maker != self.maker:
            raise StoredPrefixError("it is of another model, engine or version")
        is_whole = 0 < about.length <= about.positions and 0 <= about.prompt <= about.length
        if not is_whole or len(about.blocks) % file_format.HASH_BYTES:
            raise StoredPrefixError("its header is wrong")

    def known(self) -> list[StoredPrefix]:
        """The files that this stage can use, the last used ones last."""
        with self._turn:
            return [about for about, _ in self._files.values()]

    @property
    def num_bytes(self) -> int:
        """Bytes of the files of this stage."""
        total = 0
        for _, path in list(self._files.values()):
            with contextlib.suppress(OSError):
                total += path.stat().st_size
        return total

    def read(self, key: bytes) -> tuple[StoredPrefix, dict[str, Tensor]]:
        """Read a file. Raises StoredPrefixError if there is none, or a damaged one; that one is removed."""
        with self._turn:
            found = self._files.get(key)
        if found is None:
            raise StoredPrefixError("there is no such file")
        _, path = found
        try:
            with path.open("rb") as stream:
                about, tensors = file_format.read(stream, self.secret)
            self._check(about, key)
            with contextlib.suppress(OSError):
                os.utime(path, (self.now(), self.now()))
        except (OSError, StoredPrefixError) as exc:
            self.remove(key)
            why = exc.strerror or str(exc) if isinstance(exc, OSError) else str(exc)
            if not isinstance(exc, FileNotFoundError):
                _log.warning("removed %s: %s", path.name, why)
            raise StoredPrefixError(why) from exc
        return about, tensors

    def write(self, about: StoredPrefix, tensors: Mapping[str, Tensor], pause: Callable[[int], None]) -> None:
        """Write a file, whole or not at all. pause: called with the bytes of each written piece. Raises OSError, with
        ENOSPC also if the limits leave no room."""
        size = sum(tensor.num_bytes for tensor in tensors.values())
        if not self.make_room(size):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        path = self.path / f"{about.key.hex()}-{about.length}.kv"
        scratch = path.with_suffix(".new")
        try:
            with open(os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as stream:
                for num_bytes in file_format.write(stream, about, tensors, self.secret):
                    pause(num_bytes)
                stream.flush()
                os.fsync(stream.fileno())
            scratch.replace(path)
        except BaseException:
            with contextlib.suppress(OSError):
                scratch.unlink(missing_ok=True)
            raise
        with self._turn:
            self._files[about.key] = (about, path)

    def remove(self, key: bytes) -> None:
        """Remove a file, and its pin; an unknown one changes nothing."""
        with self._turn:
            found = self._files.pop(key, None)
        if found is not None:
            for path in (found[1], found[1].with_name(f"{key.hex()}.pin")):
                with contextlib.suppress(OSError):
                    path.unlink()

    def is_pinned(self, key: bytes) -> bool:
        """Whether a file must stay."""
        return (self.path / f"{key.hex()}.pin").exists()

    def make_room(self, num_bytes: int) -> bool:
        """Remove expired files, and then the least recently used ones of all stages, until so many more bytes keep to
        all limits. False if that is not possible."""
        files = sorted(stored_files(self.root), key=lambda one: one.used_at)
        oldest_s = self.now() - self.limits.days * DAY_S
        for one in [one for one in files if one.used_at < oldest_s and not one.pinned]:
            self._gives_way(one)
            files.remove(one)
        removable = [one for one in files if not one.pinned]
        total, free = self._volume()
        least = min(FLOOR_BYTES, int(FLOOR_SHARE * total)) + num_bytes if total and num_bytes else 0
        if num_bytes > self.limits.most_bytes or free + sum(one.num_bytes for one in removable) < least:
            return False
        held, left = sum(one.num_bytes for one in files), len(files)
        while held + num_bytes > self.limits.most_bytes or left >= MOST_FILES or free < least:
            if not removable:
                return False
            one = removable.pop(0)
            self._gives_way(one)
            held, left, free = held - one.num_bytes, left - 1, free + one.num_bytes
        return True

    def _volume(self) -> tuple[int, int]:
        try:
            return self.free_bytes(self.path)
        except OSError:
            return 0, 0  # the write itself may fail

    def _gives_way(self, one: StoredFile) -> None:
        one.remove()
        if one.path.parent == self.path:
            with self._turn:
                self._files.pop(bytes.fromhex(one.key), None)


def _locked(stream: IO[str]) -> bool:
    """Lock an open file until it is closed or the process ends; False if another process has it."""
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
