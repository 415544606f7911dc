"""Finds the quantised weights of a checkpoint by the names of their parts; each gets the name of a plain weight."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from exo_mesh.errors import ModelError
from exo_mesh.weights.packed.settings import PackedSettings, WeightScheme, packed_settings_of, read_packed_settings
from exo_mesh.weights.safetensors import TensorInfo, TensorTable

SCALE_DTYPES = ("F32", "F16", "BF16")
WORD_DTYPES = ("I32", "U32")
_PLAIN, _SCALES = ".weight", ("weight_scale", "weight_scale_inv")
_LARGEST_GROUPS = (256, 128, 64, 32)
"""Columns for which a scale is repeated if it is one for whole rows; engines take groups of these sizes."""

_UNUSED = ("k_scale", "v_scale", "q_scale", "kv_scale", "k_zero_point", "v_zero_point")
"""Scales of activations and caches: both stay unquantised here."""
_UNUSED_OF_MODULES = ("input_scale", "input_zero_point", "input_global_scale", "output_scale", "weight_shape")


class PackedTensor(TensorInfo, frozen=True):
    """A quantised weight `[rows, columns]`. shape: of the dequantised weight; all other fields describe its codes.

    layout: gptq, awq, words (rows of packed words), int8 or float8. scales, zeros, group_index: its other tensors.
    reorders: whether config.json says that columns of a group are apart. zero_offset: added to zero points as they are
    stored. group_size: columns that share a scale. block: rows and columns that share one, for float8.
    """

    layout: str
    bits: int
    group_size: int
    scales: TensorInfo
    zeros: TensorInfo | None = None
    group_index: TensorInfo | None = None
    reorders: bool = False
    zero_offset: int = 0
    block: tuple[int, int] | None = None


def is_packed_config(config: Mapping[str, Any]) -> bool:
    """Whether config.json names a quantisation whose weights `read_packed_table` finds."""
    return packed_settings_of(config) is not None


def read_packed_table(config_file: Path, config: Mapping[str, Any], table: TensorTable) -> TensorTable:
    """The table with a PackedTensor `module.weight` in place of the tensors of each quantised module; the table itself
    if the config names no quantisation of this package. Raises ModelError naming file and key or tensor."""
    settings = read_packed_settings(config_file, config)
    if settings is None:
        return table
    found: TensorTable = {}
    used: set[str] = set()
    for name, info in table.items():
        for suffix, make in _MAKERS[settings.method]:
            module = name.removesuffix(suffix)
            if module == name or (suffix == _PLAIN and not any(f"{module}.{leaf}" in table for leaf in _SCALES)):
                continue
            if 0 in info.shape:
                raise ModelError(f"{info.file}: {name} {list(info.shape)} is empty")
            parts = _Parts(module, table, settings)
            found[f"{module}.weight"] = make(parts, info)
            used |= parts.used | {name} | {f"{module}.{leaf}" for leaf in _UNUSED_OF_MODULES}
    rest = {name: info for name, info in table.items() if name not in used and not name.endswith(_UNUSED)}
    _refuse_words(rest)
    return rest | found


def is_spare_bias(name: str, table: TensorTable) -> bool:
    """Whether a tensor may be the bias of a layer that has none: tools for GPTQ write zeros for it."""
    weight = table.get(f"{name.removesuffix('.bias')}.weight")
    return name.endswith(".bias") and isinstance(weight, PackedTensor) and weight.layout == "gptq"


def _refuse_words(rest: TensorTable) -> None:
    """Raises ModelError for a part of a quantised weight without the others."""
    for name, info in rest.items():
        if name.endswith((".qweight", ".qzeros", ".weight_packed")) or info.dtype.startswith("F8"):
            raise ModelError(f"{info.file}: {name} {info.dtype}{list(info.shape)} has no scales that fit")


class _Parts:
    """The tensors of one module; `used` has the names of the requested ones."""

    def __init__(self, module: str, table: TensorTable, settings: PackedSettings) -> None:
        self.module, self.settings, self.used = module, settings, set[str]()
        self._table = table

    def get(self, leaf: str) -> TensorInfo | None:
        self.used.add(f"{self.module}.{leaf}")
        return self._table.get(f"{self.module}.{leaf}")

    def require(self, leaf: str, dtypes: tuple[str, ...], beside: TensorInfo) -> TensorInfo:
        info = self.get(leaf)
        if info is None:
            raise ModelError(f"{beside.file}: {self.module}.{leaf} is missing")
        if info.dtype not in dtypes:
            raise ModelError(f"{info.file}: {self.module}.{leaf} is {info.dtype}; known: {', '.join(dtypes)}")
        return info

    def check(self, leaf: str, info: TensorInfo, dtypes: tuple[str, ...], shape: tuple[int, ...]) -> None:
        """Raises ModelError naming file and tensor."""
        if info.dtype not in dtypes or info.shape != shape:
            raise ModelError(
                f"{info.file}: {self.module}.{leaf} is {info.dtype}{list(info.shape)}; "
                f"{self.settings.method} has {' or '.join(dtypes)}{list(shape)} there"
            )


def _gptq(parts: _Parts, words: TensorInfo) -> PackedTensor:
    bits = parts.settings.bits
    if words.dtype not in WORD_DTYPES or len(words.shape) != 2:
        parts.check("qweight", words, WORD_DTYPES, (0, 0))
    columns, rows = words.shape[0] * 32 // bits, words.shape[1]
    scales = parts.require("scales", SCALE_DTYPES, words)
    group_size = parts.settings.group_size if parts.settings.group_size > 0 else columns
    groups = -(-columns // group_size)  # the last one may be shorter
    parts.check("scales", scales, SCALE_DTYPES, (groups, rows))
    zeros = parts.require("qzeros", WORD_DTYPES, words)
    parts.check("qzeros", zeros, WORD_DTYPES, (groups, rows * bits // 32))
    index = parts.get("g_idx")
    if index is not None:
        parts.check("g_idx", index, WORD_DTYPES, (columns,))
    return _made(parts, words, "gptq", (rows, columns), bits, group_size, scales, zeros, index)


def _awq(parts: _Parts, words: TensorInfo) -> PackedTensor:
    if words.dtype not in WORD_DTYPES or len(words.shape) != 2:
        parts.check("qweight", words, WORD_DTYPES, (0, 0))
    columns, rows = words.shape[0], words.shape[1] * 8
    scales = parts.require("scales", SCALE_DTYPES, words)
    group_size = _group_size(parts, "scales", scales, columns, scales.shape[0] if scales.shape else 0)
    parts.check("scales", scales, SCALE_DTYPES, (columns // group_size, rows))
    zeros = parts.require("qzeros", WORD_DTYPES, words)
    parts.check("qzeros", zeros, WORD_DTYPES, (columns // group_size, rows // 8))
    return _made(parts, words, "awq", (rows, columns), 4, group_size, scales, zeros, None)


def _words(parts: _Parts, words: TensorInfo) -> PackedTensor:
    bits = parts.settings.scheme_of(parts.module).bits
    if words.dtype not in WORD_DTYPES or len(words.shape) != 2:
        parts.check("weight_packed", words, WORD_DTYPES, (0, 0))
    rows, columns = words.shape[0], words.shape[1] * 32 // bits
    scales, group_size = _row_scales(parts, words, rows, columns)
    zeros, index = parts.get("weight_zero_point"), parts.get("weight_g_idx")
    if zeros is not None:
        parts.check("weight_zero_point", zeros, WORD_DTYPES, (-(-rows * bits // 32), columns // group_size))
    if index is not None:
        parts.check("weight_g_idx", index, ("I32", "I64"), (columns,))
    return _made(parts, words, "words", (rows, columns), bits, group_size, scales, zeros, index)


def _small_numbers(parts: _Parts, weight: TensorInfo) -> PackedTensor:
    """Weights of one byte: int8, or E4M3."""
    if weight.dtype not in ("I8", "F8_E4M3") or len(weight.shape) != 2:
        raise ModelError(
            f"{weight.file}: {parts.module}.weight {weight.dtype}{list(weight.shape)} has scales; matrices of I8 and "
            "F8_E4M3 are read"
        )
    rows, columns = weight.shape
    if weight.dtype == "I8":
        scales, group_size = _row_scales(parts, weight, rows, columns)
        zeros = parts.get("weight_zero_point")
        if zeros is not None:
            parts.check("weight_zero_point", zeros, ("I8",), (rows, columns // group_size))
        return _made(parts, weight, "int8", (rows, columns), 8, group_size, scales, zeros, None)
    inverse = parts.get("weight_scale_inv")
    scales = inverse if inverse is not None else parts.require("weight_scale", SCALE_DTYPES, weight)
    block = _block(parts, scales, rows, columns)
    return _made(parts, weight, "float8", (rows, columns), 0, columns, scales, None, None, block)


def _block(parts: _Parts, scales: TensorInfo, rows: int, columns: int) -> tuple[int, int] | None:
    """Rows and columns that share a scale. Raises ModelError."""
    count = 1
    for size in scales.shape:
        count *= size
    scheme: WeightScheme | PackedSettings = parts.settings
    if parts.settings.method == "compressed-tensors":
        scheme = parts.settings.scheme_of(parts.module)
    for block in (scheme.block, (rows, columns), (1, columns)):
        fits = block is not None and count == -(-rows // block[0]) * -(-columns // block[1])
        if fits and scales.dtype in SCALE_DTYPES:
            return block
    raise ModelError(
        f"{scales.file}: the scales {scales.dtype}{list(scales.shape)} of {parts.module} do not fit weights of "
        f"{[rows, columns]} in blocks of {list(scheme.block) if scheme.block else 'rows, or one for all'}"
    )


def _row_scales(parts: _Parts, codes: TensorInfo, rows: int, columns: int) -> tuple[TensorInfo, int]:
    """(scales, columns that share one): per group, per row, or one for all."""
    scales = parts.require("weight_scale", SCALE_DTYPES, codes)
    if scales.shape in ((), (1,)):
        return scales, columns
    shape = scales.shape if len(scales.shape) == 2 else (*scales.shape, 1)
    group_size = _group_size(parts, "weight_scale", scales, columns, shape[1])
    if shape[0] != rows:
        parts.check("weight_scale", scales, SCALE_DTYPES, (rows, columns // group_size))
    return scales, group_size


def _group_size(parts: _Parts, leaf: str, scales: TensorInfo, columns: int, groups: int) -> int:
    if not groups or columns % groups:
        raise ModelError(
            f"{scales.file}: {parts.module}.{leaf} {list(scales.shape)} does not divide {columns} columns into groups"
        )
    return columns // groups


def _made(
    parts: _Parts,
    codes: TensorInfo,
    layout: str,
    shape: tuple[int, int],
    bits: int,
    group_size: int,
    scales: TensorInfo,
    zeros: TensorInfo | None,
    index: TensorInfo | None,
    block: tuple[int, int] | None = None,
) -> PackedTensor:
    return PackedTensor(
        file=codes.file, dtype=codes.dtype, shape=shape, start=codes.start, stop=codes.stop, layout=layout, bits=bits,
        group_size=group_size, scales=scales, zeros=zeros, group_index=index,
        reorders=index is not None and parts.settings.reorders, zero_offset=parts.settings.zero_offset,
        block=block,
    )  # fmt: skip


def shared_columns(tensor: PackedTensor) -> int:
    """Columns of a group as engines are given it: of the largest usual size if a scale is for more columns."""
    whole = tensor.group_size
    return next((size for size in _LARGEST_GROUPS if whole > size and whole % size == 0), whole)


_Maker = Callable[[_Parts, TensorInfo], PackedTensor]


_MAKERS: Mapping[str, tuple[tuple[str, _Maker], ...]] = {
    "gptq": ((".qweight", _gptq),),
    "awq": ((".qweight", _awq),),
    "compressed-tensors": ((".weight_packed", _words), (_PLAIN, _small_numbers)),
    "fp8": ((_PLAIN, _small_numbers),),
}
"""{method: (name ending of the tensor with a module's codes, what makes its tensor)}."""
