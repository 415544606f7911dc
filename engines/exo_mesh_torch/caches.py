"""The cache of all layers for the rows of one batch, made from a model's config as transformers makes its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import torch
from transformers.cache_utils import (
    DYNAMIC_LAYER_TYPE_MAPPING,
    Cache,
    DynamicCache,
    get_layer_types_and_kwargs,
)

from exo_mesh.engine.contract import ANY_POSITION, CUT_POSITIONS, KvKind
from exo_mesh_torch.kv import HybridLayer, KvLayer, NoLayer, RecurrentLayer

_KINDS: dict[str, KvKind] = {
    "full_attention": "full",
    "sliding_attention": "window",
    "chunked_attention": "window",
    "hybrid": "full",
    "hybrid_sliding": "window",
    "conv": "recurrent",
    "linear_attention": "recurrent",
}
_HYBRIDS = ("hybrid", "hybrid_sliding")

States = dict[int, dict[str, torch.Tensor]]
"""{layer: {name: recurrent state of one row}}"""


class StageCache(DynamicCache):  # type: ignore[misc]
    """One cache layer per layer of the whole model; only the stage's own layers ever hold anything."""

    def __init__(self, layers: list[Any], shared: Sequence[int] = (0,)) -> None:
        """shared: for each row the positions that are in parts, which other sequences may hold too."""
        Cache.__init__(self, layers=layers)
        self.shared = tuple(shared)

    def skip(self, layers: Sequence[int], num_tokens: int) -> None:
        """Advance the layers that took no part in a forward."""
        for index in layers:
            self.layers[index].skip(num_tokens)

    def can_cut(self, surplus: int) -> bool:
        return all(layer.can_cut(surplus) for layer in self.layers)

    def can_cut_positions(self, surplus: int) -> bool:
        """The same, if its rows can return to earlier recurrent states."""
        return all(layer.can_cut_positions(surplus) for layer in self.layers)

    def cut(self, surplus: int) -> None:
        for layer in self.layers:
            layer.cut(surplus)

    def copy_states(self, index: int) -> States:
        """The recurrent states of one row now, by layer."""
        layers = enumerate(self.layers)
        return {at: layer.copy_states(index) for at, layer in layers if isinstance(layer, RecurrentLayer)}

    def return_to(self, index: int, states: States) -> None:
        for at, one in states.items():
            self.layers[at].return_to(index, one)

    @property
    def copyable(self) -> bool:
        return not any(isinstance(layer, ForeignLayer) for layer in self.layers)

    def row(self, index: int, length: int) -> StageCache:
        """A copy of one row of the batch, which holds `length` positions."""
        return StageCache([layer.row(index, length) for layer in self.layers], self.shared[index : index + 1])

    @property
    def can_share(self) -> bool:
        """Whether the first positions of its rows can be in parts. States of recurrent layers are always copied."""
        return all(
            layer.can_share if isinstance(layer, KvLayer) else isinstance(layer, NoLayer | RecurrentLayer)
            for layer in self.layers
        )

    def serials(self, index: int) -> tuple[int, ...]:
        """The numbers of the parts that a row begins with; rows with equal ones have the same parts."""
        found = (layer.parts(index) for layer in self._attention())
        return next((tuple(part.serial for part in parts) for parts in found if parts), ())

    def part_off(self, count: int) -> None:
        """Make a part of the first `count` own positions of its one row."""
        for layer in self._attention():
            layer.part_off(count)
        self.shared = (self.shared[0] + count,)

    def begin(self, index: int, held: int, length: int) -> StageCache:
        """A cache of one row with the first positions of a row that holds `held`, and shares its parts."""
        layers = [
            layer.begin(index, held, length) if isinstance(layer, KvLayer) else layer.row(index, held)
            for layer in self.layers
        ]
        cache = StageCache(layers)
        cache.shared = (max((layer.shared(0) for layer in cache._attention()), default=0),)
        return cache

    def own(self) -> None:
        """Take all positions of its one row into memory of its own."""
        for layer in self._attention():
            layer.own()
        self.shared = (0,)

    def _attention(self) -> Iterator[KvLayer]:
        return (layer for layer in self.layers if isinstance(layer, KvLayer))

    def join(self, others: Sequence[StageCache], length: int = 0) -> StageCache:
        """A batch of this row and the rows of the others. length: its padded positions; 0: as the longest row."""
        rests = zip(*(other.layers for other in others), strict=True)
        layers = [layer.join(rest, length) for layer, rest in zip(self.layers, rests, strict=True)]
        return StageCache(layers, [cache.shared[0] for cache in (self, *others)])

    def tensors(self) -> Iterator[torch.Tensor]:
        for layer in list(self.layers):
            yield from layer.tensors()


class ForeignLayer:
    """Mixed into transformers' own cache layers of other kinds: one row only, and no rollback.

    A layer of another stage only counts positions, because models make masks from the cache of any layer.
    """

    skipped = 0

    def skip(self: Any, num_tokens: int) -> None:
        """Count the positions of a forward that this layer took no part in."""
        if hasattr(self, "cumulative_length"):  # a window: its length and masks come from this
            self.cumulative_length += num_tokens
        else:
            self.skipped += num_tokens

    def get_seq_length(self: Any) -> int:
        return int(self.skipped or super().get_seq_length())  # type: ignore[misc]

    def get_mask_sizes(self: Any, query_length: int) -> tuple[int, int]:
        if self.skipped:
            return self.skipped + query_length, 0
        sizes: tuple[int, int] = super().get_mask_sizes(query_length)  # type: ignore[misc]
        return sizes

    def can_cut(self: Any, surplus: int) -> bool:
        return False

    def can_cut_positions(self: Any, surplus: int) -> bool:
        return False

    def tensors(self: Any) -> Iterator[torch.Tensor]:
        for value in list(vars(self).values()):
            for item in value.values() if isinstance(value, dict) else (value,):
                if isinstance(item, torch.Tensor):
                    yield item


class CachePlan:
    """The caches of a model's layers, from its config.

    kinds[i]: the kinds of layer i, none if it keeps nothing. batchable: whether rows may be joined.
    """

    def __init__(self, config: Any, context_limit: int) -> None:
        types, self._settings = get_layer_types_and_kwargs(config.get_text_config(decoder=True))
        self._limit = context_limit
        self._types = list(types)
        self.kinds = tuple(self._kinds_of(i) for i in range(len(self._types)))
        self.batchable = not any(self._is_foreign(name) for name in self._types)

    def new(self) -> StageCache:
        return StageCache([self._layer(i) for i in range(len(self._types))])

    def rollback(self, layers: range) -> int:
        """How many of the last positions these layers can cut back, in a context of up to `context_limit`."""
        if any(self._is_foreign(self._types[i]) for i in layers):
            return 0
        is_full = all(kind == "full" for i in layers for kind in self.kinds[i])
        return ANY_POSITION if is_full else CUT_POSITIONS

    def _is_foreign(self, name: str) -> bool:
        return name not in _KINDS and name != "dummy"

    def _kinds_of(self, index: int) -> tuple[KvKind, ...]:
        name = self._types[index]
        if name == "dummy":
            return ()
        if self._is_foreign(name):
            return ("full",)
        kind: KvKind = _KINDS[name]
        if name == "chunked_attention" and self._window(index) is not None:
            kind = "chunked"
        elif kind == "window" and self._window(index) is None:
            kind = "full"
        return (kind, "recurrent") if name in _HYBRIDS else (kind,)

    def _window(self, index: int) -> int | None:
        """The window of a layer; None if no sequence is long enough to need it."""
        window: int | None = self._settings[index].get("sliding_window")
        return window if window is not None and window < self._limit else None

    def _layer(self, index: int) -> Any:
        name = self._types[index]
        if name == "dummy":
            return NoLayer()
        if self._is_foreign(name):
            return _foreign(DYNAMIC_LAYER_TYPE_MAPPING[name])(**self._settings[index])
        if name in ("conv", "linear_attention"):
            return RecurrentLayer(number_of_states=self._settings[index].get("number_of_states", 1))
        window = self._settings[index].get("sliding_window")
        if name in _HYBRIDS:
            return HybridLayer(window, self._settings[index].get("number_of_states", 1))
        return KvLayer(window)


@cache
def _foreign(kind: type) -> type:
    # transformers enters every class with a _layer_type into its table of kinds; this class must not replace its own
    return type(kind.__name__, (ForeignLayer, kind), {"_layer_type": None})
