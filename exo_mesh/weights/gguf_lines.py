"""Reads lines of a tensor of a GGUF file as float32, as they are in the checkpoint that the file was made from."""

from __future__ import annotations

import msgspec
import numpy as np

from exo_mesh.errors import ModelError
from exo_mesh.weights.gguf import BLOCK_SIZES
from exo_mesh.weights.gguf_blocks import READABLE, dequantise
from exo_mesh.weights.gguf_codes import CODED, GROUP_SIZE, Parts
from exo_mesh.weights.gguf_table import GgufTensor
from exo_mesh.weights.model_files import named
from exo_mesh.weights.safetensors import TensorInfo, on_disk


def needs_conversion(info: TensorInfo) -> bool:
    """Whether the values of a tensor in a GGUF file are not simply its floats."""
    changed = isinstance(info, GgufTensor) and bool(info.heads or info.added)
    return changed or (info.dtype in BLOCK_SIZES and BLOCK_SIZES[info.dtype][0] > 1)


class GgufLines(msgspec.Struct, frozen=True):
    """A tensor, read line by line. A line is along the last axis; a vector has one."""

    name: str
    info: TensorInfo

    def check(self) -> None:
        """Raises ModelError naming file and tensor if its type cannot be read."""
        self._block()

    @property
    def width(self) -> int:
        return self.info.shape[-1] if self.info.shape else 1

    @property
    def line_bytes(self) -> int:
        """Bytes that reading a line takes at its peak: its floats, its integers, and its blocks."""
        return self.width * 8

    def read(self, first: int, count: int) -> np.ndarray:
        """float32 `[count, width]`. Raises ModelError naming file and tensor."""
        heads = self.info.heads if isinstance(self.info, GgufTensor) else 0
        lines = self._as_stored(first, count) if not heads else self._in_order(heads, first, count)
        if isinstance(self.info, GgufTensor) and self.info.added:
            lines -= np.float32(self.info.added)
        return lines

    def _in_order(self, heads: int, first: int, count: int) -> np.ndarray:
        """Lines in the order of the checkpoint: first the lines of all first halves of a head, then the second
        halves'."""
        if len(self.info.shape) == 1:
            values = self._as_stored(0, 1).reshape(heads, -1, 2)
            return np.ascontiguousarray(values.swapaxes(1, 2)).reshape(1, -1)[first : first + count]
        begin, number, places = self._places(heads, first, count)
        ordered: np.ndarray = self._as_stored(begin, number)[places]
        return ordered

    def _places(self, heads: int, first: int, count: int) -> tuple[int, int, np.ndarray]:
        """(first stored line, number of stored lines, index among these of each line): whole heads are read."""
        size = self.info.shape[0] // heads
        begin, end = first // size, -(-(first + count) // size)
        head, line = np.divmod(np.arange(first, first + count), size)
        half, pair = np.divmod(line, size // 2)
        return begin * size, (end - begin) * size, head * size + 2 * pair + half - begin * size

    @property
    def bits(self) -> int:
        """Of a code, if `read_codes` can take the tensor apart; else 0."""
        coded = CODED.get(self.info.dtype)
        changed = isinstance(self.info, GgufTensor) and bool(self.info.added)
        return coded.bits if coded is not None and len(self.info.shape) > 1 and not changed else 0

    @property
    def group_size(self) -> int:
        """Columns of a group in what `read_codes` returns."""
        return GROUP_SIZE

    def read_codes(self, first: int, count: int) -> Parts:
        """See Parts, by lines in place of blocks. Call it only if `bits` is not 0. Raises ModelError naming file and
        tensor."""
        heads = self.info.heads if isinstance(self.info, GgufTensor) else 0
        begin, number, places = self._places(heads, first, count) if heads else (first, count, None)
        codes, scales, biases = CODED[self.info.dtype].take_apart(self._raw(begin, number))
        parts = codes.reshape(number, -1), scales.reshape(number, -1), biases.reshape(number, -1)
        return parts if places is None else (parts[0][places], parts[1][places], parts[2][places])

    def _raw(self, first: int, count: int) -> np.ndarray:
        """uint8 `[blocks, bytes of a block]` of lines as they are stored."""
        elements, block_bytes = self._block()
        line_bytes = self.width // elements * block_bytes
        raw = np.empty((count * self.width // elements, block_bytes), np.uint8)
        self._fill(raw, self.info.start + first * line_bytes)
        return raw

    def _as_stored(self, first: int, count: int) -> np.ndarray:
        elements, _ = self._block()
        raw = self._raw(first, count)
        lines = np.empty((count, self.width), np.float32)
        dequantise(self.info.dtype, raw, lines.reshape(-1, elements))
        return lines

    def _block(self) -> tuple[int, int]:
        """(elements of a block, its bytes)."""
        if self.info.dtype not in READABLE:
            known = ", ".join(READABLE)
            raise ModelError(f"{named(self.info.file)}: {self.name} is {self.info.dtype}; types that are read: {known}")
        return BLOCK_SIZES[self.info.dtype]

    def _fill(self, raw: np.ndarray, start: int) -> None:
        """Read exactly as many bytes as `raw` has."""
        view = raw.reshape(-1).data
        try:
            with on_disk(self.info.file).open("rb", buffering=0) as stream:
                stream.seek(start)
                while view:
                    got = stream.readinto(view)
                    if not got:
                        early = f"the file ends {len(view)} bytes too early"
                        raise ModelError(f"{named(self.info.file)}: {self.name} cannot be read: {early}")
                    view = view[got:]
        except OSError as exc:
            reason = exc.strerror or type(exc).__name__
            raise ModelError(f"{named(self.info.file)}: {self.name} cannot be read: {reason}") from exc
