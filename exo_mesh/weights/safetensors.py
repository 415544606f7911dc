"""Reads and checks the headers of safetensors files: 8 bytes of length, that many bytes of JSON, then the tensors.

Format: https://huggingface.co/docs/safetensors (offsets count from the end of the header, without holes or overlaps).
"""

from __future__ import annotations

import itertools
import json
import math
import operator
import re
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, TypeGuard

import msgspec

from exo_mesh.errors import ModelError
from exo_mesh.weights.model_files import as_text, exists, named, open_model_file, read_model_file, shown

MAX_HEADER_BYTES = 100_000_000
"""Most bytes of a header, as in the reference implementation of the format."""

MAX_HEADERS_BYTES = 128 * 2**20
"""Most bytes of all headers of one checkpoint; the largest known ones, of 210,000 tensors, have about 32 MB."""

MAX_INDEX_BYTES = 64 * 2**20
MAX_TENSORS = 300_000
MAX_NAME = 512
"""Characters of a tensor's name."""

MAX_SIZE = 2**63 - 1
MAX_DIMENSIONS = 16

DTYPE_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
    "U16": 16, "I16": 16, "F16": 16, "BF16": 16, "U32": 32, "I32": 32, "F32": 32,
    "U64": 64, "I64": 64, "F64": 64, "C64": 64,
}  # fmt: skip

PART = ".part"
"""Suffix of a checkpoint file that is not whole; see exo_mesh/weights/fetched.py."""

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

_METADATA = "__metadata__"
_EXPLAINED_BYTES = 2**20
"""A bad header up to this size is parsed again, without a schema, to name the bad tensor. A larger one is only refused:
parsed without a schema, it could take 20 times its size."""

_Size = Annotated[int, msgspec.Meta(ge=0, le=MAX_SIZE)]
_Shape = Annotated[tuple[_Size, ...], msgspec.Meta(max_length=MAX_DIMENSIONS)]


class _Entry(msgspec.Struct, frozen=True, gc=False):
    """One tensor in a header. No field is required, because the metadata beside the tensors is parsed as an entry too;
    some programs write null there."""

    dtype: str = ""
    shape: _Shape | None = None
    data_offsets: tuple[_Size, _Size] | None = None


_Entries = dict[str, _Entry | None]


class _Index(msgspec.Struct, frozen=True):
    weight_map: dict[str, str]


_HEADER = msgspec.json.Decoder(_Entries)
_INDEX = msgspec.json.Decoder(_Index)


class TensorInfo(msgspec.Struct, frozen=True):
    """The place of a tensor: bytes `[start, stop)` of `file`, counted from the start of the file."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def num_bytes(self) -> int:
        return self.stop - self.start


TensorTable = dict[str, TensorInfo]


def read_tensor_table(model_dir: Path) -> TensorTable:
    """Every tensor of a checkpoint, from model.safetensors or from the shards that the index names.

    Raises ModelError naming the file, and the tensor if there is one, for any defect that headers can show.
    """
    try:
        return _read_header(model_dir / SINGLE_FILE, MAX_HEADERS_BYTES)[0]
    except FileNotFoundError:
        pass  # the weights are in several files
    index_file = model_dir / INDEX_FILE
    weight_map = read_weight_map(index_file)
    table: TensorTable = {}
    left_bytes = MAX_HEADERS_BYTES
    for file_name in sorted(set(weight_map.values())):
        shard = model_dir / file_name
        try:
            header, header_bytes = _read_header(shard, left_bytes)
        except FileNotFoundError as exc:
            first = min(name for name, file in weight_map.items() if file == file_name)
            raise ModelError(f"{named(shard)} is missing; {index_file.name} says that it holds {first}") from exc
        left_bytes -= header_bytes
        for name in header:
            if weight_map.get(name) != file_name:
                raise ModelError(f"{named(shard)} holds {name}, but {index_file.name} does not list it there")
        table.update(header)
    for name, file_name in weight_map.items():
        if name not in table:
            raise ModelError(f"{named(model_dir / file_name)} does not hold {name}, though {index_file.name} says so")
    return table


def on_disk(file: Path) -> Path:
    """The path of a checkpoint file: its own name, or its part if only that exists. Takes either name. A caller that
    opens the file some time after its header calls this again, because the file may have become whole."""
    whole = file.with_name(file.name.removesuffix(PART))
    part = whole.with_name(f"{whole.name}{PART}")
    return part if not exists(whole) and exists(part) else whole


def read_header(file: Path) -> TensorTable:
    """The tensors of one file. Raises ModelError if it is missing, cut short, not safetensors, or inconsistent."""
    try:
        return _read_header(file, MAX_HEADERS_BYTES)[0]
    except FileNotFoundError as exc:
        raise ModelError(f"{named(file)} cannot be read: there is no such file") from exc


def _read_header(file: Path, left_bytes: int) -> tuple[TensorTable, int]:
    """(tensors, bytes of the header, at most left_bytes). Raises as read_header, and FileNotFoundError."""
    file = on_disk(file)
    entries, header_bytes, file_bytes = _read_entries(file, left_bytes)
    data_start = 8 + header_bytes
    table: TensorTable = {}
    for name in list(entries):  # each entry is dropped once it is checked, so that no entry is held twice
        table[name] = _tensor_info(file, name, entries.pop(name), data_start)
    expected = data_start
    for name in _by_place(table):
        info = table[name]
        if info.start != expected:
            where = f"{name} starts at byte {info.start}, expected {expected}"
            raise ModelError(f"{named(file)}: {where} (hole or overlap)")
        if info.stop > file_bytes:
            raise ModelError(
                f"{named(file)}: {name} ends at byte {info.stop}, the file has only {file_bytes}: it is cut short"
            )
        expected = info.stop
    if expected != file_bytes:
        raise ModelError(f"{named(file)} has {file_bytes} bytes, its header describes {expected}")
    return table, header_bytes


def _by_place(table: TensorTable) -> Iterable[str]:
    """The names in the order in which the tensors lie in the file."""
    stops = (info.stop for info in table.values())
    starts = (info.start for info in table.values())
    if all(map(operator.eq, stops, itertools.islice(starts, 1, None))):
        return table  # true for nearly all files; sorting takes memory
    return sorted(table, key=lambda name: (table[name].start, table[name].stop))


def _read_entries(file: Path, left_bytes: int) -> tuple[_Entries, int, int]:
    """(entries of the header, bytes of the header, file size)."""
    raw, file_bytes = _read_raw_header(file, left_bytes)
    return _parse_header(file, raw), len(raw), file_bytes


def _read_raw_header(file: Path, left_bytes: int) -> tuple[bytes, int]:
    """(header, file size)."""
    with open_model_file(file) as stream:
        try:
            file_bytes = stream.seek(0, 2)
            stream.seek(0)
            prefix = stream.read(8)
            if len(prefix) < 8:
                raise ModelError(f"{named(file)} is not a safetensors file: it has only {file_bytes} bytes")
            (header_bytes,) = struct.unpack("<Q", prefix)
            if header_bytes > min(MAX_HEADER_BYTES, file_bytes - 8):
                raise ModelError(
                    f"{named(file)} is cut short or not safetensors: header of {header_bytes} bytes, "
                    f"file of {file_bytes}"
                )
            if header_bytes > left_bytes:
                raise ModelError(f"{named(file)}: the headers have more than {MAX_HEADERS_BYTES} bytes together")
            return stream.read(header_bytes), file_bytes
        except OSError as exc:
            raise ModelError(f"{named(file)} cannot be read: {exc.strerror or type(exc).__name__}") from exc


def _parse_header(file: Path, raw: bytes) -> _Entries:
    """The entries of all tensors. Anything that is no tensor entry is refused before it is built, whatever its size."""
    if raw.count(b"data_offsets") > MAX_TENSORS:
        raise ModelError(f"{named(file)} has more than {MAX_TENSORS} tensors")
    try:
        decoded = _HEADER.decode(raw)
    except (msgspec.DecodeError, RecursionError) as exc:
        if len(raw) > _EXPLAINED_BYTES:
            why = "its header is not JSON, or has an entry that describes no tensor"
            raise ModelError(f"{named(file)} is not a safetensors file: {why}") from exc
        decoded = _parse_freely(file, raw)
    if len(decoded) > MAX_TENSORS:
        raise ModelError(f"{named(file)} has more than {MAX_TENSORS} tensors")
    decoded.pop(_METADATA, None)
    return decoded


def _parse_freely(file: Path, raw: bytes) -> _Entries:
    """As _parse_header, for a small header: raises ModelError that names the bad tensor, and accepts any metadata."""
    try:
        header = json.loads(raw)
    except (ValueError, RecursionError) as exc:
        raise ModelError(f"{named(file)} is not a safetensors file: its header is not JSON") from exc
    if not isinstance(header, dict):
        raise ModelError(f"{named(file)} is not a safetensors file: its header is not a JSON object")
    header.pop(_METADATA, None)
    for name, entry in header.items():
        if fault := _fault(entry):
            raise ModelError(f"{named(file)}: {name[:MAX_NAME]} {fault}")
    try:
        return msgspec.convert(header, _Entries)
    except msgspec.ValidationError as exc:
        raise ModelError(f"{named(file)} is not a safetensors file: {exc}") from exc


def _fault(entry: Any) -> str:
    if not isinstance(entry, dict):
        return "has a header entry that is not an object"
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        return f"has unknown dtype {shown(dtype)}"
    if not _are_sizes(shape) or not _are_sizes(offsets) or len(shape) > MAX_DIMENSIONS or len(offsets) != 2:
        return f"has bad shape {shown(shape)} or offsets {shown(offsets)}"
    return ""


def _are_sizes(values: Any) -> TypeGuard[list[int]]:
    return isinstance(values, list) and all(type(value) is int and 0 <= value <= MAX_SIZE for value in values)


def _tensor_info(file: Path, name: str, entry: _Entry | None, data_start: int) -> TensorInfo:
    """One checked header entry."""
    if entry is None:
        raise ModelError(f"{named(file)}: {name} has a header entry that is not an object")
    bits, shape, span = DTYPE_BITS.get(entry.dtype), entry.shape, entry.data_offsets
    if len(name) > MAX_NAME or not name.isprintable():
        raise ModelError(f"{named(file)} has a tensor whose name cannot be used: {shown(name)}")
    if bits is None:
        raise ModelError(f"{named(file)}: {name} has unknown dtype {shown(entry.dtype)}")
    if shape is None or span is None or span[0] > span[1]:
        raise ModelError(f"{named(file)}: {name} has bad shape {shown(shape)} or offsets {shown(span)}")
    start, stop = span
    need_bits = math.prod(shape) * bits
    if need_bits != (stop - start) * 8:
        need = f"{need_bits // 8} bytes" if need_bits <= MAX_SIZE else "more bytes than any file has"
        raise ModelError(f"{named(file)}: {name} of {entry.dtype}{list(shape)} needs {need}, it has {stop - start}")
    return TensorInfo(file, entry.dtype, shape, data_start + start, data_start + stop)


def read_weight_map(index_file: Path) -> Mapping[str, str]:
    """{tensor: file name}, with file names that stay inside the model directory. Raises ModelError."""
    try:
        raw = read_model_file(index_file, MAX_INDEX_BYTES)
    except FileNotFoundError as exc:
        where = named(index_file).partition(":")[0]
        raise ModelError(f"{where} has neither {SINGLE_FILE} nor {INDEX_FILE}") from exc
    if raw.count(b".safetensors") > MAX_TENSORS:
        raise ModelError(f"{named(index_file)} names more than {MAX_TENSORS} tensors")
    try:
        weight_map = _INDEX.decode(as_text(index_file, raw)).weight_map
    except msgspec.ValidationError as exc:
        if "weight_map[" in str(exc):
            raise ModelError(f"{named(index_file)}: a tensor's file name is not a safetensors file name") from exc
        raise ModelError(f"{named(index_file)} has no weight_map") from exc
    except (msgspec.DecodeError, RecursionError) as exc:
        raise ModelError(f"{named(index_file)} is not JSON") from exc
    if not weight_map:
        raise ModelError(f"{named(index_file)} has no weight_map")
    for file_name in set(weight_map.values()):
        if not re.fullmatch(r"[\w\-][\w.\-]{0,240}\.safetensors", file_name):
            raise ModelError(f"{named(index_file)}: {shown(file_name)} is not a safetensors file name")
    return weight_map
