"""Fits the saved state of a sequence to contexts with other numbers of slots. Pure.

The library's state of one sequence begins with a magic number, the slot and the number of streams (one per slot, unless
the context is unified), and has for each stream a count of cells, followed by the cells unless the count is 0. Only the
stream of the sequence has cells. A state of one stream, of slot 0, is what this engine keeps.
"""

from __future__ import annotations

import numpy as np

_HEADER_BYTES = 8
_WORD = 4


def of_one_stream(state: np.ndarray) -> np.ndarray:
    """uint8 `[n]`, as the library saved it -> the same cells in a state of one stream, of slot 0."""
    head = _HEADER_BYTES + _WORD
    num_streams = int(_words(state[_HEADER_BYTES:head])[0])
    counts = _words(state[head : head + _WORD * num_streams])
    used = np.flatnonzero(counts)
    # the words after the first count that is not 0 belong to its cells
    before = int(used[0]) if len(used) else num_streams - 1
    after = num_streams - 1 - before
    cells = state[head + _WORD * before : len(state) - _WORD * after]
    return np.concatenate([state[:_WORD], _bytes([0, 1]), cells])


def of_streams(state: np.ndarray, slot: int, num_streams: int) -> np.ndarray:
    """A state of one stream -> a state for a context of `num_streams`."""
    cells = state[_HEADER_BYTES + _WORD :]
    return np.concatenate([state[:_WORD], _bytes([slot, num_streams]), cells, _bytes([0] * (num_streams - 1))])


def _words(raw: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(raw).view("<u4")


def _bytes(words: list[int]) -> np.ndarray:
    return np.array(words, "<u4").view(np.uint8)
