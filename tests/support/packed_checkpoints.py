"""Writes checkpoints as the tools for GPTQ, AWQ, compressed-tensors and FP8 do, each beside its dequantised twin.

Words are packed here one code at a time, as the tools describe their layouts, and not by the code that is tested.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from tests.support.checkpoints import TinyModel, write_checkpoint, write_json

Tensors = dict[str, np.ndarray]

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""The columns of eight whose codes a word has, from its lowest bits on."""


_DTYPES = {"float32": "F32", "float16": "F16", "int32": "I32", "int64": "I64", "int8": "I8", "uint8": "F8_E4M3"}
"""Names of dtypes in safetensors; bytes are E4M3 here."""

E4M3 = np.array(
    [(1 + m / 8) * 2.0 ** (e - 7) if e else m / 8 * 2.0**-6 for e in range(16) for m in range(8)][:127], np.float64
)
"""The values of the patterns 0 to 126; 127 is NaN, and those from 128 on are negative."""


@dataclass(frozen=True)
class PackedFormat:
    """A format: its quantization_config, and what makes the tensors of a module and its values of a weight."""

    config: dict[str, Any]
    pack: Callable[[np.ndarray, np.random.Generator], tuple[Tensors, np.ndarray]]


def words_along(codes: np.ndarray, bits: int, axis: int, order: tuple[int, ...] | None = None) -> np.ndarray:
    """int32 words of codes that follow each other along an axis."""
    moved = np.moveaxis(codes.astype(np.uint32), axis, -1)
    per_word = 32 // bits
    pad = -moved.shape[-1] % per_word
    moved = np.pad(moved, [(0, 0)] * (moved.ndim - 1) + [(0, pad)]).reshape(*moved.shape[:-1], -1, per_word)
    words = np.zeros(moved.shape[:-1], np.uint32)
    for place, column in enumerate(order or range(per_word)):
        words |= moved[..., column] << np.uint32(place * bits)
    return np.ascontiguousarray(np.moveaxis(words, -1, axis)).view(np.int32)


def grouped(
    weight: np.ndarray, bits: int, groups: np.ndarray, rng: np.random.Generator, *, symmetric: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(codes `[rows, columns]`, float16 scales and zero points `[rows, groups]`)."""
    rows, num_groups, top = len(weight), int(groups.max()) + 1, 2**bits - 1
    scales = np.empty((rows, num_groups), np.float16)
    zeros = np.full((rows, num_groups), 2 ** (bits - 1), np.int64)
    for group in range(num_groups):
        part = weight[:, groups == group]
        scales[:, group] = np.ptp(part, axis=1) / top + 1e-4
        if not symmetric:
            zeros[:, group] = np.clip(np.rint(-part.min(1) / scales[:, group]), 0, top)
    if not symmetric:
        zeros[0] = rng.choice([0, top], num_groups)  # the ends: a stored zero point of GPTQ is one less
    codes = np.clip(np.rint(weight / scales[:, groups].astype(np.float64)) + zeros[:, groups], 0, top)
    return codes.astype(np.int64), scales, zeros


def values_of(codes: np.ndarray, scales: np.ndarray, zeros: np.ndarray, groups: np.ndarray) -> np.ndarray:
    wide = (codes - zeros[:, groups]) * scales.astype(np.float64)[:, groups]
    return wide.astype(np.float32)


def group_of_columns(columns: int, size: int, rng: np.random.Generator, *, in_order: bool = True) -> np.ndarray:
    groups = np.arange(columns) // (columns if size == -1 else size)
    return groups if in_order else rng.permutation(groups)


def to_e4m3(values: np.ndarray) -> np.ndarray:
    """uint8: the nearest patterns."""
    places = np.searchsorted((E4M3[:-1] + E4M3[1:]) / 2, np.abs(values))
    return (places + 128 * (values < 0)).astype(np.uint8)


def save(tensors: Tensors, file: Path) -> None:
    """Write a safetensors file; the library for NumPy knows no 8-bit floats."""
    header, offset = {}, 0
    for name, array in tensors.items():
        end = offset + array.nbytes
        header[name] = {"dtype": _DTYPES[array.dtype.name], "shape": array.shape, "data_offsets": [offset, end]}
        offset = end
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8)
    with file.open("wb") as out:
        out.write(struct.pack("<Q", len(raw)) + raw)
        for array in tensors.values():
            out.write(np.ascontiguousarray(array).tobytes())


def gptq(bits: int = 4, size: int = 64, *, desc_act: bool = False, sym: bool = False, v2: bool = False) -> PackedFormat:
    def pack(weight: np.ndarray, rng: np.random.Generator) -> tuple[Tensors, np.ndarray]:
        groups = group_of_columns(weight.shape[1], size, rng, in_order=not desc_act)
        codes, scales, zeros = grouped(weight, bits, groups, rng, symmetric=sym)
        stored = (zeros - (0 if v2 else 1)) & (2**bits - 1)
        tensors = {
            "qweight": words_along(codes.T, bits, 0),
            "qzeros": words_along(stored.T, bits, 1),
            "scales": np.ascontiguousarray(scales.T),
            "g_idx": groups.astype(np.int32),
            "bias": np.zeros(len(weight), np.float16),
        }
        return tensors, values_of(codes, scales, zeros, groups)

    config = {"quant_method": "gptq", "bits": bits, "group_size": size, "desc_act": desc_act, "sym": sym}
    return PackedFormat({**config, **({"checkpoint_format": "gptq_v2"} if v2 else {})}, pack)


def awq(size: int = 64) -> PackedFormat:
    def pack(weight: np.ndarray, rng: np.random.Generator) -> tuple[Tensors, np.ndarray]:
        groups = group_of_columns(weight.shape[1], size, rng)
        codes, scales, zeros = grouped(weight, 4, groups, rng, symmetric=False)
        tensors = {
            "qweight": words_along(codes.T, 4, 1, AWQ_ORDER),
            "qzeros": words_along(zeros.T, 4, 1, AWQ_ORDER),
            "scales": np.ascontiguousarray(scales.T),
        }
        return tensors, values_of(codes, scales, zeros, groups)

    config = {"quant_method": "awq", "bits": 4, "group_size": size, "version": "gemm", "zero_point": True}
    return PackedFormat({**config, "modules_to_not_convert": None}, pack)


def _compressed(layout: str, weights: dict[str, Any], targets: list[str] | None = None) -> dict[str, Any]:
    group = {"targets": targets or ["Linear"], "weights": weights, "input_activations": None}
    return {"quant_method": "compressed-tensors", "format": layout, "ignore": ["lm_head"],
            "quantization_status": "compressed", "config_groups": {"group_0": group}}  # fmt: skip


def compressed_words(
    bits: int = 4, size: int = 64, *, symmetric: bool = True, in_order: bool = True, targets: list[str] | None = None
) -> PackedFormat:
    """`pack-quantized`. size -1: a scale a row."""

    def pack(weight: np.ndarray, rng: np.random.Generator) -> tuple[Tensors, np.ndarray]:
        groups = group_of_columns(weight.shape[1], size, rng, in_order=in_order)
        codes, scales, zeros = grouped(weight, bits, groups, rng, symmetric=symmetric)
        tensors = {
            "weight_packed": words_along(codes, bits, 1),
            "weight_scale": scales,
            "weight_shape": np.array(weight.shape, np.int64),
        }
        if not symmetric:
            tensors["weight_zero_point"] = words_along(zeros, bits, 0)
        if not in_order:
            tensors["weight_g_idx"] = groups.astype(np.int32)
        return tensors, values_of(codes, scales, zeros, groups)

    strategy = "channel" if size == -1 else "group"
    weights = {"num_bits": bits, "type": "int", "symmetric": symmetric, "strategy": strategy, "group_size": size}
    return PackedFormat(_compressed("pack-quantized", weights, targets), pack)


def compressed_int8(*, per_row: bool = True, symmetric: bool = True) -> PackedFormat:
    """`int-quantized`: int8 numbers, and a scale a row or one for all."""

    def pack(weight: np.ndarray, rng: np.random.Generator) -> tuple[Tensors, np.ndarray]:
        groups = np.zeros(weight.shape[1], np.int64)
        codes, scales, zeros = grouped(weight, 8, groups, rng, symmetric=symmetric)
        if not per_row:
            scales = np.full((1,), scales.max(), np.float16)
            codes = np.clip(np.rint(weight / float(scales[0])) + 128, 0, 255).astype(np.int64)
        tensors = {"weight": (codes - 128).astype(np.int8), "weight_scale": scales}
        if not symmetric:
            tensors["weight_zero_point"] = (zeros - 128).astype(np.int8)
        whole = scales if per_row else np.broadcast_to(scales, (len(weight), 1))
        return tensors, values_of(codes, whole, zeros, groups)

    weights = {"num_bits": 8, "type": "int", "symmetric": symmetric, "strategy": "channel" if per_row else "tensor"}
    return PackedFormat(_compressed("int-quantized", weights), pack)


def float8(
    block: tuple[int, int] | None = (128, 128), *, compressed: bool = False, per_row: bool = False
) -> PackedFormat:
    """FP8 with a scale a block, a row, or one for all; as DeepSeek and vLLM name them, or compressed-tensors."""

    def pack(weight: np.ndarray, rng: np.random.Generator) -> tuple[Tensors, np.ndarray]:
        rows, columns = weight.shape
        size = block or ((1, columns) if per_row else weight.shape)
        scales = np.zeros((-(-rows // size[0]), -(-columns // size[1])), np.float32)
        codes = np.zeros(weight.shape, np.uint8)
        values = np.zeros(weight.shape, np.float32)
        for i in range(scales.shape[0]):
            for j in range(scales.shape[1]):
                part = np.s_[i * size[0] : (i + 1) * size[0], j * size[1] : (j + 1) * size[1]]
                scales[i, j] = np.float32(np.abs(weight[part]).max() / 448 + 1e-6)
                codes[part] = to_e4m3(weight[part] / scales[i, j])
                signs = np.where(codes[part] >= 128, -1, 1)
                values[part] = signs * E4M3[codes[part] & 127] * scales[i, j]
        if block is not None:
            return {"weight": codes, "weight_scale_inv" if not compressed else "weight_scale": scales}, values
        stored = scales if per_row else scales.reshape(1)
        return {"weight": codes, "weight_scale": stored, "input_scale": np.ones(1, np.float32)}, values

    if compressed:
        weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"}
        weights["block_structure"] = list(block) if block else None
        return PackedFormat(_compressed("float-quantized", weights), pack)
    config: dict[str, Any] = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    return PackedFormat({**config, **({"weight_block_size": list(block)} if block else {})}, pack)


FORMATS: dict[str, PackedFormat] = {
    "gptq-4": gptq(),
    "gptq-4-symmetric": gptq(sym=True),
    "gptq-4-reordered": gptq(desc_act=True),
    "gptq-4-v2": gptq(v2=True, size=32),
    "gptq-4-rows": gptq(size=-1),
    "gptq-8": gptq(8, 128),
    "gptq-2": gptq(2),
    "awq": awq(),
    "awq-32": awq(32),
    "compressed-4": compressed_words(),
    "compressed-4-zeros": compressed_words(symmetric=False),
    "compressed-4-reordered": compressed_words(symmetric=False, in_order=False, size=32),
    "compressed-8": compressed_words(8, -1),
    "compressed-8-groups": compressed_words(8, 32, targets=["re:.*self_attn.*", "re:.*mlp.*"]),
    "int8-rows": compressed_int8(),
    "int8-zeros": compressed_int8(symmetric=False),
    "int8-one": compressed_int8(per_row=False),
    "fp8-blocks": float8(),
    "fp8-odd-blocks": float8((48, 80)),
    "fp8-one": float8(None),
    "fp8-rows": float8(None, compressed=True, per_row=True),
    "fp8-compressed-blocks": float8(compressed=True),
}
"""All layouts that are read."""


def write_packed(directory: Path, model: TinyModel, how: PackedFormat, seed: int = 5) -> tuple[Path, Path]:
    """A random checkpoint whose layers are quantised, and one of plain float32 with the same values; returns both."""
    plain = write_checkpoint(directory / "plain", model)
    packed = directory / "packed"
    packed.mkdir()
    rng = np.random.default_rng(seed)
    tensors: Tensors = {}
    values: Tensors = {}
    for name, tensor in load_file(plain / "model.safetensors").items():
        wide = tensor.astype(np.float32)
        module = name.removesuffix(".weight")
        if ".layers." not in name or tensor.ndim != 2:
            tensors[name] = values[name] = wide
            continue
        made, values[name] = how.pack(wide, rng)
        tensors |= {f"{module}.{leaf}": part for leaf, part in made.items() if f"{module}.{leaf}" not in tensors}
    config = json.loads((plain / "config.json").read_text())
    write_json(packed / "config.json", {**config, "quantization_config": how.config})
    save(tensors, packed / "model.safetensors")
    save(values, plain / "model.safetensors")
    for file in plain.iterdir():
        if not (packed / file.name).exists():
            (packed / file.name).write_bytes(file.read_bytes())
    return packed, plain
