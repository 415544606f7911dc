"""Runs layers `[start, stop)` of a model by the model's own, unchanged forward pass ("ghost layers").

The layer list keeps its full length, so every index and mask in the forward code stays right. Layers outside the range
are ghosts: they return their input, or the values that earlier stages have sent for them. MLX evaluates lazily: the
values that the forward pass builds from ghosts are never computed, and their weights are never read.

Only layers that need it are hooked: within the range, those that take a value from an earlier stage or make one for a
later stage. All others run as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from exo_mesh_mlx import tree
from exo_mesh_mlx.body import find_body
from exo_mesh_mlx.hooks import hook, replace_call, unhook
from exo_mesh_mlx.trace import ArgumentLeaf, ArrayLeaf, ArraySource, MlxLayerUse, MlxTrace, keep_last_positions

Packet = dict[ArraySource, mx.array]
"""Live values of some rows at a cut."""


class _MlxStageEnd(Exception):
    """Not an error: leaves the forward pass when the stage's part is done."""


class MlxGhostStage:
    """A hooked model. Not re-entrant: one forward at a time."""

    def __init__(self, model: nn.Module, trace: MlxTrace, start: int, stop: int) -> None:
        """Hooks `model` in place. Raises ModelError if start or stop is not a legal cut."""
        self._model: Any = model
        self._trace, self._start, self._stop = trace, start, stop
        self.inputs = tuple(trace.live_values(start) if start else ())
        self.outputs = tuple(trace.live_values(stop) if stop < trace.num_layers else ())
        self._sent = {value.source for value in self.inputs}
        self._packet: Packet = {}
        self._num_tokens = self._num_logits = 0
        self._body = find_body(model)
        for index, layer in enumerate(model.layers):
            self._set_hook(index, layer)

    def forward(self, tokens: mx.array, caches: list[Any], packet: Packet, num_logits: int) -> mx.array | Packet:
        """Run lazily: tokens int32 `[rows, n]` -> live values at `stop`, or on the last stage logits
        `[rows, k, vocab]`.

        caches: a full-length list, whose entries grow by n positions. k is num_logits, or n if the head cannot take
        fewer positions; with num_logits 0 the head does not run and the result is an empty packet.
        """
        self._packet, self._num_tokens, self._num_logits = packet, tokens.shape[1], num_logits
        try:
            logits: mx.array = self._model(tokens, cache=caches)
            return logits
        except _MlxStageEnd:
            return {value.source: self._packet[value.source] for value in self.outputs}
        finally:
            self._packet = {}

    def final_states(self, tokens: mx.array, caches: list[Any], packet: Packet) -> mx.array | None:
        """The same on the last stage, but the states after the last norm, `[rows, n, width]`; None if this model's code
        has no part that gives them."""
        if self._body is None:
            return None
        self._packet, self._num_tokens, self._num_logits = packet, tokens.shape[1], tokens.shape[1]
        try:
            states = self._body(tokens, cache=caches)
            return states if isinstance(states, mx.array) and states.ndim == 3 else None
        finally:
            self._packet = {}

    def close(self) -> None:
        """Undo the hooks and release the model, so that no reference cycle stays. Not usable afterwards."""
        for layer in self._model.layers:
            unhook(layer)
        self._model = self._body = None

    def _set_hook(self, index: int, layer: nn.Module) -> None:
        if index >= self._stop:
            replace_call(layer, _end)
        elif index < self._start:
            simple = self._simple_ghost(index)
            if simple is None:
                hook(layer, partial(self._ghost, index))
            else:
                replace_call(layer, simple)
        elif self._is_boundary(index):
            hook(layer, partial(self._live, index))
        else:
            unhook(layer)

    def _is_boundary(self, index: int) -> bool:
        """Whether a layer of this stage takes or makes a live value, or ends the model."""
        takes = any(source in self._sent for source in self._trace.layers[index].links.values())
        makes = any(value.source.layer == index for value in self.outputs)
        return takes or makes or index == self._trace.num_layers - 1

    def _simple_ghost(self, index: int) -> Callable[..., Any] | None:
        """For a ghost without sent values: a function that returns an argument. None for all others."""
        use = self._trace.layers[index]
        if use.main_arg is None or use.written_args or not isinstance(use.template, ArrayLeaf):
            return None
        if len(use.main_arg) != 2 or any(source.layer == index for source in self._sent):
            return None
        side, name = use.main_arg
        if side == 0:
            return lambda _layer, *args, **_kwargs: args[name]
        return lambda _layer, *_args, **kwargs: kwargs[name]

    def _live(self, index: int, original: Any, layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a layer of this stage; arguments that earlier stages made come from the packet."""
        call: list[Any] = [list(args), kwargs]
        for path, source in self._trace.layers[index].links.items():
            if source in self._sent and source in self._packet:
                call = tree.put(call, path, self._packet[source])
        output = original(layer, *call[0], **call[1])
        for value in self.outputs:
            if value.source.layer == index:
                side, path = value.source.path[0], value.source.path[1:]
                self._packet[value.source] = tree.get(output if side == "out" else call, path)
        if index == self._trace.num_layers - 1:
            if not self._num_logits:
                raise _MlxStageEnd
            if self._trace.head_by_position:
                return keep_last_positions(output, self._num_tokens, self._num_logits)
        return output

    def _ghost(self, index: int, _original: Any, _layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Replace a layer of another stage: return values of the right structure and shape, which are never
        evaluated."""
        use: MlxLayerUse = self._trace.layers[index]
        call = [list(args), kwargs]
        donor = tree.get(call, use.main_arg) if use.main_arg is not None else None
        for path in use.written_args:
            tree.put(call, path, self._packet.get(ArraySource(index, ("arg", *path)), donor))
        return self._fill(use.template, index, call, donor, ())

    def _fill(self, template: Any, index: int, call: list[Any], donor: Any, path: tree.Path) -> Any:
        """A result like the template: arrays are those sent for this layer, else the donor."""
        if isinstance(template, ArrayLeaf):
            return self._packet.get(ArraySource(index, ("out", *path)), donor)
        if isinstance(template, ArgumentLeaf):
            return tree.get(call, template.path)
        if isinstance(template, dict):
            return {key: self._fill(item, index, call, donor, (*path, key)) for key, item in template.items()}
        if isinstance(template, tuple | list):
            items = [self._fill(item, index, call, donor, (*path, i)) for i, item in enumerate(template)]
            return type(template)(*items) if hasattr(template, "_fields") else type(template)(items)
        return template


def _end(_layer: Any, *_args: Any, **_kwargs: Any) -> Any:
    raise _MlxStageEnd
