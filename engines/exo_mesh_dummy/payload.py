"""The activations of the dummy: not computed, but checkable, so that a frame which took a wrong way is noticed.

The first and the last token of a row carry a mark (position, token id, layers done, hash) at their beginning, and the
hash again at their end. Plain integers: for the one token of a decode row they are several times faster than arrays.
"""

from __future__ import annotations

import struct
import weakref
from collections.abc import Sequence

import numpy as np

from exo_mesh.errors import EngineError

MIN_WORDS = 4
_MARK = struct.Struct("<4I")
_END = struct.Struct("<I")
_WORD = 0xFFFFFFFF
_REUSED_BYTES = 1024 * 1024


class Payloads:
    """Zeroed memory for payloads. Long ones are used again when nothing refers to them any more, because zeroing the
    16 MiB of a chunk takes a sixth of the time that sending it does."""

    def __init__(self) -> None:
        self._layout: tuple[int, ...] = ()
        self._free: list[np.ndarray] = []

    def get(self, token_bytes: int, rows: Sequence[int]) -> memoryview:
        """Memory for rows of so many tokens, all zero but for marks of rows of the same lengths."""
        size = token_bytes * sum(rows)
        if size < _REUSED_BYTES:
            return np.zeros(size, np.uint8).data
        if self._layout != (token_bytes, *rows):
            self._layout, self._free = (token_bytes, *rows), []
        free = self._free
        whole = free.pop() if free else np.zeros(size, np.uint8)
        lent = whole[:]  # lives as long as any view of it
        weakref.finalize(lent, free.append, whole).atexit = False
        return lent.data


def mix(*parts: int) -> int:
    """A 32-bit hash (FNV-1a over words, then a final mix)."""
    value = 2166136261
    for part in parts:
        value = ((value ^ part) * 16777619) & _WORD
    value ^= value >> 15
    value = (value * 0x85EBCA6B) & _WORD
    return value ^ (value >> 13)


def write_marks(payload: memoryview, token_bytes: int, pos0: int, token_ids: Sequence[int], layers_done: int) -> None:
    """Mark the first and the last token of a row from position pos0 on; each token has token_bytes of `payload`."""
    for index in _ends(token_ids):
        mark = _mark(pos0 + index, token_ids[index], layers_done)
        _MARK.pack_into(payload, index * token_bytes, *mark)
        _END.pack_into(payload, (index + 1) * token_bytes - _END.size, mark[-1])


def check_marks(payload: memoryview, token_bytes: int, pos0: int, token_ids: Sequence[int], layers_done: int) -> None:
    """Raises EngineError unless `payload` has the marks that `write_marks` makes of the same arguments."""
    for index in _ends(token_ids):
        wanted = _mark(pos0 + index, token_ids[index], layers_done)
        found = _MARK.unpack_from(payload, index * token_bytes)
        (end,) = _END.unpack_from(payload, (index + 1) * token_bytes - _END.size)
        if found != wanted or end != wanted[-1]:
            raise EngineError(
                f"wrong activations: got [position, token, layers done, hash] {list(found)} and {end} at the end, "
                f"expected {list(wanted)}"
            )


def kv_marks(length: int, start: int, stop: int) -> np.ndarray:
    """uint32 `[length, 4]`: (position, first layer, layer after the last, a hash of the three) of each position."""
    marks = [(position, start, stop, mix(position, start, stop)) for position in range(length)]
    return np.array(marks, np.uint32).reshape(length, 4)


def _ends(token_ids: Sequence[int]) -> tuple[int, ...]:
    return (0,) if len(token_ids) == 1 else (0, len(token_ids) - 1)


def _mark(position: int, token: int, layers_done: int) -> tuple[int, int, int, int]:
    token &= _WORD  # a bad id may be negative; it is reported as a fault elsewhere
    return position, token, layers_done, mix(position, token, layers_done)
