"""Converts the four quantised formats of MLX to float32.

Each row of `weight` (uint32 words) is one little-endian stream of bits: value i is bits `[i * b, (i + 1) * b)`. affine:
scale * value + bias per group. mxfp4 and nvfp4: 4-bit floats E2M1. mxfp8: 8-bit floats E4M3. Scales of mx formats are
powers of two (E8M0), those of nvfp4 are E4M3. (OCP Microscaling Formats v1.0)
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from exo_mesh.errors import ModelError

PACKED_DTYPE = "U32"
AFFINE_BITS = (1, 2, 3, 4, 5, 6, 8)
AFFINE_GROUPS = (16, 32, 64, 128)

_FLOAT_FORMATS = {"mxfp4": (4, 32), "mxfp8": (8, 32), "nvfp4": (4, 16)}
"""The only (bits, group size) of each mode."""

MODES = ("affine", *_FLOAT_FORMATS)


class NumpyPacking(msgspec.Struct, frozen=True):
    """The quantisation of a matrix, along its last axis."""

    mode: str
    bits: int
    group_size: int


def scale_dtype(mode: str) -> tuple[str, ...]:
    """The dtypes in which scales of a mode are stored, by their safetensors names."""
    return ("F32", "F16", "BF16") if mode == "affine" else ("U8",)


def read_packing(config_file: Path, settings: Mapping[str, Any], module: str) -> NumpyPacking:
    """The settings of a module: its own override the model's. Raises ModelError naming file, module and key."""
    own = settings.get(module, {})
    merged = {**settings, **own} if isinstance(own, dict) else settings
    mode = merged.get("mode", "affine")
    where = f"{config_file}: quantization of {module}"
    if mode not in MODES:
        raise ModelError(f"{where}: mode {json.dumps(mode)} is not supported; known: {', '.join(MODES)}")
    bits, group_size = merged.get("bits"), merged.get("group_size")
    known = mode == "affine" and bits in AFFINE_BITS and group_size in AFFINE_GROUPS
    if not known and _FLOAT_FORMATS.get(mode) != (bits, group_size):
        raise ModelError(
            f"{where}: {mode} with bits={json.dumps(bits)} and group_size={json.dumps(group_size)} is not supported"
        )
    return NumpyPacking(mode, int(bits), int(group_size))  # type: ignore[arg-type]


def dequantise(
    words: np.ndarray, scales: np.ndarray, biases: np.ndarray | None, packing: NumpyPacking, out: np.ndarray
) -> None:
    """uint32 words `[rows, columns * bits / 32]` into float32 `out`, C-contiguous `[rows, columns]`.

    scales and biases are `[rows, columns / group_size]`: float32 for affine, else bytes.
    """
    rows, columns = out.shape
    values = unpack(words, packing.bits)
    groups = out.reshape(rows, columns // packing.group_size, packing.group_size)
    packed = values.reshape(groups.shape)
    if packing.mode == "affine":
        assert biases is not None
        np.multiply(packed, scales[..., None], out=groups)
        groups += biases[..., None]
        return
    table = FLOAT8_E4M3 if packing.bits == 8 else FLOAT4_E2M1
    factors = FLOAT8_E4M3[scales] if packing.mode == "nvfp4" else FLOAT8_E8M0[scales]
    np.multiply(table[packed], factors[..., None], out=groups)


def unpack(words: np.ndarray, bits: int) -> np.ndarray:
    """uint8 values `[rows, n]` of uint32 words `[rows, n * bits / 32]`, n a multiple of 8."""
    rows = len(words)
    # eight values fill exactly `bits` bytes, whatever `bits` is
    streams = words.view(np.uint8).reshape(rows, -1, bits)
    eight = np.zeros(streams.shape[:2], np.uint64)
    for byte in range(bits):
        eight |= streams[..., byte].astype(np.uint64) << np.uint64(8 * byte)
    values = np.empty((*eight.shape, 8), np.uint8)
    mask = np.uint64((1 << bits) - 1)
    for index in range(8):
        values[..., index] = (eight >> np.uint64(index * bits)) & mask
    return values.reshape(rows, -1)


def _float_table(exponent_bits: int, mantissa_bits: int, bias: int) -> np.ndarray:
    """float32 value of every bit pattern (sign, exponent, mantissa), without infinities."""
    codes = np.arange(2 ** (1 + exponent_bits + mantissa_bits))
    exponent = (codes >> mantissa_bits) & (2**exponent_bits - 1)
    fraction = (codes & (2**mantissa_bits - 1)) / 2**mantissa_bits
    magnitude = np.where(exponent == 0, fraction * 2.0 ** (1 - bias), (1 + fraction) * 2.0 ** (exponent - bias))
    sign = np.where(codes >> (exponent_bits + mantissa_bits), -1.0, 1.0)
    table: np.ndarray = (sign * magnitude).astype(np.float32)
    return table


FLOAT4_E2M1 = _float_table(2, 1, 1)
FLOAT8_E4M3 = _float_table(4, 3, 7)
FLOAT8_E4M3[[0x7F, 0xFF]] = np.nan
FLOAT8_E8M0 = np.append(2.0 ** (np.arange(255.0) - 127), np.nan).astype(np.float32)
"""255 powers of two, and NaN."""
