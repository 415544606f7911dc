"""A C stream whose bytes are made when the library reads them, so that a stage is never in memory twice.

Needs `fopencookie`, which glibc has; elsewhere layers are loaded from a temporary file.
"""

from __future__ import annotations

import bisect
import ctypes
from collections.abc import Callable, Sequence
from ctypes import CFUNCTYPE, POINTER, c_char_p, c_int, c_int64, c_size_t, c_ssize_t, c_void_p
from typing import Any, cast

import numpy as np

from exo_mesh_llamacpp.container import Placed
from exo_mesh_llamacpp.embedding import MemoryFile
from exo_mesh_llamacpp.plan import Planned

BUFFER_BYTES = 2**18
"""Bytes that the C library asks for at once."""

_SEEK_SET, _SEEK_CUR = 0, 1
_FULLY_BUFFERED = 0

_Read = CFUNCTYPE(c_ssize_t, c_void_p, c_void_p, c_size_t)
_Seek = CFUNCTYPE(c_int, c_void_p, POINTER(c_int64), c_int)
_Close = CFUNCTYPE(c_int, c_void_p)


class _Functions(ctypes.Structure):
    """cookie_io_functions_t."""

    _fields_ = [("read", _Read), ("write", c_void_p), ("seek", _Seek), ("close", _Close)]


def can_stream() -> bool:
    """Whether this C library makes streams from functions."""
    try:
        return hasattr(ctypes.CDLL(None), "fopencookie")
    except (OSError, TypeError):
        return False


class LayerStream:
    """A stream over a file that does not exist: its first bytes, then tensors at their places.

    At most one tensor at a time is in memory, and of most only a part. `pointer` is a FILE*. `error`: what went wrong
    when bytes were made; the reader only sees that it cannot read.
    """

    def __init__(
        self,
        head: bytes,
        places: Sequence[tuple[Placed, Planned]],
        num_bytes: int,
        made: Callable[[int], None],
    ) -> None:
        """made: called with the bytes of each tensor when it is made for the first time."""
        self._head = head
        self._places = places
        self._starts = [place.start for place, _ in places]
        self._size = num_bytes
        self._made = made
        self._seen: set[int] = set()
        self._current: tuple[int, np.ndarray] | None = None
        self._part: tuple[int, np.ndarray] = (0, np.empty(0, np.uint8))
        """A position, and bytes from there on, of a tensor that is made in parts."""
        self._at = 0
        self._is_closed = False
        self.error: Exception | None = None
        self._functions = _Functions(_Read(self._read), None, _Seek(self._seek), _Close(self._close))
        self._libc: Any = ctypes.CDLL(None)
        self._libc.fopencookie.restype = c_void_p
        self._libc.fopencookie.argtypes = [c_void_p, c_char_p, _Functions]
        self._libc.setvbuf.argtypes = [c_void_p, c_void_p, c_int, c_size_t]
        self._libc.fclose.argtypes = [c_void_p]
        self.pointer: int = self._libc.fopencookie(None, b"rb", self._functions) or 0
        if not self.pointer:
            raise OSError("the C library makes no stream")
        self._libc.setvbuf(self.pointer, None, _FULLY_BUFFERED, BUFFER_BYTES)

    def close(self) -> None:
        """Close the stream, unless its reader did, and give memory that is free now back to the system: both sides of
        the stream had room for the largest tensor."""
        if not self._is_closed:
            self._libc.fclose(self.pointer)
        self._current, self._part = None, (0, np.empty(0, np.uint8))
        if hasattr(self._libc, "malloc_trim"):
            self._libc.malloc_trim(0)

    def _read(self, _cookie: int, target: int, wanted: int) -> int:
        """Called by the C library. Reads end with each part, so that no tensor is begun early."""
        try:
            part = self._bytes_at(self._at)[:wanted]
        except Exception as exc:  # noqa: BLE001 - an exception cannot pass through C; the caller raises it
            self.error = exc
            return -1
        ctypes.memmove(target, part.ctypes.data, len(part))
        self._at += len(part)
        return len(part)

    def _bytes_at(self, position: int) -> np.ndarray:
        """The bytes from a position to the end of the part that it is in."""
        if position < len(self._head):
            return np.frombuffer(self._head, np.uint8)[position:]
        index = bisect.bisect_right(self._starts, position) - 1
        stop = self._starts[index + 1] if index + 1 < len(self._starts) else self._size
        if index < 0 or position >= self._starts[index] + self._places[index][0].num_bytes:
            return np.zeros(max(0, stop - position), np.uint8)  # between two tensors
        place, tensor = self._places[index]
        if tensor.part is None:
            return self._tensor(index)[position - place.start :]
        begin, held = self._part
        if not begin <= position < begin + len(held):
            self._current, self._part = None, (0, held[:0])
            held = tensor.part(position - place.start)
            begin, _ = self._part = position, held
            if position + len(held) == place.start + place.num_bytes:
                self._report(index)
        return held[position - begin :]

    def _report(self, index: int) -> None:
        """Report a tensor whose bytes are all made, once."""
        if index not in self._seen:
            self._seen.add(index)
            self._made(self._places[index][0].num_bytes)

    def _tensor(self, index: int) -> np.ndarray:
        if self._current is None or self._current[0] != index:
            self._current, self._part = None, (0, np.empty(0, np.uint8))  # freed before the next one is made
            place, tensor = self._places[index]
            sink = MemoryFile(place.num_bytes)
            tensor.write(cast(Any, sink))
            self._current = (index, sink.held)
            self._report(index)
        return self._current[1]

    def _seek(self, _cookie: int, offset: Any, whence: int) -> int:
        """Called by the C library."""
        base = 0 if whence == _SEEK_SET else self._at if whence == _SEEK_CUR else self._size
        target = base + offset[0]
        if not 0 <= target <= self._size:
            return -1
        self._at = offset[0] = target
        return 0

    def _close(self, _cookie: int) -> int:
        self._is_closed = True
        return 0
