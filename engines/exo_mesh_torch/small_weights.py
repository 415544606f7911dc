"""Keeps the quantised weights of linear layers and embeddings as codes, in place of plain weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from exo_mesh.errors import InputError
from exo_mesh_torch import int4
from exo_mesh_torch.byte_matrices import Float8Matrix, RowMatrix, float8_bytes, row_matrix_bytes
from exo_mesh_torch.names import NameMap, Recipe
from exo_mesh_torch.sources import CHUNK_BYTES, Coded, TensorSource

Matrix = int4.CodeMatrix | RowMatrix | Float8Matrix

_MODULES = (nn.Linear, nn.Embedding)


def wants_small_weights(options: Mapping[str, str], device: torch.device) -> bool:
    """Option `quantised`: on (if torch has a fast kernel: on x86-64 with AVX2) or off, the default. Raises
    InputError."""
    wanted = options.get("quantised", "off")
    if wanted == "on" and (device.type != "cpu" or not int4.can_multiply()):
        raise InputError(
            f"option quantised=on: torch has no fast kernel for 4-bit weights on {device.type} of this machine",
            param="quantised",
        )
    return wanted == "on"


def small_bytes(names: NameMap, model: nn.Module, aliases: Mapping[str, Sequence[str]]) -> dict[str, int]:
    """Bytes of each parameter that is kept as codes, under all its names."""
    sizes: dict[str, int] = {}
    for recipe in names.recipes.values():
        source = coded_source(recipe)
        targets = aliases.get(recipe.target, (recipe.target,))
        if source is not None and _fits(source, _owners(model, targets)):
            sizes |= dict.fromkeys(targets, _held_bytes(source))
    return sizes


def coded_source(recipe: Recipe) -> Coded | None:
    """The source of a parameter that is a quantised tensor as it is in the files."""
    source: TensorSource | None = recipe.sources[-1][0] if recipe.sources and recipe.converter is None else None
    return source if isinstance(source, Coded) else None


class SmallWeights:
    """The weights of a stage that are kept as codes. The modules' own weights are None, so that code which uses them
    directly, and not by calling the module, fails."""

    def __init__(self) -> None:
        self._matrices: list[Matrix] = []

    @property
    def num_bytes(self) -> int:
        return sum(matrix.num_bytes for matrix in self._matrices)

    def put(self, model: nn.Module, targets: Sequence[str], source: Coded, *, is_first: bool) -> list[nn.Module]:
        """Read a tensor into the modules that share it, and return these modules; none if they need plain weights.
        is_first: of the stage; another stage does not look up embeddings. Raises ModelError."""
        modules = _owners(model, targets)
        if not _fits(source, modules):
            return []
        matrix = read_matrix(source)
        self._matrices.append(matrix)
        for module in modules:
            if isinstance(module, nn.Linear):
                module.forward = _SmallLinear(module, matrix)
            elif is_first:
                module.forward = _SmallEmbedding(matrix, module.weight.dtype)
            else:
                continue
            module.register_parameter("weight", None)
        return modules


def read_matrix(source: Coded) -> Matrix:
    """The matrix of a tensor. Raises ModelError naming file and tensor."""
    rows, columns = source.shape
    packed = source.packed
    parts = _chunks(rows, columns)
    if packed is not None and packed.is_float8:
        floats = Float8Matrix(rows, columns, torch.from_numpy(packed.float8_scales()), packed.block)
        for first, count in parts:
            floats.fill(first, torch.from_numpy(packed.float8_codes(first, count)))
        return floats
    if _has_row_scales(source):
        whole = RowMatrix(rows, columns)
        for first, count in parts:
            codes, scales, biases = source.codes(first, count)
            whole.fill(first, codes, scales[:, 0], biases[:, 0])
        return whole
    order = packed.column_order() if packed is not None else None
    in_order = None if order is None else torch.from_numpy(order)
    matrix = int4.CodeMatrix(rows, columns, source.bits, source.group_size, in_order)
    for first, count in parts:
        matrix.fill(first, *source.codes(first, count))
    return matrix


def _chunks(rows: int, columns: int) -> Iterator[tuple[int, int]]:
    """(first row, number of rows) of parts that are read at once."""
    step = max(1, CHUNK_BYTES // (8 * columns * 64)) * 64
    for first in range(0, rows, step):
        yield first, min(step, rows - first)


def _held_bytes(source: Coded) -> int:
    """Bytes of the matrix that `read_matrix` makes, at most."""
    rows, columns = source.shape
    packed = source.packed
    if packed is not None and packed.is_float8:
        return float8_bytes(rows, columns, packed.block)
    if _has_row_scales(source):
        return row_matrix_bytes(rows, columns)
    has_order = packed is not None and packed.may_reorder
    return int4.held_bytes(rows, columns, source.bits, source.group_size, has_order=has_order)


def _has_row_scales(source: Coded) -> bool:
    return source.bits == 8 and source.packed is not None and source.packed.has_row_scales


class _SmallLinear:
    """The forward of a linear layer: `[…, in]` -> `[…, out]`."""

    __slots__ = ("_linear", "_matrix")

    def __init__(self, linear: nn.Linear, matrix: Matrix) -> None:
        self._linear, self._matrix = linear, matrix

    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        result = self._matrix.multiply(states.reshape(-1, self._matrix.columns))
        if self._linear.bias is not None:
            result = result + self._linear.bias
        return result.reshape(*states.shape[:-1], self._matrix.rows)


class _SmallEmbedding:
    """The forward of an embedding: ids `[…]` -> `[…, columns]`."""

    __slots__ = ("_dtype", "_matrix")

    def __init__(self, matrix: Matrix, dtype: torch.dtype) -> None:
        self._matrix, self._dtype = matrix, dtype

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        return self._matrix.lines(ids.reshape(-1)).to(self._dtype).reshape(*ids.shape, self._matrix.columns)


def _owners(model: nn.Module, targets: Sequence[str]) -> list[Any]:
    """The modules whose weights the targets are; none if a target is not the weight of a module of its own kind."""
    if not all(target.endswith(".weight") for target in targets):
        return []
    modules = [model.get_submodule(target.removesuffix(".weight")) for target in targets]
    return modules if all(type(module) in _MODULES for module in modules) else []


def _fits(source: Coded, modules: Sequence[nn.Module]) -> bool:
    """Whether a kernel multiplies a tensor in its own groups, and the modules let it."""
    if not modules or len(source.shape) != 2:
        return False
    if (source.packed is not None and source.packed.is_float8) or _has_row_scales(source):
        return True
    return source.bits in int4.BITS and source.group_size in int4.GROUP_SIZES
