"""Traces how a model's forward pass uses its layers, in three lazy runs in which nothing is computed.

The trace shows which arrays a layer takes from which earlier layer, what it returns, and which cache entries it uses.
The live set at every cut and the legal cuts follow from that. No architecture is known by name.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import msgspec

from exo_mesh.errors import ModelError
from exo_mesh_mlx import tree
from exo_mesh_mlx.hooks import hook, unhook
from exo_mesh_mlx.wire import MX_DTYPES

RUN_TOKENS = (5, 3, 1)
"""Tokens of the three runs, over one cache: an axis of sizes 5, 3, 1 counts tokens; 5, 8, 9 grows with the context."""

MAIN = "hidden"


class ArraySource(msgspec.Struct, frozen=True):
    """The place where an array was made: layer `layer`, at `path` of ("out", result) or of ("arg", args and kwargs)."""

    layer: int
    path: tree.Path


class LiveValue(msgspec.Struct, frozen=True):
    """An array that crosses a cut. shape: of one row with one token. dtype: as the layer returned it."""

    key: str
    source: ArraySource
    shape: tuple[int, ...]
    token_axis: int | None
    dtype: mx.Dtype

    @property
    def has_batch_axis(self) -> bool:
        """Whether the first axis counts rows, so that several rows may share one array."""
        return len(self.shape) > 1 and self.shape[0] == 1 and self.token_axis != 0

    @property
    def is_floating(self) -> bool:
        return bool(mx.issubdtype(self.dtype, mx.floating))


class MlxLayerUse(msgspec.Struct):
    """The behaviour of one layer. links: argument path -> source. template: see `_template`. slots: cache entries that
    it gets."""

    links: dict[tree.Path, ArraySource] = msgspec.field(default_factory=dict)
    main_arg: tree.Path | None = None
    template: Any = None
    written_args: list[tree.Path] = msgspec.field(default_factory=list)
    slots: frozenset[int] = frozenset()


class MlxTrace(msgspec.Struct):
    """A model's trace: plain data, without arrays and modules."""

    layers: list[MlxLayerUse]
    shapes: dict[ArraySource, list[tuple[int, ...]]]
    dtypes: dict[ArraySource, mx.Dtype]
    head_by_position: bool
    """Whether norm and head treat positions independently, so that they may get the last positions only."""

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    def live_sources(self, cut: int) -> list[ArraySource]:
        """The arrays that layers before `cut` made and layers from it on use; the main one (made by layer cut-1)
        first."""
        wanted = {source: None for use in self.layers[cut:] for source in use.links.values() if source.layer < cut}
        main = self._main_source(cut)
        return [main, *(source for source in sorted(wanted, key=repr) if source != main)]

    def _main_source(self, cut: int) -> ArraySource:
        """The array that layer `cut` takes from layer cut-1; if model code is between them, the result of cut-1."""
        use = self.layers[cut]
        if use.main_arg is not None and use.main_arg in use.links and use.links[use.main_arg].layer == cut - 1:
            return use.links[use.main_arg]
        returned = [source for source in self.shapes if source.layer == cut - 1 and source.path[0] == "out"]
        if not returned:
            raise ModelError(f"layer {cut - 1} returns no array")
        return returned[0]

    def live_values(self, cut: int) -> list[LiveValue]:
        """The live set with its wire form. Raises ModelError if the cut is not legal."""
        reason = self.why_illegal(cut)
        if reason:
            raise ModelError(f"the model cannot be cut before layer {cut}: {reason}")
        return [self._live_value(source, i) for i, source in enumerate(self.live_sources(cut))]

    def _live_value(self, source: ArraySource, index: int) -> LiveValue:
        shapes = self.shapes[source]
        axes = [axis for axis, sizes in enumerate(zip(*shapes, strict=True)) if sizes == RUN_TOKENS]
        key = MAIN if index == 0 else f"live.{source.layer}.{index}"
        return LiveValue(key, source, shapes[-1], axes[0] if axes else None, self.dtypes[source])

    def why_illegal(self, cut: int) -> str:
        """The reason why no stage may begin at layer `cut`, or "" if one may."""
        for source in self.live_sources(cut):
            shapes = self.shapes[source]
            if len(shapes) != len(RUN_TOKENS) or len({len(shape) for shape in shapes}) != 1:
                return f"layer {source.layer} does not always return the same arrays"
            if self.dtypes[source] not in MX_DTYPES.values():
                return f"layer {source.layer} passes on {self.dtypes[source]}, which cannot be sent to another stage"
            varying = [sizes for sizes in zip(*shapes, strict=True) if len(set(sizes)) > 1]
            if varying and varying != [RUN_TOKENS]:
                return f"an array that layer {source.layer} passes on grows with the context"
        before = {slot for use in self.layers[:cut] for slot in use.slots}
        shared = before & {slot for use in self.layers[cut:] for slot in use.slots}
        return f"cache entry {min(shared)} is used on both sides" if shared else ""

    def legal_cuts(self) -> tuple[int, ...]:
        return tuple(cut for cut in range(1, self.num_layers) if not self.why_illegal(cut))


def trace_model(model: nn.Module, caches: list[Any]) -> MlxTrace:
    """Run `model` lazily. Its caches are left filled with lazy arrays: drop them and the model afterwards.

    Raises ModelError if the layers are not each called exactly once, in order (looped models).
    """
    recorder = _Recorder(model, caches)
    try:
        for num_tokens in RUN_TOKENS:
            recorder.run(num_tokens)
        recorder.try_head_on_one_position()
    finally:
        recorder.release()
    return MlxTrace(recorder.layers, recorder.shapes, recorder.dtypes, recorder.head_by_position)


class _Recorder:
    """Hooks all layers and records the values that pass through them."""

    def __init__(self, model: nn.Module, caches: list[Any]) -> None:
        self.model: Any = model
        self.caches = caches
        self.slot_of = {inner: slot for slot, entry in enumerate(caches) for inner in _cache_ids(entry)}
        self.layers = [MlxLayerUse() for _ in model.layers]
        self.shapes: dict[ArraySource, list[tuple[int, ...]]] = {}
        self.dtypes: dict[ArraySource, mx.Dtype] = {}
        self.head_by_position = False
        self.origin: dict[int, ArraySource] = {}
        self.kept: list[mx.array] = []
        self.next_layer = 0
        self.cut_positions = False
        for index, layer in enumerate(model.layers):
            hook(layer, partial(self.record, index))

    def run(self, num_tokens: int) -> Any:
        self.origin.clear()
        self.kept.clear()
        self.next_layer = 0
        output = self.model(mx.zeros((1, num_tokens), mx.int32), cache=self.caches)
        if self.next_layer != len(self.layers):
            raise ModelError(f"only {self.next_layer} of {len(self.layers)} layers are called by the forward pass")
        return output

    def try_head_on_one_position(self) -> None:
        """Find out whether the part after the layers still works, and gives one row of logits, if the last layer
        returns one position."""
        self.cut_positions = True
        try:
            logits = self.run(RUN_TOKENS[0])
        except (ValueError, IndexError, TypeError):
            return
        self.head_by_position = isinstance(logits, mx.array) and logits.ndim == 3 and logits.shape[:2] == (1, 1)

    def release(self) -> None:
        """Drop every array, and the cycle of model, hooks and recorder, which would keep weights alive once read."""
        for layer in self.model.layers:
            unhook(layer)
        self.origin.clear()
        self.kept.clear()
        self.caches = []
        self.model = None

    def record(self, index: int, original: Any, layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if index != self.next_layer:
            raise ModelError(f"layer {index} is called where layer {self.next_layer} was due: a looped model")
        self.next_layer += 1
        call = [list(args), kwargs]
        use = self.layers[index]
        before = dict(tree.arrays(call, self.slot_of))
        links = {path: self.origin[id(array)] for path, array in before.items() if id(array) in self.origin}
        use.links.update(links)
        use.main_arg = use.main_arg or _main_arg(index, links, before)
        use.slots |= {self.slot_of[inner] for inner in tree.ids_inside(call) if inner in self.slot_of}
        output = original(layer, *args, **kwargs)
        if self.cut_positions:
            return keep_last_positions(output, RUN_TOKENS[0], 1) if index == len(self.layers) - 1 else output
        opaque = {id(value): path for path, value in _opaque_values(call, self.slot_of)}
        use.template = _template(output, opaque)
        use.written_args = [path for path, array in tree.arrays(call, self.slot_of) if before.get(path) is not array]
        for path, array in tree.arrays(output, {**self.slot_of, **opaque}):
            self.note(ArraySource(index, ("out", *path)), array)
        for path in use.written_args:
            self.note(ArraySource(index, ("arg", *path)), tree.get(call, path))
        return output

    def note(self, source: ArraySource, array: mx.array) -> None:
        self.origin[id(array)] = source
        self.kept.append(array)  # so that no other array gets this id
        self.shapes.setdefault(source, []).append(tuple(array.shape))
        self.dtypes[source] = array.dtype


def keep_last_positions(output: Any, num_tokens: int, num_kept: int) -> Any:
    """A layer's result with only the last positions of every `[1, num_tokens, ...]` array."""
    if num_kept == num_tokens:
        return output
    for path, array in tree.arrays(output):
        if array.ndim >= 2 and array.shape[1] == num_tokens:
            output = tree.put(output, path, array[:, num_tokens - num_kept :])
    return output


def _main_arg(index: int, links: dict[tree.Path, ArraySource], args: dict[tree.Path, mx.array]) -> tree.Path | None:
    """The argument that a ghost returns: the output of the previous layer, else the first array with at least three
    axes."""
    for path, source in links.items():
        if source.layer == index - 1:
            return path
    return next((path for path, array in args.items() if array.ndim >= 3), None)


def _cache_ids(entry: Any) -> list[int]:
    """ids of a cache entry and, for a list of caches, of its parts."""
    return [id(entry), *(id(part) for part in getattr(entry, "caches", ()))]


class ArrayLeaf(msgspec.Struct, frozen=True):
    """In a template: the place of an array."""


class ArgumentLeaf(msgspec.Struct, frozen=True):
    """In a template: the place of the very object that was at `path` of the arguments."""

    path: tree.Path


def _template(output: Any, opaque: dict[int, tree.Path]) -> Any:
    """The structure of a layer's result with arrays replaced by ArrayLeaf, so that a ghost can build a similar one."""
    if isinstance(output, mx.array):
        return ArrayLeaf()
    if id(output) in opaque:
        return ArgumentLeaf(opaque[id(output)])
    if isinstance(output, tuple) and hasattr(output, "_fields"):
        return type(output)(*(_template(item, opaque) for item in output))
    if isinstance(output, tuple | list):
        return type(output)(_template(item, opaque) for item in output)
    if isinstance(output, dict) and not isinstance(output, nn.Module):
        return {key: _template(item, opaque) for key, item in output.items()}
    if output is None or isinstance(output, bool | int | float | str):
        return output
    raise ModelError(f"a layer returns a {type(output).__name__}, which cannot be split")


def _opaque_values(value: Any, skip: dict[int, int], path: tree.Path = ()) -> list[tuple[tree.Path, Any]]:
    """(path, object) of plain objects inside the arguments: they may come back as (part of) the result."""
    if id(value) in skip:
        return []
    found = [(path, value)] if tree.is_opaque(value) and not isinstance(value, mx.array) else []
    for step, child in tree.children(value):
        found += _opaque_values(child, skip, (*path, step))
    return found
