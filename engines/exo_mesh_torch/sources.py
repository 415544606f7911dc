"""Reads tensors from safetensors and GGUF files, a few lines at a time, into the place and dtype where they are needed.

Files are read and not mapped: pages of a mapping count as memory until they are dropped, and a file that shrinks under
a mapping kills the process.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from io import FileIO
from typing import Protocol, runtime_checkable

import msgspec
import torch

from exo_mesh.errors import ModelError
from exo_mesh.weights.lines import LineReader
from exo_mesh.weights.packed.lines import PackedLines
from exo_mesh.weights.safetensors import DTYPE_BITS, TensorInfo, on_disk
from exo_mesh_torch.quantised import TorchPacking, dequantise, unpack

CHUNK_BYTES = 4 * 2**20
"""Bytes read at once of a tensor that changes its dtype or device on the way; loading needs this besides the
weights."""

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "U32": torch.uint8,
}
"""U32 holds quantised weights; only their bytes count."""


class TensorSource(Protocol):
    """A tensor on disk. `lines` are along its last axis."""

    @property
    def name(self) -> str: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def line_bytes(self) -> int:
        """Bytes of a line once read; they decide how many lines are read at once."""

    def lines(self, first: int, count: int) -> torch.Tensor:
        """`[count, shape[-1]]` on the CPU. Raises ModelError naming file and tensor."""


@runtime_checkable
class Coded(TensorSource, Protocol):
    """A quantised tensor whose values are `scale * code + bias`, with a scale and a bias per group of columns."""

    @property
    def bits(self) -> int:
        """Of a code; 0 if the values of this tensor are not of that kind."""

    @property
    def group_size(self) -> int: ...

    def codes(self, first: int, count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(codes uint8 `[count, shape[-1]]`, scales and biases `[count, groups]`). Raises ModelError naming file and
        tensor."""

    @property
    def packed(self) -> PackedLines | None:
        """The reader of a tensor of GPTQ, AWQ, compressed-tensors or FP8, whose codes may be in another order."""


class Plain(msgspec.Struct, frozen=True):
    """A tensor as it is in the file."""

    name: str
    info: TensorInfo

    @property
    def shape(self) -> tuple[int, ...]:
        return self.info.shape

    @property
    def line_bytes(self) -> int:
        return _width(self.info) * DTYPE_BITS[self.info.dtype] // 8

    def lines(self, first: int, count: int) -> torch.Tensor:
        return _read(self.name, self.info, first, count)


class Packed(msgspec.Struct, frozen=True):
    """A tensor in one of MLX's quantised formats."""

    name: str
    plain_shape: tuple[int, ...]
    words: TensorInfo
    scales: TensorInfo
    biases: TensorInfo | None
    packing: TorchPacking

    @property
    def shape(self) -> tuple[int, ...]:
        return self.plain_shape

    @property
    def line_bytes(self) -> int:
        return self.plain_shape[-1] * 8  # for the codes on their way to floats

    def lines(self, first: int, count: int) -> torch.Tensor:
        words = _read(self.name, self.words, first, count)
        scales = _read(self.name, self.scales, first, count)
        biases = _read(self.name, self.biases, first, count) if self.biases is not None else None
        return dequantise(words, scales, biases, self.packing)

    @property
    def bits(self) -> int:
        return self.packing.bits if self.packing.mode == "affine" else 0

    @property
    def group_size(self) -> int:
        return self.packing.group_size

    @property
    def packed(self) -> PackedLines | None:
        return None

    def codes(self, first: int, count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        assert self.biases is not None, "affine weights have biases"
        words = _read(self.name, self.words, first, count)
        scales = _read(self.name, self.scales, first, count)
        return unpack(words, self.packing.bits), scales, _read(self.name, self.biases, first, count)


class Converted(msgspec.Struct, frozen=True):
    """A tensor that is quantised and not in MLX's format, or whose values were changed when a GGUF file was made."""

    name: str
    reader: LineReader

    @property
    def shape(self) -> tuple[int, ...]:
        return self.reader.info.shape

    @property
    def line_bytes(self) -> int:
        return self.reader.line_bytes

    def lines(self, first: int, count: int) -> torch.Tensor:
        return torch.from_numpy(self.reader.read(first, count))

    @property
    def bits(self) -> int:
        return self.reader.bits

    @property
    def group_size(self) -> int:
        return self.reader.group_size

    @property
    def packed(self) -> PackedLines | None:
        return self.reader if isinstance(self.reader, PackedLines) else None

    def codes(self, first: int, count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        codes, scales, biases = self.reader.read_codes(first, count)
        return torch.from_numpy(codes), torch.from_numpy(scales), torch.from_numpy(biases)


class Part(msgspec.Struct, frozen=True):
    """One of the tensors that are stacked along the first axis of another: an expert's."""

    name: str
    whole: Plain | Packed | Converted
    index: int

    @property
    def shape(self) -> tuple[int, ...]:
        return self.whole.shape[1:]

    @property
    def line_bytes(self) -> int:
        return self.whole.line_bytes

    def lines(self, first: int, count: int) -> torch.Tensor:
        return self.whole.lines(self.index * math.prod(self.shape[:-1]) + first, count)


def gather(source: TensorSource, numbers: Sequence[int]) -> torch.Tensor:
    """The lines with these numbers, `[len(numbers), shape[-1]]` on the CPU. Raises ModelError."""
    if isinstance(source, Plain):
        return _read_scattered(source.name, source.info, numbers)
    return torch.cat([source.lines(number, 1) for number in numbers])


def materialise(source: TensorSource, dtype: torch.dtype | None, device: torch.device) -> torch.Tensor:
    """The whole tensor. dtype: for floating-point tensors; None keeps theirs. Raises ModelError."""
    total = math.prod(source.shape[:-1]) if source.shape else 1
    width = source.shape[-1] if source.shape else 1
    if not math.prod(source.shape):
        return torch.zeros(source.shape, dtype=dtype or torch.float32, device=device)
    if isinstance(source, Plain) and device.type == "cpu" and dtype in (None, DTYPES.get(source.info.dtype)):
        return source.lines(0, total).reshape(source.shape)
    step = max(1, CHUNK_BYTES // max(1, source.line_bytes))
    result: torch.Tensor | None = None
    for first in range(0, total, step):
        lines = source.lines(first, min(step, total - first))
        if result is None:
            wanted = dtype if dtype is not None and lines.is_floating_point() else lines.dtype
            result = torch.empty((total, width), dtype=wanted, device=device)
        result[first : first + lines.shape[0]].copy_(lines)
    assert result is not None, "there is at least one line"
    return result.reshape(source.shape)


def _width(info: TensorInfo) -> int:
    return info.shape[-1] if info.shape else 1


def _read(name: str, info: TensorInfo, first: int, count: int) -> torch.Tensor:
    """Lines of a tensor in its own dtype; of U32 the bytes."""
    line_bytes = _line_bytes(name, info)
    buffer = torch.empty(count * line_bytes, dtype=torch.uint8)
    with _opened(name, info) as stream:
        stream.seek(info.start + first * line_bytes)
        _fill(name, info, stream, memoryview(buffer.numpy()))
    return buffer.view(DTYPES[info.dtype]).reshape(count, -1)


def _read_scattered(name: str, info: TensorInfo, numbers: Sequence[int]) -> torch.Tensor:
    """The same of lines that lie anywhere, by one open file."""
    line_bytes = _line_bytes(name, info)
    buffer = torch.empty(len(numbers) * line_bytes, dtype=torch.uint8)
    view = memoryview(buffer.numpy())
    with _opened(name, info) as stream:
        for index, number in enumerate(numbers):
            stream.seek(info.start + number * line_bytes)
            _fill(name, info, stream, view[index * line_bytes : (index + 1) * line_bytes])
    return buffer.view(DTYPES[info.dtype]).reshape(len(numbers), -1)


def _line_bytes(name: str, info: TensorInfo) -> int:
    if info.dtype not in DTYPES:
        raise ModelError(f"{info.file}: {name} has dtype {info.dtype}, which torch cannot load")
    return _width(info) * DTYPE_BITS[info.dtype] // 8


@contextmanager
def _opened(name: str, info: TensorInfo) -> Iterator[FileIO]:
    """The file of a tensor. Raises ModelError if it cannot be opened, or reading from it fails."""
    try:
        with on_disk(info.file).open("rb", buffering=0) as stream:
            yield stream
    except OSError as exc:
        raise ModelError(f"{info.file}: {name} cannot be read: {exc.strerror or exc}") from exc


def _fill(name: str, info: TensorInfo, stream: FileIO, view: memoryview) -> None:
    """Fills all of `view`. Raises ModelError if the file ends before."""
    done = 0
    while done < len(view) and (got := stream.readinto(view[done:])):
        done += got
    if done != len(view):
        raise ModelError(f"{info.file}: {name} cannot be read: the file ends {len(view) - done} bytes early")
