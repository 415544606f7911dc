"""Read and check the headers of safetensors files: 8 bytes of length, that many bytes of JSON, then the tensors.

Format: https://huggingface.co/docs/safetensors (offsets count from the end of the header, without holes or overlaps).
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from exo_mesh.errors import ModelError

MAX_HEADER_BYTES = 100_000_000
"""The bound that the reference implementation of the format sets."""

DTYPE_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
    "U16": 16, "I16": 16, "F16": 16, "BF16": 16, "U32": 32, "I32": 32, "F32": 32,
    "U64": 64, "I64": 64, "F64": 64, "C64": 64,
}  # fmt: skip

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor lies: bytes `[start, stop)` of `file`, counted from the start of the file."""

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

    Raises ModelError naming the file, and the tensor where there is one, for any defect that headers can show.
    """
    if (model_dir / SINGLE_FILE).is_file():
        return read_header(model_dir / SINGLE_FILE)
    index_file = model_dir / INDEX_FILE
    if not index_file.is_file():
        raise ModelError(f"{model_dir} has neither {SINGLE_FILE} nor {INDEX_FILE}")
    weight_map = _read_weight_map(index_file)
    table: TensorTable = {}
    for file_name in sorted(set(weight_map.values())):
        shard = model_dir / file_name
        if not shard.is_file():
            first = min(name for name, file in weight_map.items() if file == file_name)
            raise ModelError(f"{shard} is missing; {index_file.name} says that it holds {first}")
        header = read_header(shard)
        for name in header:
            if weight_map.get(name) != file_name:
                raise ModelError(f"{shard} holds {name}, but {index_file.name} does not say so")
        table.update(header)
    for name, file_name in weight_map.items():
        if name not in table:
            raise ModelError(f"{model_dir / file_name} does not hold {name}, though {index_file.name} says so")
    return table


def read_header(file: Path) -> TensorTable:
    """The tensors of one file. Raises ModelError if the file is cut short, not safetensors, or inconsistent."""
    header, data_start, file_bytes = _read_json_header(file)
    table = {
        name: _tensor_info(file, name, entry, data_start) for name, entry in header.items() if name != "__metadata__"
    }
    expected = data_start
    for name, info in sorted(table.items(), key=lambda item: (item[1].start, item[1].stop)):
        if info.start != expected:
            raise ModelError(f"{file}: {name} starts at byte {info.start}, expected {expected} (hole or overlap)")
        if info.stop > file_bytes:
            raise ModelError(
                f"{file}: {name} ends at byte {info.stop}, the file has only {file_bytes}: it is cut short"
            )
        expected = info.stop
    if expected != file_bytes:
        raise ModelError(f"{file} has {file_bytes} bytes, its header describes {expected}")
    return table


def _read_json_header(file: Path) -> tuple[dict[str, Any], int, int]:
    """(header, byte at which tensor data starts, file size)."""
    try:
        file_bytes = file.stat().st_size
        with file.open("rb") as stream:
            prefix = stream.read(8)
            if len(prefix) < 8:
                raise ModelError(f"{file} is not a safetensors file: it has only {file_bytes} bytes")
            (header_bytes,) = struct.unpack("<Q", prefix)
            if header_bytes > min(MAX_HEADER_BYTES, file_bytes - 8):
                raise ModelError(
                    f"{file} is cut short or not safetensors: header of {header_bytes} bytes, file of {file_bytes}"
                )
            raw = stream.read(header_bytes)
    except OSError as exc:
        raise ModelError(f"{file} cannot be read: {exc.strerror or exc}") from exc
    try:
        header = json.loads(raw)
    except (ValueError, RecursionError) as exc:
        raise ModelError(f"{file} is not a safetensors file: its header is not JSON") from exc
    if not isinstance(header, dict):
        raise ModelError(f"{file} is not a safetensors file: its header is not a JSON object")
    return header, 8 + header_bytes, file_bytes


def _tensor_info(file: Path, name: str, entry: Any, data_start: int) -> TensorInfo:
    """One checked header entry."""
    if not isinstance(entry, dict):
        raise ModelError(f"{file}: the header entry of {name} is not an object")
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise ModelError(f"{file}: {name} has unknown dtype {dtype!r}")
    sizes, span = _sizes(shape), _sizes(offsets)
    if sizes is None or span is None or len(span) != 2 or span[0] > span[1]:
        raise ModelError(f"{file}: {name} has bad shape {shape!r} or offsets {offsets!r}")
    start, stop = span
    need_bits = math.prod(sizes) * DTYPE_BITS[dtype]
    if need_bits != (stop - start) * 8:
        raise ModelError(f"{file}: {name} of {dtype}{shape} needs {need_bits / 8:g} bytes, it has {stop - start}")
    return TensorInfo(file, dtype, sizes, data_start + start, data_start + stop)


def _sizes(values: Any) -> tuple[int, ...] | None:
    """A list of integers >= 0 as a tuple; None for anything else."""
    if isinstance(values, list) and all(type(value) is int and value >= 0 for value in values):
        return tuple(values)
    return None


def _read_weight_map(index_file: Path) -> Mapping[str, str]:
    """{tensor: file name}, with file names that stay inside the model directory."""
    try:
        index = json.loads(index_file.read_bytes())
    except OSError as exc:
        raise ModelError(f"{index_file} cannot be read: {exc.strerror or exc}") from exc
    except (ValueError, RecursionError) as exc:
        raise ModelError(f"{index_file} is not JSON") from exc
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{index_file} has no weight_map")
    for name, file_name in weight_map.items():
        if not isinstance(file_name, str) or not re.fullmatch(r"[\w\-][\w.\-]*\.safetensors", file_name):
            raise ModelError(f"{index_file}: {name} is in {file_name!r}, which is not a safetensors file name")
    return weight_map
