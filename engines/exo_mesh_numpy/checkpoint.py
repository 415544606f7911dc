"""Reads tensors of a checkpoint into existing float32 arrays, in chunks of limited size.

Files are read and not mapped: pages of a mapped file would count as memory of the process while they are converted.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np

from exo_mesh.errors import ModelError
from exo_mesh.weights.gguf import QUANT_METHOD
from exo_mesh.weights.gguf_blocks import READABLE
from exo_mesh.weights.gguf_lines import needs_conversion
from exo_mesh.weights.lines import LineReader, line_reader
from exo_mesh.weights.model_files import read_json
from exo_mesh.weights.packed.tensors import PackedTensor, is_packed_config, is_spare_bias, read_packed_table
from exo_mesh.weights.safetensors import TensorInfo, TensorTable, on_disk
from exo_mesh.weights.tensors import read_tensor_table
from exo_mesh_numpy.floats import widen_bfloat16
from exo_mesh_numpy.quantised import PACKED_DTYPE, NumpyPacking, dequantise, read_packing, scale_dtype

CHUNK_ITEMS = 2**19
"""Elements converted at once: 2 MiB as float32, which stays in the cache of a core."""

PREFIX = "model."
"""What the names of all tensors but the head's begin with. Checkpoints of models without a head may leave it out."""

_RAW_DTYPES = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16, "U8": np.uint8, "U32": np.uint32}
_FLOATS = ("F32", "F16", "BF16")


class NumpyCheckpoint:
    """The tensors of a model directory. A *module* is a linear layer or an embedding, quantised or not."""

    def __init__(self, model_dir: Path) -> None:
        """Raises ModelError for defects of the headers, and for a quantisation that this engine does not support."""
        self._dir = model_dir
        config_file = model_dir / "config.json"
        config = read_json(config_file)
        self._quantisation = _quantisation(config_file, config)
        self._table = _with_prefix(read_packed_table(config_file, config, read_tensor_table(model_dir)))

    def names(self) -> Iterator[str]:
        return iter(self._table)

    def file_of(self, name: str) -> Path:
        return self._table[name].file

    def is_spare(self, name: str) -> bool:
        """Whether a tensor that no layer uses does not matter."""
        return is_spare_bias(name, self._table)

    def has(self, name: str) -> bool:
        return name in self._table

    def vector_tensors(self, name: str, size: int) -> tuple[str, ...]:
        """Check a norm's weight or a bias of `size` values; returns the names of its tensors."""
        self._info(name, (size,), _FLOATS)
        return (name,)

    def matrix_tensors(self, module: str, rows: int, columns: int) -> tuple[str, ...]:
        """Check the weight of a module, `[rows, columns]`; returns the names of its tensors."""
        packing = self._packing(module)
        if packing is None:
            self._info(f"{module}.weight", (rows, columns), _FLOATS)
            return (f"{module}.weight",)
        return tuple(name for name, _ in self._packed(module, packing, rows, columns))

    def read_vector(self, name: str, out: np.ndarray) -> None:
        """Fill float32 `out`, `[n]`. Raises ModelError naming file and tensor if it is missing or does not fit."""
        self._read_floats(self._info(name, out.shape, _FLOATS), name, out)

    def read_matrix(self, module: str, out: np.ndarray) -> None:
        """Fill float32 `out`, C-contiguous `[rows, columns]`, with a module's weight, dequantised if need be."""
        packing = self._packing(module)
        if packing is None:
            name = f"{module}.weight"
            self._read_floats(self._info(name, out.shape, _FLOATS), name, out.reshape(-1))
        else:
            self._read_packed(module, packing, out)

    def _packing(self, module: str) -> NumpyPacking | None:
        """The quantisation of a module: None for plain floats. Scales without settings are a defect."""
        scales = f"{module}.scales"
        if scales not in self._table:
            return None
        return read_packing(self._dir / "config.json", self._quantisation, module)

    def _info(self, name: str, shape: tuple[int, ...], dtypes: tuple[str, ...]) -> TensorInfo:
        info = self._table.get(name)
        if info is None:
            raise ModelError(f"{self._dir}: the checkpoint has no tensor {name}")
        if info.shape != shape:
            raise ModelError(f"{info.file}: {name} has shape {list(info.shape)}, config.json requires {list(shape)}")
        converts = isinstance(info, PackedTensor) or (needs_conversion(info) and info.dtype in READABLE)
        if info.dtype not in dtypes and not converts:
            raise ModelError(f"{info.file}: {name} is {info.dtype}; the numpy engine reads {', '.join(dtypes)} there")
        return info

    def _packed(self, module: str, packing: NumpyPacking, rows: int, columns: int) -> list[tuple[str, TensorInfo]]:
        """(name, info) of packed values, scales, and biases if the mode has them."""
        if columns % packing.group_size or columns * packing.bits % 32:
            raise ModelError(
                f"{self._table[f'{module}.scales'].file}: {module} of width {columns} does not divide into groups of "
                f"{packing.group_size} with {packing.bits} bits"
            )
        per_group = (rows, columns // packing.group_size)
        wanted: dict[str, tuple[tuple[int, int], tuple[str, ...]]] = {}
        wanted["weight"] = ((rows, columns * packing.bits // 32), (PACKED_DTYPE,))
        wanted["scales"] = (per_group, scale_dtype(packing.mode))
        if packing.mode == "affine":
            wanted["biases"] = (per_group, _FLOATS)
        names = {part: f"{module}.{part}" for part in wanted}
        return [(names[part], self._info(names[part], *wanted[part])) for part in wanted]

    def _read_floats(self, info: TensorInfo, name: str, out: np.ndarray) -> None:
        """Fill float32 `out`, C-contiguous `[n]`."""
        reader = line_reader(name, info)
        if reader is not None:
            _read_lines(reader, out)
            return
        spare = np.empty(0 if info.dtype == "F32" else min(CHUNK_ITEMS, len(out)), _RAW_DTYPES[info.dtype])
        with _opened(info, name) as stream:
            for begin in range(0, len(out), CHUNK_ITEMS):
                part = out[begin : begin + CHUNK_ITEMS]
                if info.dtype == "F32":
                    _fill(stream, part, info, name)
                else:
                    raw = spare[: len(part)]
                    _fill(stream, raw, info, name)
                    _widen(raw, info.dtype, part)

    def _read_packed(self, module: str, packing: NumpyPacking, out: np.ndarray) -> None:
        """Dequantise a few rows at a time into float32 `out`, C-contiguous `[rows, columns]`."""
        tensors = self._packed(module, packing, *out.shape)
        step = max(1, CHUNK_ITEMS // out.shape[1])
        with ExitStack() as stack:
            streams = [stack.enter_context(_opened(info, name)) for name, info in tensors]
            for begin in range(0, len(out), step):
                part = out[begin : begin + step]
                raw = [
                    _rows(stream, info, name, len(part)) for stream, (name, info) in zip(streams, tensors, strict=True)
                ]
                dequantise(raw[0], raw[1], raw[2] if len(raw) == 3 else None, packing, part)


def _quantisation(config_file: Path, config: Mapping[str, Any]) -> Mapping[str, Any]:
    """MLX's quantisation settings; empty if there are none. Raises ModelError for formats that are not read here."""
    found = config.get("quantization") or config.get("quantization_config") or {}
    if not isinstance(found, dict):
        raise ModelError(f"{config_file}: quantization is {json.dumps(found)}, not an object")
    if found.get("quant_method") == QUANT_METHOD:
        return {}  # each tensor has its own type
    if is_packed_config(config):
        return {}  # the table of tensors says what is quantised
    if "quant_method" in found:
        raise ModelError(
            f"{config_file}: quantization_config: quant_method {json.dumps(found['quant_method'])} is not supported by "
            "the numpy engine; it reads the formats of MLX (affine, mxfp4, mxfp8, nvfp4), GGUF files, AWQ, GPTQ, "
            "compressed-tensors and FP8"
        )
    return found


def _read_lines(lines: LineReader, out: np.ndarray) -> None:
    """Fill float32 `out`, C-contiguous `[n]`, a few lines at a time."""
    rows = out.reshape(-1, lines.width)
    step = max(1, CHUNK_ITEMS // lines.width)
    for begin in range(0, len(rows), step):
        part = rows[begin : begin + step]
        part[...] = lines.read(begin, len(part))


@contextmanager
def _opened(info: TensorInfo, name: str) -> Iterator[FileIO]:
    """The file, opened at the first byte of the tensor. Raises ModelError if it cannot be read."""
    try:
        with on_disk(info.file).open("rb", buffering=0) as stream:
            stream.seek(info.start)
            yield stream
    except OSError as exc:
        raise ModelError(f"{info.file}: {name} cannot be read: {exc.strerror or exc}") from exc


def _fill(stream: FileIO, out: np.ndarray, info: TensorInfo, name: str) -> None:
    """Read exactly as many bytes as `out` has."""
    view = out.reshape(-1).view(np.uint8).data
    while view:
        count = stream.readinto(view)
        if not count:
            raise ModelError(f"{info.file}: {name} cannot be read: the file ends {len(view)} bytes too early")
        view = view[count:]


def _rows(stream: FileIO, info: TensorInfo, name: str, count: int) -> np.ndarray:
    """The next `count` rows, floats as float32 and packed integers as they are."""
    raw = np.empty((count, info.shape[1]), _RAW_DTYPES[info.dtype])
    _fill(stream, raw, info, name)
    if info.dtype not in ("BF16", "F16"):
        return raw
    wide = np.empty(raw.shape, np.float32)
    _widen(raw, info.dtype, wide)
    return wide


def _widen(raw: np.ndarray, dtype: str, out: np.ndarray) -> None:
    if dtype == "BF16":
        widen_bfloat16(raw, out)
    else:
        out[...] = raw


def _with_prefix(table: TensorTable) -> TensorTable:
    """The table with PREFIX before every name, if no name has it and the layers' names lack it."""
    if any(name.startswith(PREFIX) for name in table) or not any(name.startswith("layers.") for name in table):
        return table
    return {name if name.startswith("lm_head.") else PREFIX + name: info for name, info in table.items()}
