"""Reads and checks the headers of GGUF files: the metadata, and the place of each tensor.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little-endian: magic, version,
number of tensors, number of entries of the metadata, these entries, the tensor infos, padding, then the tensors, each
padded.
Shapes are those of NumPy: the last axis is the one whose elements lie side by side, the first axis in the file's own
order. A quantised tensor is made of blocks along that axis.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from exo_mesh.errors import ModelError
from exo_mesh.weights.model_files import named, open_model_file, shown
from exo_mesh.weights.safetensors import TensorInfo, TensorTable, on_disk

SUFFIX = ".gguf"
MAGIC = b"GGUF"
VERSIONS = (2, 3)
QUANT_METHOD = "gguf"
"""Value of quantization_config.quant_method in the config.json that a GGUF model gets."""

MAX_HEADER_BYTES = 100_000_000
"""Most bytes of a header, as for safetensors. A vocabulary of 262,000 tokens with its merges takes about 20 MB."""

MAX_ENTRIES = 10_000
"""Most entries of the metadata. Usual files have about 40."""

MAX_KEY = 1_000
"""Bytes of a key of the metadata."""

MAX_TENSORS = 100_000
MAX_TENSOR_NAME = 127
"""Bytes of a tensor's name. ggml has at most 63."""

MAX_DIMENSIONS = 4
MAX_ARRAY = 4_000_000
"""Most elements of an array. The largest known arrays are the merges of a tokenizer, some 500,000."""

MAX_TEXT = 4 * 2**20
"""Most bytes of a text outside arrays. The largest known are chat templates, some 30 KB."""

MAX_ELEMENT = 65_536
"""Most bytes of a text in an array: a token, or a merge of two tokens."""

MAX_FILE_BYTES = 2**63 - 1
MAX_ALIGNMENT = 65_536
DEFAULT_ALIGNMENT = 32
FIRST_READ_BYTES = 2**20
"""Bytes of a file that are read first. If the header is longer, twice as many are read, and so on."""

BLOCKS = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34), 9: ("Q8_1", 32, 40), 10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210), 15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66), 17: ("IQ2_XS", 256, 74), 18: ("IQ3_XXS", 256, 98), 19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18), 21: ("IQ3_S", 256, 110), 22: ("IQ2_S", 256, 82), 23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1), 25: ("I16", 1, 2), 26: ("I32", 1, 4), 27: ("I64", 1, 8), 28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56), 30: ("BF16", 1, 2), 34: ("TQ1_0", 256, 54), 35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17), 40: ("NVFP4", 64, 36), 41: ("Q1_0", 128, 18),
}  # fmt: skip
"""{number of a tensor type in files: (its name, elements of a block, bytes of a block)}, as in ggml."""

BLOCK_SIZES = {name: (elements, block_bytes) for name, elements, block_bytes in BLOCKS.values()}
"""{name of a tensor type: (elements of a block, bytes of a block)}."""

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""{number of a type of values in the metadata: its code in struct}."""

_TEXT, _ARRAY = 8, 9

Scalar = int | float | bool | str


class IncompleteHeaderError(ModelError):
    """The given bytes end before the header does."""


@dataclass(frozen=True, slots=True)
class GgufArray:
    """An array of the metadata. `raw` has its elements as they are in the file; they are decoded when they are
    needed."""

    key: str
    kind: int
    length: int
    raw: memoryview = field(repr=False)

    @property
    def is_text(self) -> bool:
        return self.kind == _TEXT

    def numbers(self) -> tuple[int | float | bool, ...]:
        """All elements. Raises ModelError if they are texts."""
        if self.is_text:
            raise ModelError(f"{self.key} holds texts instead of numbers")
        return struct.unpack(f"<{self.length}{_SCALARS[self.kind]}", self.raw)

    def texts(self) -> Iterator[str]:
        """The elements, one by one. Raises ModelError if they are numbers, or not UTF-8."""
        if not self.is_text:
            raise ModelError(f"{self.key} holds numbers instead of texts")
        at = 0
        for _ in range(self.length):
            start = at + 8
            at = start + int(_U64.unpack_from(self.raw, at)[0])
            yield _decoded(self.raw[start:at], self.key)


Value = Scalar | GgufArray


class GgufHeader(msgspec.Struct, frozen=True):
    """A checked header. table: the tensors by their names in the file. num_bytes: of the header with its padding: the
    place of the first tensor. The readers of values raise ModelError for a value of another type."""

    metadata: Mapping[str, Value]
    table: TensorTable
    version: int
    alignment: int
    num_bytes: int

    @property
    def architecture(self) -> str:
        """Value of general.architecture, such as "llama"; prefix of the keys that describe the model."""
        return self.text("general.architecture")

    def text(self, key: str, default: str = "") -> str:
        value = self.metadata.get(key, default)
        if not isinstance(value, str):
            raise ModelError(f"{key} is {shown(_plain(value))}, not a text")
        return value

    def integer(self, key: str, default: int | None = None) -> int | None:
        value = self.metadata.get(key, default)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
            raise ModelError(f"{key} is {shown(_plain(value))}, not an integer")
        return value

    def number(self, key: str, default: float | None = None) -> float | None:
        value = self.metadata.get(key, default)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ModelError(f"{key} is {shown(_plain(value))}, not a finite number")
        return float(value)

    def flag(self, key: str, default: bool | None = None) -> bool | None:
        value = self.metadata.get(key, default)
        if value is not None and not isinstance(value, bool):
            raise ModelError(f"{key} is {shown(_plain(value))}, not a boolean")
        return value

    def array(self, key: str) -> GgufArray | None:
        value = self.metadata.get(key)
        if value is not None and not isinstance(value, GgufArray):
            raise ModelError(f"{key} is {shown(value)}, not an array")
        return value


def read_gguf(file: Path) -> GgufHeader:
    """The header of a file, or of its part. Raises ModelError if it is missing, cut short, not GGUF, or
    inconsistent."""
    file = on_disk(file)
    try:
        with open_model_file(file) as stream:
            file_bytes = os.fstat(stream.fileno()).st_size
            raw = stream.read(FIRST_READ_BYTES)
            while True:
                try:
                    return parse_gguf(raw, file, file_bytes)
                except IncompleteHeaderError:
                    more = stream.read(min(len(raw), MAX_HEADER_BYTES + 1))
                    if not more:
                        raise
                    raw += more
    except FileNotFoundError as exc:
        raise ModelError(f"{named(file)} cannot be read: there is no such file") from exc
    except OSError as exc:
        raise ModelError(f"{named(file)} cannot be read: {exc.strerror or type(exc).__name__}") from exc


def parse_gguf(raw: bytes, file: Path, file_bytes: int) -> GgufHeader:
    """The header that `raw`, the first bytes of a file of `file_bytes` bytes, holds. The tensors are placed in `file`.

    Raises IncompleteHeaderError if the header is longer than `raw`, and ModelError that names the file for anything
    else.
    """
    try:
        return _Parser(raw).header(file, file_bytes)
    except IncompleteHeaderError as exc:
        if len(raw) >= file_bytes:
            raise ModelError(f"{named(file)} is cut short: it ends in its header") from exc
        if len(raw) >= MAX_HEADER_BYTES:
            raise ModelError(f"{named(file)}: its header has more than {MAX_HEADER_BYTES} bytes") from exc
        raise IncompleteHeaderError(f"{named(file)}: its header has more than {len(raw)} bytes") from exc
    except ModelError as exc:
        raise ModelError(f"{named(file)}: {exc}") from exc


def num_bytes_of(dtype: str, shape: tuple[int, ...]) -> int:
    """Bytes of a tensor of one of the types of BLOCKS. Raises ModelError if its last axis is not made of whole
    blocks."""
    elements, block_bytes = BLOCK_SIZES[dtype]
    width = shape[-1] if shape else 1
    if width % elements:
        raise ModelError(f"its width of {width} is not made of blocks of {elements}, as {dtype} requires")
    return math.prod(shape) // elements * block_bytes


_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")


class _Parser:
    """Reads a header from its start. `_at`: the place of the next byte."""

    def __init__(self, raw: bytes) -> None:
        self._raw = memoryview(raw)
        self._at = 0

    def header(self, file: Path, file_bytes: int) -> GgufHeader:
        """Raises IncompleteHeaderError and ModelError without the name of the file."""
        version, num_tensors, num_entries = self._counts()
        metadata = self._metadata(num_entries)
        alignment = _alignment(metadata)
        infos = [self._tensor() for _ in range(num_tensors)]
        data_start = _padded(self._at, alignment)
        table: TensorTable = {}
        expected = 0
        for name, dtype, shape, offset in infos:
            if name in table:
                raise ModelError(f"it has two tensors called {name}")
            if offset != expected:
                raise ModelError(f"{name} starts at byte {offset}, expected {expected} (hole or overlap)")
            try:
                num_bytes = num_bytes_of(dtype, shape)
            except ModelError as exc:
                raise ModelError(f"{name}: {exc}") from exc
            start = data_start + offset
            if start + num_bytes > file_bytes:
                raise ModelError(
                    f"{name} ends at byte {start + num_bytes}, the file has only {file_bytes}: it is cut short"
                )
            table[name] = TensorInfo(file, dtype, shape, start, start + num_bytes)
            expected = _padded(offset + num_bytes, alignment)
        return GgufHeader(metadata, table, version, alignment, data_start)

    def _counts(self) -> tuple[int, int, int]:
        """(version, number of tensors, number of entries)."""
        if (magic := bytes(self._take(4))) != MAGIC:
            raise ModelError(f"it is not a GGUF file: it begins with {shown(magic.decode('latin-1'))}")
        version = self._u32()
        if version not in VERSIONS:
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
            why = "big-endian files are not supported" if swapped in VERSIONS else "versions 2 and 3 are supported"
            raise ModelError(f"it has version {version} of GGUF; {why}")
        num_tensors, num_entries = self._u64(), self._u64()
        if num_tensors > MAX_TENSORS:
            raise ModelError(f"it has {num_tensors} tensors, more than {MAX_TENSORS}")
        if num_entries > MAX_ENTRIES:
            raise ModelError(f"its metadata has {num_entries} entries, more than {MAX_ENTRIES}")
        return version, num_tensors, num_entries

    def _metadata(self, num_entries: int) -> dict[str, Value]:
        metadata: dict[str, Value] = {}
        for _ in range(num_entries):
            key = self._text(MAX_KEY, "a key of its metadata")
            if not key or not key.isprintable():
                raise ModelError(f"its metadata has a key that cannot be used: {shown(key)}")
            if key in metadata:
                raise ModelError(f"its metadata has two entries {key}")
            metadata[key] = self._value(key, self._u32())
        return metadata

    def _value(self, key: str, kind: int) -> Value:
        if kind == _TEXT:
            return self._text(MAX_TEXT, key)
        if kind == _ARRAY:
            return self._array(key)
        return self._scalar(key, kind)

    def _scalar(self, key: str, kind: int) -> Scalar:
        code = _SCALARS.get(kind)
        if code is None:
            raise ModelError(f"{key} has the unknown type {kind}")
        value: Scalar = struct.unpack(f"<{code}", self._take(struct.calcsize(f"<{code}")))[0]
        return value

    def _array(self, key: str) -> GgufArray:
        kind, length = self._u32(), self._u64()
        if length > MAX_ARRAY:
            raise ModelError(f"{key} has {length} elements, more than {MAX_ARRAY}")
        if kind == _TEXT:
            return GgufArray(key, kind, length, self._texts(key, length))
        if kind not in _SCALARS:
            what = "is an array of arrays" if kind == _ARRAY else f"has elements of the unknown type {kind}"
            raise ModelError(f"{key} {what}")
        return GgufArray(key, kind, length, self._take(length * struct.calcsize(f"<{_SCALARS[kind]}")))

    def _texts(self, key: str, length: int) -> memoryview:
        """The bytes of `length` texts with their lengths. They are not decoded."""
        raw, first, at, end = self._raw, self._at, self._at, len(self._raw)
        unpack = _U64.unpack_from
        for _ in range(length):
            if at + 8 > end:
                raise IncompleteHeaderError("the header is not complete")
            (num_bytes,) = unpack(raw, at)
            if num_bytes > MAX_ELEMENT:
                raise ModelError(f"{key} has a text of {num_bytes} bytes, more than {MAX_ELEMENT}")
            at += 8 + num_bytes
        self._at = first
        return self._take(at - first)

    def _tensor(self) -> tuple[str, str, tuple[int, ...], int]:
        """(name, type, shape, offset from the first tensor)."""
        name = self._text(MAX_TENSOR_NAME, "the name of a tensor")
        if not name or not name.isprintable():
            raise ModelError(f"it has a tensor whose name cannot be used: {shown(name)}")
        num_dimensions = self._u32()
        if num_dimensions > MAX_DIMENSIONS:
            raise ModelError(f"{name} has {num_dimensions} dimensions, more than {MAX_DIMENSIONS}")
        shape = tuple(self._u64() for _ in range(num_dimensions))[::-1]
        if any(size > MAX_FILE_BYTES for size in shape) or math.prod(shape) > MAX_FILE_BYTES:
            raise ModelError(f"{name} has the impossible shape {shown(list(shape))}")
        number = self._u32()
        if number not in BLOCKS:
            raise ModelError(f"{name} has the unknown type {number}")
        return name, BLOCKS[number][0], shape, self._u64()

    def _text(self, max_bytes: int, what: str) -> str:
        num_bytes = self._u64()
        if num_bytes > max_bytes:
            raise ModelError(f"{what} has {num_bytes} bytes, more than {max_bytes}")
        return _decoded(self._take(num_bytes), what)

    def _u32(self) -> int:
        value: int = _U32.unpack(self._take(4))[0]
        return value

    def _u64(self) -> int:
        value: int = _U64.unpack(self._take(8))[0]
        return value

    def _take(self, num_bytes: int) -> memoryview:
        start, stop = self._at, self._at + num_bytes
        if stop > len(self._raw):
            raise IncompleteHeaderError("the header is not complete")
        self._at = stop
        return self._raw[start:stop]


def _alignment(metadata: Mapping[str, Value]) -> int:
    value = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if not isinstance(value, int) or not 8 <= value <= MAX_ALIGNMENT or value & (value - 1):
        raise ModelError(f"general.alignment is {shown(_plain(value))}, not a power of two from 8 to {MAX_ALIGNMENT}")
    return value


def _padded(num_bytes: int, alignment: int) -> int:
    return -(-num_bytes // alignment) * alignment


def _plain(value: object) -> object:
    return f"an array of {value.length}" if isinstance(value, GgufArray) else value


def _decoded(raw: memoryview, what: str) -> str:
    try:
        return str(raw, "utf-8")
    except UnicodeDecodeError as exc:
        raise ModelError(f"{what} is not UTF-8") from exc
