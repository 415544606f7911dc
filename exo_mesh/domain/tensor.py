"""A tensor as it travels: engine-neutral raw little-endian bytes with dtype and shape."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:  # a node does not import NumPy: it would take a sixth of its start
    import numpy as np

ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "int32": 4, "uint32": 4, "int64": 8, "uint8": 1, "bool": 1}
"""Bytes per element of every dtype that may cross a hop."""


class Tensor(msgspec.Struct, frozen=True):
    """Row-major little-endian `data` of `shape`; bfloat16 is stored as its two raw bytes per element.

    `data` may be any C-contiguous buffer and is never copied here. Raises ValueError if sizes disagree.
    """

    dtype: str
    shape: tuple[int, ...]
    data: bytes | bytearray | memoryview

    def __post_init__(self) -> None:
        if self.dtype not in ITEM_BYTES:
            raise ValueError(f"dtype {self.dtype} cannot cross a hop; known: {', '.join(ITEM_BYTES)}")
        if self.shape and min(self.shape) < 0:
            raise ValueError(f"negative size in shape {self.shape}")
        have = self.data.nbytes if isinstance(self.data, memoryview) else len(self.data)
        if have != self.num_bytes:
            raise ValueError(f"{self.dtype}{list(self.shape)} needs {self.num_bytes} bytes, got {have}")

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]

    def numpy(self) -> np.ndarray:
        """Returns a read-only view without a copy; bfloat16 is returned as uint16 bit patterns."""
        import numpy as np

        dtype = "uint16" if self.dtype == "bfloat16" else self.dtype
        array: np.ndarray = np.frombuffer(self.data, dtype=dtype).reshape(self.shape)
        array.flags.writeable = False
        return array

    def rows(self, start: int, stop: int) -> Tensor:
        """Returns `[start:stop]` of the first axis, without a copy."""
        item = self.num_bytes // self.shape[0] if self.shape[0] else 0
        return Tensor(self.dtype, (stop - start, *self.shape[1:]), memoryview(self.data)[start * item : stop * item])

    @staticmethod
    def concatenate(parts: Sequence[Tensor]) -> Tensor:
        """Concatenates along the first axis, copying. The parts have one dtype, and differ only in the first axis."""
        first = parts[0]
        shape = (sum(part.shape[0] for part in parts), *first.shape[1:])
        return Tensor(first.dtype, shape, b"".join(part.data for part in parts))

    @staticmethod
    def from_numpy(array: np.ndarray) -> Tensor:
        """Wraps an array, copied only if it is not C-contiguous. Its dtype must be one of ITEM_BYTES."""
        import numpy as np

        contiguous = np.ascontiguousarray(array)
        # a 0-d or empty array cannot be cast to a byte memoryview, so go through reshape(-1)
        data = contiguous.reshape(-1).view(np.uint8).data if contiguous.size else b""
        return Tensor(str(array.dtype), array.shape, data)


class TensorSpec(msgspec.Struct, frozen=True):
    """A named tensor that crosses a hop: `[tokens, *item_shape]` in `dtype`, tokens in row order."""

    name: str
    dtype: str
    item_shape: tuple[int, ...]
