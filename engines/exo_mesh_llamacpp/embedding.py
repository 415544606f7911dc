"""The embedding of the first stage. It is looked up here and not in llama.cpp, so every stage takes hidden states."""

from __future__ import annotations

from collections.abc import Sequence
from typing import BinaryIO, cast

import numpy as np

from exo_mesh_llamacpp.library import Library
from exo_mesh_llamacpp.plan import Planned
from exo_mesh_llamacpp.types import BF16, F16, F32
from exo_mesh_llamacpp.wire import widened

_PLAIN = {F32.name: ("<f4", "float32"), F16.name: ("<f2", "float16"), BF16.name: ("<u2", "bfloat16")}


class HeldEmbedding:
    """An embedding in memory, in the type of its tensor; rows are made float32 when they are looked up."""

    def __init__(self, tensor: Planned, library: Library, scale: float = 1.0) -> None:
        """Reads the whole tensor. Raises ModelError."""
        self._kind, (self._width, self._rows) = tensor.kind, tensor.shape
        self._library = library
        self._scale = np.float32(scale)
        self.num_bytes = tensor.num_bytes
        sink = MemoryFile(tensor.num_bytes)
        tensor.write(cast(BinaryIO, sink))
        self._raw = sink.held.reshape(self._rows, -1)

    def rows(self, token_ids: Sequence[int]) -> np.ndarray:
        """See Embedding."""
        picked = self._raw[np.asarray(token_ids, np.int64)]
        if self._kind.name in _PLAIN:
            dtype, label = _PLAIN[self._kind.name]
            values = widened(picked.view(dtype), label)
        else:
            values = np.empty((len(picked), self._width), np.float32)
            self._library.to_float(self._kind.number, picked.ctypes.data, values.ctypes.data, values.size)
        return values if self._scale == 1 else values * self._scale


class MemoryFile:
    """A file in memory of known size, as far as `Planned.write` needs one. Bytes that are skipped are zeros."""

    def __init__(self, num_bytes: int) -> None:
        self.held = np.zeros(num_bytes, np.uint8)
        self._end = 0

    def write(self, data: memoryview | bytes) -> int:
        size = memoryview(data).nbytes
        self.held[self._end : self._end + size] = np.frombuffer(data, np.uint8)
        self._end += size
        return size

    def seek(self, offset: int, _whence: int) -> int:
        """Skip bytes; only that is needed."""
        self._end += offset
        return self._end
