"""Reads `quantization_config` of checkpoints that GPTQ, AWQ, compressed-tensors or FP8 tools have written. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from exo_mesh.errors import ModelError

METHODS = ("awq", "compressed-tensors", "fp8", "gptq")
"""Values of `quant_method` that are read here."""

GPTQ_BITS = (2, 4, 8)
AWQ_VERSIONS = ("gemm",)
PACKED_BITS = (4, 8)
FORMATS = ("pack-quantized", "int-quantized", "naive-quantized", "float-quantized", "mixed-precision")
"""Formats of compressed-tensors that are read; `dense` has no quantised weights."""

MAX_GROUPS = 1000
MAX_TARGETS = 100_000
MAX_PATTERN = 512


class WeightScheme(msgspec.Struct, frozen=True):
    """The weights of one config group of compressed-tensors. targets: names, `re:` patterns, or classes of modules."""

    targets: tuple[str, ...]
    bits: int
    block: tuple[int, int] | None


class PackedSettings(msgspec.Struct, frozen=True):
    """Settings of a checkpoint.

    bits: of GPTQ and AWQ. group_size, reorders, zero_offset: of GPTQ: columns that share a scale (-1 for all), whether
    they may be apart, and what is added to stored zero points. block: rows and columns that share a scale in FP8; None
    for one scale a tensor. schemes: of compressed-tensors.
    """

    file: Path
    method: str
    bits: int = 0
    group_size: int = -1
    reorders: bool = True
    zero_offset: int = 0
    block: tuple[int, int] | None = None
    schemes: tuple[WeightScheme, ...] = ()

    def scheme_of(self, module: str) -> WeightScheme:
        """The scheme of a module: a scheme for its name wins over a scheme for its class. Raises ModelError."""
        by_class = None
        for scheme in self.schemes:
            for target in scheme.targets:
                if target == module or (target.startswith("re:") and re.match(target[3:], module)):
                    return scheme
                if by_class is None and not target.startswith("re:") and "." not in target:
                    by_class = scheme
        if by_class is None:
            raise ModelError(f"{self.file}: no config group of quantization_config has {module} among its targets")
        return by_class


def packed_settings_of(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The `quantization_config` of a config.json, if its method is one of METHODS."""
    text = config.get("text_config")
    found = config.get("quantization_config") or (text.get("quantization_config") if isinstance(text, dict) else None)
    if not isinstance(found, dict) or config.get("quantization") or found.get("quant_method") not in METHODS:
        return None
    return found


def _object(file: Path, found: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """The object under a key; empty if there is none. Raises ModelError."""
    value = found.get(key) or {}
    if not isinstance(value, dict):
        raise _refusal(file, key, value, "an object")
    return value


def read_packed_settings(file: Path, config: Mapping[str, Any]) -> PackedSettings | None:
    """The settings in a config.json; None if its weights are plain, or in a format that is not of this package. Raises
    ModelError naming the file and the key that is not supported."""
    found = packed_settings_of(config)
    if found is None:
        return None
    method = found["quant_method"]
    read = {"gptq": _gptq, "awq": _awq, "compressed-tensors": _compressed, "fp8": _fp8}[method]
    return read(file, found)


def _refusal(file: Path, key: str, value: Any, known: object) -> ModelError:
    shown = json.dumps(value, default=str)[:100]
    return ModelError(f"{file}: quantization_config.{key} {shown} is not supported; supported: {known}")


def _gptq(file: Path, found: Mapping[str, Any]) -> PackedSettings:
    bits, layout = found.get("bits"), found.get("checkpoint_format", "gptq")
    if not isinstance(bits, int) or bits not in GPTQ_BITS:
        raise _refusal(file, "bits", bits, ", ".join(map(str, GPTQ_BITS)))
    if layout not in ("gptq", "gptq_v2"):
        raise _refusal(file, "checkpoint_format", layout, "gptq, gptq_v2")
    for rule, own in _object(file, found, "dynamic").items():
        if isinstance(own, dict) and own.get("bits", bits) != bits:
            raise _refusal(file, f"dynamic.{rule}.bits", own["bits"], f"{bits}, as for all modules")
    size = found.get("group_size", -1)
    if not isinstance(size, int) or (size != -1 and not 8 <= size <= 2**20):
        raise _refusal(file, "group_size", size, "-1, and numbers from 8 to 1048576")
    reorders = found.get("desc_act", True) is not False
    return PackedSettings(file, "gptq", bits, size, reorders, zero_offset=1 if layout == "gptq" else 0)


def _awq(file: Path, found: Mapping[str, Any]) -> PackedSettings:
    bits, version = found.get("bits", found.get("w_bit")), str(found.get("version", "gemm")).lower()
    if bits != 4:
        raise _refusal(file, "bits", bits, 4)
    if version not in AWQ_VERSIONS:
        raise _refusal(file, "version", version, ", ".join(AWQ_VERSIONS))
    return PackedSettings(file, "awq", 4)


def _fp8(file: Path, found: Mapping[str, Any]) -> PackedSettings:
    layout = found.get("fmt", "e4m3")
    if layout not in ("e4m3", "float8_e4m3fn"):
        raise _refusal(file, "fmt", layout, "e4m3")
    return PackedSettings(file, "fp8", 8, block=_block(file, "weight_block_size", found.get("weight_block_size")))


def _compressed(file: Path, found: Mapping[str, Any]) -> PackedSettings:
    layout = found.get("format", "dense")
    groups = _object(file, found, "config_groups")
    if len(groups) > MAX_GROUPS:
        raise _refusal(file, "config_groups", len(groups), f"at most {MAX_GROUPS} groups")
    sparsity = _object(file, found, "sparsity_config").get("format", "dense")
    if sparsity != "dense":
        raise _refusal(file, "sparsity_config.format", sparsity, "dense")
    if layout not in FORMATS and groups:
        raise _refusal(file, "format", layout, ", ".join(FORMATS))
    return PackedSettings(file, "compressed-tensors", schemes=tuple(_schemes(file, groups)))


def _schemes(file: Path, groups: Mapping[str, Any]) -> Iterator[WeightScheme]:
    for name, group in groups.items():
        where = f"config_groups.{name}"
        weights = group.get("weights") if isinstance(group, dict) else None
        if not isinstance(weights, dict):
            continue  # only activations
        layout, kind = group.get("format"), weights.get("type", "int")
        bits: Any = weights.get("num_bits")
        if layout is not None and layout not in FORMATS:
            raise _refusal(file, f"{where}.format", layout, ", ".join(FORMATS))
        known = isinstance(bits, int) and ((kind, bits) == ("float", 8) or (kind == "int" and bits in PACKED_BITS))
        if not known:
            raise _refusal(file, f"{where}.weights", f"{kind}{bits}", "int4, int8, float8")
        targets = group.get("targets") or ["Linear"]
        if not isinstance(targets, list) or len(targets) > MAX_TARGETS:
            raise _refusal(file, f"{where}.targets", type(targets).__name__, f"a list of at most {MAX_TARGETS}")
        for target in targets:
            _check_target(file, where, target)
        block = _block(file, f"{where}.weights.block_structure", weights.get("block_structure"))
        yield WeightScheme(tuple(targets), bits, block)


def _check_target(file: Path, where: str, target: Any) -> None:
    """A pattern comes from a stranger: it is short, and has nothing that takes exponential time."""
    if not isinstance(target, str) or len(target) > MAX_PATTERN:
        raise _refusal(file, f"{where}.targets", target, f"texts of at most {MAX_PATTERN} characters")
    if not target.startswith("re:"):
        return
    pattern = target[3:]
    if re.search(r"[*+}?]\)*[*+{]|\\[1-9]|\)[*+{]", pattern) or len(re.findall(r"[*+]|\{", pattern)) > 4:
        raise _refusal(file, f"{where}.targets", target, "patterns with at most 4 repetitions, none of them nested")
    try:
        re.compile(pattern)
    except re.error as exc:
        raise _refusal(file, f"{where}.targets", target, "valid patterns") from exc


def _block(file: Path, key: str, value: Any) -> tuple[int, int] | None:
    if value is None:
        return None
    sizes = value.lower().split("x") if isinstance(value, str) else value
    try:
        rows, columns = (int(size) for size in sizes)
    except (TypeError, ValueError) as exc:
        raise _refusal(file, key, value, "two numbers") from exc
    if not 1 <= rows <= 2**20 or not 1 <= columns <= 2**20:
        raise _refusal(file, key, value, "two numbers from 1 to 1048576")
    return rows, columns
