"""Converts weights in MLX's quantised formats to plain tensors: the very bits of `mx.dequantize`.

Each row of uint32 words is one little-endian stream of codes. affine: `scale * code + bias` per group, in the scales'
dtype. mxfp4, nvfp4: codes are 4-bit floats (E2M1); mxfp8: 8-bit floats (E4M3). Their scales are bytes: a power of two
(mx…), or E4M3 (nv…).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch

from exo_mesh.errors import ModelError
from exo_mesh.weights.gguf import QUANT_METHOD
from exo_mesh.weights.packed.tensors import is_packed_config

AFFINE_BITS = (2, 3, 4, 5, 6, 8)
_FLOAT_MODES = {"mxfp4": (4, 32), "mxfp8": (8, 32), "nvfp4": (4, 16)}
"""(bits, group size); these are fixed."""

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
_SETTINGS = ("group_size", "bits", "mode")


class TorchPacking(msgspec.Struct, frozen=True):
    """The quantisation of one tensor."""

    mode: str
    bits: int
    group_size: int


class Quantisation(msgspec.Struct, frozen=True):
    """The settings in config.json: the packing of all modules except those with an entry of their own, under MLX's
    names."""

    default: TorchPacking
    modules: Mapping[str, TorchPacking]

    def of(self, module: str) -> TorchPacking:
        return self.modules.get(module, self.default)


def read_quantisation(file: Path, config: Mapping[str, Any]) -> Quantisation | None:
    """The settings, or None for a checkpoint of plain weights. Raises ModelError naming the file and the unknown
    key."""
    key = "quantization" if config.get("quantization") else "quantization_config"
    settings = config.get(key) or (config.get("text_config") or {}).get(key)
    if not settings:
        return None
    if not isinstance(settings, dict):
        raise ModelError(f"{file}: {key} is not an object")
    if settings.get("quant_method") == QUANT_METHOD:
        return None  # each tensor of a GGUF file has its own type
    if is_packed_config(config):
        return None  # the table of tensors says what is quantised
    if "bits" not in settings or "quant_method" in settings:
        method = settings.get("quant_method")
        raise ModelError(
            f"{file}: {key}.quant_method {json.dumps(method)} is not supported; MLX's formats, GGUF, AWQ, "
            "GPTQ, compressed-tensors, FP8 and plain weights are"
        )
    default = _packing(file, key, settings)
    own = {name: value for name, value in settings.items() if isinstance(value, dict)}
    return Quantisation(default, {name: _packing(file, f"{key}.{name}", value) for name, value in own.items()})


def _packing(file: Path, key: str, settings: Mapping[str, Any]) -> TorchPacking:
    mode = settings.get("mode", "affine")
    bits, group_size = settings.get("bits"), settings.get("group_size")
    if mode in _FLOAT_MODES:
        fixed = _FLOAT_MODES[mode]
        if (bits or fixed[0], group_size or fixed[1]) != fixed:
            raise ModelError(
                f"{file}: {key} has {bits} bits in groups of {group_size}; "
                f"{mode} has {fixed[0]} in groups of {fixed[1]}"
            )
        return TorchPacking(mode, *fixed)
    if mode != "affine":
        known = ", ".join(["affine", *_FLOAT_MODES])
        raise ModelError(f"{file}: {key}.mode {json.dumps(mode)} is not supported; known: {known}")
    if bits not in AFFINE_BITS or not isinstance(group_size, int) or group_size < 8:
        raise ModelError(
            f"{file}: {key} has {json.dumps(bits)} bits in groups of {json.dumps(group_size)}; "
            f"known bits: {json.dumps(AFFINE_BITS)}"
        )
    return TorchPacking(mode, bits, group_size)


def dequantise(
    words: torch.Tensor, scales: torch.Tensor, biases: torch.Tensor | None, packing: TorchPacking
) -> torch.Tensor:
    """Plain weights. words uint8 `[rows, 4 * words]`, scales and biases `[rows, groups]` ->
    `[rows, groups * group_size]`, in the scales' dtype if affine, else bfloat16, as in MLX."""
    codes = unpack(words, packing.bits).reshape(*scales.shape, packing.group_size)
    if packing.mode == "affine":
        assert biases is not None, "affine weights have biases"
        values = codes.to(scales.dtype) * scales.unsqueeze(-1) + biases.unsqueeze(-1)
    else:
        table = torch.tensor(_E2M1) if packing.bits == 4 else None
        numbers = table[codes.long()] if table is not None else codes.view(torch.float8_e4m3fn).float()
        values = (numbers * _float_scales(scales, packing.mode).unsqueeze(-1)).to(torch.bfloat16)
    return values.reshape(*scales.shape[:-1], -1)


def unpack(words: torch.Tensor, bits: int) -> torch.Tensor:
    """uint8 `[…, bytes]` -> uint8 codes `[…, bytes * 8 / bits]`."""
    if bits == 8:
        return words
    if bits in (2, 4):
        shifts = torch.arange(0, 8, bits, dtype=torch.uint8)
        return ((words.unsqueeze(-1) >> shifts) & (2**bits - 1)).flatten(-2)
    # eight codes fill `bits` bytes
    parts = words.unflatten(-1, (-1, bits)).to(torch.int64)
    whole = (parts << torch.arange(0, 8 * bits, 8)).sum(-1, keepdim=True)
    return ((whole >> torch.arange(0, 8 * bits, bits)) & (2**bits - 1)).to(torch.uint8).flatten(-2)


def _float_scales(scales: torch.Tensor, mode: str) -> torch.Tensor:
    if mode == "nvfp4":
        return scales.view(torch.float8_e4m3fn).float()
    return torch.ldexp(torch.ones(scales.shape), scales.to(torch.int32) - 127)


def check_shapes(
    name: str, file: Path, words: tuple[int, ...], scales: tuple[int, ...], packing: TorchPacking
) -> tuple[int, ...]:
    """The shape of the plain weight. Raises ModelError naming file and tensor if packing and shapes disagree."""
    width = scales[-1] * packing.group_size if scales else 0
    if len(words) != len(scales) or words[:-1] != scales[:-1] or words[-1] * 32 != width * packing.bits:
        raise ModelError(
            f"{file}: {name} {list(words)} with scales {list(scales)} is not {packing.bits} bits in groups of "
            f"{packing.group_size}"
        )
    return (*words[:-1], width)
