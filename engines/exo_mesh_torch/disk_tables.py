"""Leaves the large lookup tables of layers in the files, and reads their rows when they are looked up.

A token looks up a few rows of a table of n-grams, so a table of 100 GB is read from a disk fast enough, and takes no
memory but the page cache's.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import nn
from transformers.core_model_loading import Concatenate

from exo_mesh_torch.names import NameMap, Recipe
from exo_mesh_torch.sources import TensorSource, gather

LEAST_BYTES = 2**30
"""Smaller tables are kept in memory by default: a table of this size needs no more than a large layer does."""


def tables_on_disk(names: NameMap, model: nn.Module, layers: str, options: Mapping[str, str]) -> frozenset[str]:
    """Names of the weights of layers that stay in the files. layers: their prefix.

    Option `tables`: auto (the default: those of LEAST_BYTES and more), disk (all) or memory (none).
    """
    wanted = options.get("tables", "auto")
    least = {"auto": LEAST_BYTES, "disk": 1}.get(wanted)
    if least is None:
        return frozenset()
    tables = {
        f"{name}.weight": module.weight.nbytes
        for name, module in model.named_modules()
        if type(module) is nn.Embedding and name.startswith(f"{layers}.")
    }
    recipes = names.recipes
    return frozenset(
        name for name, size in tables.items() if size >= least and name in recipes and _is_in_order(recipes[name])
    )


class DiskTable(nn.Module):  # type: ignore[misc]
    """In place of an embedding whose rows are in one tensor, or in several one after the other."""

    def __init__(self, sources: Sequence[TensorSource], dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self._sources = tuple(sources)
        self._stops = tuple(accumulate(source.shape[0] for source in sources))
        self._dtype = dtype
        width = sources[0].shape[1]
        self.weight = nn.Parameter(torch.empty((0, width), dtype=dtype, device=device), requires_grad=False)
        """Models ask for the device of their embedding."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows `[*ids.shape, width]`. Raises ModelError naming file and tensor if they cannot be read."""
        wanted, places = torch.unique(ids.cpu(), return_inverse=True)
        rows = torch.cat([self._read(*span) for span in self._by_source(wanted.tolist())])
        return rows[places].to(self.weight.device)

    def _by_source(self, ids: Sequence[int]) -> Iterator[tuple[TensorSource, list[int]]]:
        """Yields each source that has some of these rows, with their numbers in it. ids: sorted."""
        first = begin = 0
        for source, stop in zip(self._sources, self._stops, strict=True):
            if (end := bisect_left(ids, stop)) > begin:
                yield source, [number - first for number in ids[begin:end]]
            first, begin = stop, end

    def _read(self, source: TensorSource, numbers: list[int]) -> torch.Tensor:
        return gather(source, numbers).to(self._dtype)


def put(model: nn.Module, name: str, recipe: Recipe, device: torch.device) -> nn.Module:
    """Replaces the embedding whose weight has this name; returns the new module."""
    path = name.removesuffix(".weight")
    parent, _, leaf = path.rpartition(".")
    old: Any = model.get_submodule(path)
    table = DiskTable([source for source, _ in recipe.sources], old.weight.dtype, device)
    setattr(model.get_submodule(parent), leaf, table)
    return table


def num_rows(recipe: Recipe) -> tuple[int, ...]:
    """The shape of the table that the sources of a recipe make."""
    shapes = [source.shape for source, _ in recipe.sources]
    return (sum(shape[0] for shape in shapes), *shapes[0][1:])


def _is_in_order(recipe: Recipe) -> bool:
    """Whether the rows of a parameter are those of its sources, one after the other."""
    if not recipe.sources or len({source.shape[1:] for source, _ in recipe.sources}) > 1:
        return False
    if recipe.converter is None:
        return True
    return [type(step) for step in recipe.converter.operations] == [Concatenate] and (
        recipe.converter.operations[0].dim == 0
    )
