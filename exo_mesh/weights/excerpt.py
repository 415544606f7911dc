"""Writes a cut-down model directory for a self-test: a few layers in float32, a small vocabulary, short windows.

Only the tensors of the wanted layers are there; in place of the others the file has holes, which take no room on the
disk and read as zeros. So any engine can open it as it opens the model itself.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from exo_mesh.domain.model_settings import text_config
from exo_mesh.errors import ModelError
from exo_mesh.weights.card import is_side_model, is_vocabulary, layer_of
from exo_mesh.weights.fetched import is_here, read_manifest
from exo_mesh.weights.gguf import QUANT_METHOD
from exo_mesh.weights.gguf_lines import GgufLines, needs_conversion
from exo_mesh.weights.model_files import label, read_json
from exo_mesh.weights.safetensors import (
    DTYPE_BITS,
    PART,
    SINGLE_FILE,
    TensorInfo,
    TensorTable,
    on_disk,
)
from exo_mesh.weights.tensors import read_tensor_table

WINDOW = 16
"""Attention windows and chunks of the excerpt: a prompt of 40 tokens crosses them twice."""

MAX_VOCABULARY = 512
"""Rows of the embedding and of the head: enough ids for a random prompt."""

MAX_BYTES = 8 * 2**30
"""Most bytes that are written: four layers of a dense model with 300 billion parameters."""

_PIECE_BYTES = 16 * 2**20
_WIDENED = ("F16", "BF16")
_WINDOWS = ("sliding_window", "sliding_window_size", "attention_window", "attention_window_size", "local_window_size",
            "attention_chunk_size", "attn_window_size")  # fmt: skip
_SPECIAL_IDS = ("pad_token_id", "bos_token_id", "eos_token_id")


def write_excerpt(model_dir: Path, target: Path, layers: Collection[int]) -> Path:
    """Write config.json and model.safetensors with these layers, embedding, norm and head; returns `target`.

    float16 and bfloat16 become float32, packed integers stay as they are. Raises ModelError naming the file, also if it
    would be over MAX_BYTES.
    """
    config = read_json(model_dir / "config.json")
    table = read_tensor_table(model_dir)
    vocab_size = text_config(config).get("vocab_size")
    rows = min(vocab_size, MAX_VOCABULARY) if isinstance(vocab_size, int) and vocab_size > 0 else None
    shapes = {name: _shape(name, info, vocab_size, rows) for name, info in table.items()}
    wanted = [name for name in table if not is_side_model(name) and layer_of(name) in (None, *layers)]
    size = sum(_num_bytes(table[name], shapes[name]) for name in wanted)
    if size > MAX_BYTES:
        raise ModelError(
            f"{model_dir}: a self-test of layers {sorted(layers)} would write {size} bytes, over {MAX_BYTES}"
        )
    _require_fetched(model_dir, table, wanted)
    target.mkdir(parents=True, exist_ok=True)
    try:
        (target / "config.json").write_text(json.dumps(_shrunk(config, rows)))
        _write_tensors(target / SINGLE_FILE, table, shapes, wanted)
    except OSError as exc:
        raise ModelError(f"an excerpt of {model_dir} cannot be written to {target}: {exc.strerror or exc}") from exc
    return target


def _require_fetched(model_dir: Path, table: TensorTable, wanted: Collection[str]) -> None:
    """Raises ModelError if some of these tensors are still to be fetched: they would read as zeros, and the test prove
    nothing."""
    manifest = read_manifest(model_dir)
    for name in wanted:
        info = table[name]
        if not is_here(manifest, {info.file.name.removesuffix(PART): ((info.start, info.stop),)}):
            raise ModelError(f"{label(model_dir)}: {name} is not on this machine yet, so layers cannot be tested")


def _shape(name: str, info: TensorInfo, vocab_size: Any, rows: int | None) -> tuple[int, ...]:
    if rows is not None and is_vocabulary(name) and info.shape and info.shape[0] >= vocab_size:
        return (rows, *info.shape[1:])
    return info.shape


def _is_widened(info: TensorInfo) -> bool:
    """Whether a tensor becomes float32; GGUF tensors are dequantised."""
    return info.dtype in _WIDENED or needs_conversion(info)


def _num_bytes(info: TensorInfo, shape: tuple[int, ...]) -> int:
    bits = 32 if _is_widened(info) else DTYPE_BITS[info.dtype]
    return int(np.prod(shape, dtype=np.int64)) * bits // 8


def _write_tensors(
    file: Path, table: TensorTable, shapes: Mapping[str, tuple[int, ...]], wanted: Collection[str]
) -> None:
    header: dict[str, Any] = {}
    offset = 0
    for name, info in table.items():
        dtype = "F32" if _is_widened(info) else info.dtype
        end = offset + _num_bytes(info, shapes[name])
        header[name] = {"dtype": dtype, "shape": list(shapes[name]), "data_offsets": [offset, end]}
        offset = end
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8)
    with file.open("wb") as out:
        out.write(struct.pack("<Q", len(raw)) + raw)
        begin = out.tell()
        out.truncate(begin + offset)
        for name in wanted:
            out.seek(begin + header[name]["data_offsets"][0])
            num_bytes = _num_bytes(table[name], shapes[name])
            if needs_conversion(table[name]):
                _copy_converted(GgufLines(name, table[name]), num_bytes, out)
            else:
                _copy(table[name], num_bytes, out)


def _copy_converted(lines: GgufLines, num_bytes: int, out: BinaryIO) -> None:
    """Copy the first lines of a tensor of a GGUF file, `num_bytes` in float32."""
    count = num_bytes // (4 * lines.width)
    step = max(1, _PIECE_BYTES // (4 * lines.width))
    for first in range(0, count, step):
        out.write(lines.read(first, min(step, count - first)).tobytes())


def _copy(info: TensorInfo, num_bytes: int, out: BinaryIO) -> None:
    """Copy the first `num_bytes` (as written) of a tensor, widening its values."""
    left = num_bytes // 2 if info.dtype in _WIDENED else num_bytes
    with on_disk(info.file).open("rb") as source:
        source.seek(info.start)
        while left:
            piece = source.read(min(left, _PIECE_BYTES))
            if not piece:
                raise ModelError(f"{info.file} is cut short")
            left -= len(piece)
            out.write(_widened(piece, info.dtype))


def _widened(piece: bytes, dtype: str) -> bytes:
    if dtype == "BF16":
        return (np.frombuffer(piece, "<u2").astype("<u4") << 16).tobytes()
    return np.frombuffer(piece, "<f2").astype("<f4").tobytes() if dtype == "F16" else piece


def _shrunk(config: Mapping[str, Any], rows: int | None) -> dict[str, Any]:
    """The config with small windows and vocabulary and in float32, also inside text_config."""
    small = dict(config)
    if (small.get("quantization_config") or {}).get("quant_method") == QUANT_METHOD:
        del small["quantization_config"]  # the excerpt is in float32
    for key in _WINDOWS:
        if isinstance(small.get(key), int) and small[key] > WINDOW:
            small[key] = WINDOW
    if rows is not None and isinstance(small.get("vocab_size"), int):
        small["vocab_size"] = rows
    for key in _SPECIAL_IDS:  # some libraries refuse an id past the end of the vocabulary
        if key in small:
            small[key] = None
    for key in ("torch_dtype", "dtype"):
        if key in small:
            small[key] = "float32"
    if isinstance(small.get("text_config"), dict):
        small["text_config"] = _shrunk(small["text_config"], rows)
    return small
