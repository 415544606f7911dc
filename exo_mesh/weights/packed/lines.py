"""Reads lines of a quantised weight: as float32, or as codes with their scales."""

from __future__ import annotations

import math

import msgspec
import numpy as np

from exo_mesh.errors import ModelError
from exo_mesh.weights.model_files import named
from exo_mesh.weights.packed.layouts import FLOAT8_E4M3, transposed, unpack_awq, unpack_rows
from exo_mesh.weights.packed.tensors import PackedTensor, shared_columns
from exo_mesh.weights.safetensors import TensorInfo, on_disk

WINDOW_BYTES = 8 * 2**20
"""Bytes of codes that are kept while lines of GPTQ and AWQ are read: in their files a line is a column."""

LINES_OF_WINDOW = 64
"""Windows are a multiple of this, so that they begin with a word."""

Parts = tuple[np.ndarray, np.ndarray, np.ndarray]

_RAW = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16, "I8": np.uint8, "F8_E4M3": np.uint8,
        "I32": np.uint32, "U32": np.uint32, "I64": np.int64}  # fmt: skip


class _Window(msgspec.Struct, frozen=True):
    """Codes uint8 `[lines, columns]`, zero points and scales float32 `[lines, groups]` of lines from `first` on."""

    first: int
    codes: np.ndarray
    zeros: np.ndarray
    scales: np.ndarray


class PackedLines:
    """A quantised weight, read line by line; a line is a row of the plain weight."""

    def __init__(self, name: str, info: PackedTensor) -> None:
        self.name, self.info = name, info
        self._window: _Window | None = None
        self._index: np.ndarray | None = None

    @property
    def width(self) -> int:
        return self.info.shape[1]

    @property
    def line_bytes(self) -> int:
        """Bytes that reading a line takes at its peak: its codes, and float32 values twice."""
        return self.width * 9

    @property
    def bits(self) -> int:
        """Of a code; 0 if `read_codes` cannot be called: for 8-bit floats, and if the last group is shorter."""
        return 0 if self._ends_short() else self.info.bits

    @property
    def has_row_scales(self) -> bool:
        """Whether all columns of a line share a scale and a zero point."""
        return self.info.layout != "float8" and self.info.group_size == self.width

    @property
    def may_reorder(self) -> bool:
        """Whether `column_order` is other than None, by config.json; the file's data say it for certain."""
        return self.info.reorders

    @property
    def is_float8(self) -> bool:
        return self.info.layout == "float8"

    @property
    def group_size(self) -> int:
        """Columns of a group in what `read_codes` returns."""
        return shared_columns(self.info)

    def read(self, first: int, count: int) -> np.ndarray:
        """float32 `[count, width]`. Raises ModelError naming file and tensor."""
        if self.info.layout == "float8":
            return self._read_float8(first, count)
        codes, zeros, scales = self._lines(first, count)
        groups = self._groups()
        if groups is not None:
            values = codes.astype(np.float32)
            values -= zeros[:, groups]
            values *= scales[:, groups]
            return values
        grouped = codes.reshape(count, -1, self.info.group_size).astype(np.float32)
        grouped -= zeros[..., None]
        grouped *= scales[..., None]
        return grouped.reshape(count, self.width)

    def read_codes(self, first: int, count: int) -> Parts:
        """(codes uint8 `[count, width]`, scales and biases float32 `[count, groups]`), with the columns in the order of
        `column_order`. Values are `scale * code + bias`. Raises ModelError naming file and tensor."""
        codes, zeros, scales = self._lines(first, count)
        order = self.column_order()
        if order is not None:
            codes = codes[:, order]
        repeats = self.info.group_size // self.group_size
        return codes, np.repeat(scales, repeats, axis=1), np.repeat(-zeros * scales, repeats, axis=1)

    def column_order(self) -> np.ndarray | None:
        """int64 `[width]`: the column of the weight that is at each place in `read_codes`, so that a group's columns
        are together; None if they are so in the file. Raises ModelError if a group has another number of columns."""
        groups = self._groups()
        if groups is None:
            return None
        size = self.info.group_size
        if (np.bincount(groups, minlength=self.width // size) != size).any():
            raise ModelError(f"{named(self.info.file)}: {self.name} has groups that are not of {size} columns")
        return np.argsort(groups, kind="stable")

    @property
    def block(self) -> tuple[int, int]:
        """Rows and columns that share a scale, of 8-bit floats."""
        assert self.info.block is not None, "only 8-bit floats have blocks"
        return self.info.block

    def float8_codes(self, first: int, count: int) -> np.ndarray:
        """uint8 `[count, width]`: the patterns of E4M3. Raises ModelError, also if one is no number."""
        codes = self._rows(self.info, first, count, self.width)
        if ((codes & 0x7F) == 0x7F).any():
            raise ModelError(f"{named(self.info.file)}: {self.name} has values that are not numbers (NaN)")
        return codes

    def float8_scales(self) -> np.ndarray:
        """float32 `[blocks of rows, blocks of columns]`. Raises ModelError."""
        rows, columns = self.block
        shape = -(-self.info.shape[0] // rows), -(-self.width // columns)
        return self._floats(self.info.scales, 0, 1, math.prod(shape)).reshape(shape)

    def _read_float8(self, first: int, count: int) -> np.ndarray:
        rows, columns = self.block
        values: np.ndarray = FLOAT8_E4M3[self.float8_codes(first, count)]
        scales = self.float8_scales()[np.arange(first, first + count) // rows]
        if scales.shape[1] > 1:
            scales = np.repeat(scales, columns, axis=1)[:, : self.width]
        values *= scales
        return values

    def _groups(self) -> np.ndarray | None:
        """The group of each column; None if they follow each other."""
        index, number = self.info.group_index, np.arange(self.width) // self.info.group_size
        if index is None:
            return number if self._ends_short() else None
        if self._index is None:
            self._index = self._rows(index, 0, 1, self.width)[0].astype(np.int64)
            if self._index.min() < 0 or self._index.max() > number[-1]:
                raise ModelError(f"{named(index.file)}: {self.name} has columns of groups that are not there")
        return None if np.array_equal(self._index, number) and not self._ends_short() else self._index

    def _ends_short(self) -> bool:
        return self.width % self.info.group_size != 0

    def _lines(self, first: int, count: int) -> Parts:
        """(codes, zero points, scales) of lines."""
        if self.info.layout in ("gptq", "awq"):
            return self._lines_of_columns(first, count)
        words = self._rows(self.info, first, count, self._words_of_line())
        codes = words ^ 0x80 if self.info.layout == "int8" else unpack_rows(words, self.info.bits)
        groups = self.width // self.info.group_size
        scales = self.info.scales
        one = math.prod(scales.shape) == 1
        values = self._floats(scales, 0 if one else first, 1 if one else count, 1 if one else groups)
        shape = (count, groups)
        return codes, self._row_zeros(first, shape), np.broadcast_to(values, shape)

    def _words_of_line(self) -> int:
        return self.width if self.info.layout == "int8" else self.width * self.info.bits // 32

    def _row_zeros(self, first: int, shape: tuple[int, int]) -> np.ndarray:
        zeros, middle = self.info.zeros, 2 ** (self.info.bits - 1)
        if zeros is None:
            return np.full(shape, middle, np.float32)
        if self.info.layout == "int8":
            return (self._rows(zeros, first, *shape) ^ 0x80).astype(np.float32)
        per_word = 32 // self.info.bits  # a word has the zero points of consecutive rows
        begin, end = first // per_word, -(-(first + shape[0]) // per_word)
        words = transposed(self._rows(zeros, begin, end - begin, shape[1]))
        return unpack_rows(words, self.info.bits).T[first - begin * per_word :][: shape[0]].astype(np.float32)

    def _lines_of_columns(self, first: int, count: int) -> Parts:
        found: list[Parts] = []
        while count:
            window = self._window
            if window is None or not window.first <= first < window.first + len(window.codes):
                window = self._window = self._read_window(first)
            begin = first - window.first
            step = min(count, len(window.codes) - begin)
            part = slice(begin, begin + step)
            found.append((window.codes[part], window.zeros[part], window.scales[part]))
            first, count = first + step, count - step
        if first == self.info.shape[0]:
            self._window = None  # the last lines were read
        if len(found) == 1:
            return found[0]
        codes, zeros, scales = (np.concatenate(arrays) for arrays in zip(*found, strict=True))
        return codes, zeros, scales

    def _read_window(self, line: int) -> _Window:
        rows, columns = self.info.shape
        size = max(1, WINDOW_BYTES // (columns * LINES_OF_WINDOW)) * LINES_OF_WINDOW
        first = line // size * size
        count = min(size, rows - first)
        per_word = 32 // self.info.bits
        groups = -(-columns // self.info.group_size)
        assert self.info.zeros is not None, "both layouts have zero points"
        zero_words = self._columns(self.info.zeros, groups, first // per_word, -(-count // per_word))
        scales = self._widened(self._columns(self.info.scales, groups, first, count), self.info.scales)
        if self.info.layout == "awq":
            words = self._columns(self.info, columns, first // per_word, -(-count // per_word))
            codes, zeros = transposed(unpack_awq(words)), unpack_awq(zero_words)
        else:
            words = self._columns(self.info, columns // per_word, first, count)
            codes, zeros = unpack_rows(transposed(words), self.info.bits), unpack_rows(zero_words, self.info.bits)
            zeros = (zeros + np.uint8(self.info.zero_offset)) & (2**self.info.bits - 1)
        return _Window(first, codes[:count], zeros.T[:count].astype(np.float32), scales.T[:count])

    def _floats(self, info: TensorInfo, first: int, count: int, width: int) -> np.ndarray:
        return self._widened(self._rows(info, first, count, width), info)

    def _widened(self, raw: np.ndarray, info: TensorInfo) -> np.ndarray:
        """float32 values."""
        return (raw.astype(np.uint32) << 16).view(np.float32) if info.dtype == "BF16" else raw.astype(np.float32)

    def _rows(self, info: TensorInfo, first: int, count: int, width: int) -> np.ndarray:
        """`[count, width]` as stored: consecutive lines of a tensor."""
        out = np.empty((count, width), _RAW[info.dtype])
        self._fill(info, out.reshape(1, -1), info.start + first * width * out.itemsize, 0)
        return out

    def _columns(self, info: TensorInfo, rows: int, first: int, count: int) -> np.ndarray:
        """`[rows, count]` as stored: the same columns of all rows of a tensor."""
        out = np.empty((rows, count), _RAW[info.dtype])
        self._fill(info, out, info.start + first * out.itemsize, info.num_bytes // rows)
        return out

    def _fill(self, info: TensorInfo, out: np.ndarray, start: int, stride: int) -> None:
        """Fill each row of `out` with the bytes from start + row * stride on."""
        lines = out.view(np.uint8).reshape(len(out), -1)
        if stride == lines.shape[1]:
            lines = lines.reshape(1, -1)
        try:
            with on_disk(info.file).open("rb", buffering=0) as stream:
                for row, line in enumerate(lines):
                    stream.seek(start + row * stride)
                    view = line.data
                    while view:
                        got = stream.readinto(view)
                        if not got:
                            early = f"the file ends {len(view)} bytes too early"
                            raise ModelError(f"{named(info.file)}: {self.name} cannot be read: {early}")
                        view = view[got:]
        except OSError as exc:
            reason = exc.strerror or type(exc).__name__
            raise ModelError(f"{named(info.file)}: {self.name} cannot be read: {reason}") from exc
