"""Buffers that are reused in each layer and frame, so that no step allocates (and the kernel zeroes) new pages."""

from __future__ import annotations

import math

import numpy as np

MAX_VIEWS = 256
"""Shapes that are remembered; decoding uses the same ones in each layer and step, except for the scores."""


class Scratch:
    """Named float32 buffers. Each grows to the largest size requested; callers limit that by working in pieces."""

    def __init__(self) -> None:
        self._buffers: dict[str, np.ndarray] = {}
        self._views: dict[tuple[str, tuple[int, ...]], np.ndarray] = {}

    def take(self, name: str, *shape: int) -> np.ndarray:
        """C-contiguous float32 of that shape with any finite values in it; valid until `name` is taken again."""
        view = self._views.get((name, shape))
        if view is not None:
            return view
        size = math.prod(shape)
        buffer = self._buffers.get(name)
        if buffer is None or buffer.size < size:
            # zeros, because rows that only fill up a tile are computed too and must not be NaN
            buffer = self._buffers[name] = np.zeros(size, np.float32)
            self._views.clear()
        if len(self._views) >= MAX_VIEWS:
            self._views.clear()
        view = self._views[name, shape] = buffer[:size].reshape(shape)
        return view

    @property
    def num_bytes(self) -> int:
        return sum(buffer.nbytes for buffer in list(self._buffers.values()))
