"""Run layers `[start, stop)` of a model by the model's own, unchanged forward pass ("ghost layers").

The layer list keeps its full length, so every index and mask in the forward code stays right. Layers outside the range
are ghosts that return their input, or what the stages before have sent in their name. MLX evaluates lazily: whatever
the forward pass builds from ghosts is never computed, and their weights are never read.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from exo_mesh_mlx import tree
from exo_mesh_mlx.caches import SequenceCache
from exo_mesh_mlx.hooks import hook, unhook
from exo_mesh_mlx.trace import ArgumentLeaf, ArrayLeaf, LayerUse, Source, Trace, keep_last_positions

Packet = dict[Source, mx.array]
"""Live values of one row at a cut."""


class _StageEnd(Exception):
    """Not an error: leaves the forward pass when the stage's part is done."""


class GhostStage:
    """A hooked model. Not re-entrant: one forward at a time."""

    def __init__(self, model: nn.Module, trace: Trace, start: int, stop: int) -> None:
        """Hooks `model` in place. Raises ModelError if start or stop is not a legal cut."""
        self._model: Any = model
        self._trace, self._start, self._stop = trace, start, stop
        self.inputs = tuple(trace.live_values(start) if start else ())
        self.outputs = tuple(trace.live_values(stop) if stop < trace.num_layers else ())
        self._packet: Packet = {}
        self._num_tokens = self._num_logits = 0
        for index, layer in enumerate(model.layers):
            hook(layer, partial(self._live if start <= index < stop else self._ghost, index))

    def forward(self, tokens: mx.array, cache: SequenceCache, packet: Packet, num_logits: int) -> mx.array | Packet:
        """One row, lazily: tokens int32 `[1, n]` -> live values at `stop`, or on the last stage logits `[1, k, vocab]`.

        k is num_logits, or n where the head cannot be given less; with num_logits 0 the head is not run at all and
        the answer is an empty packet. Appends n positions to `cache`.
        """
        self._packet, self._num_tokens, self._num_logits = dict(packet), tokens.shape[1], num_logits
        logits: mx.array | None = None
        try:
            logits = self._model(tokens, cache=cache.full())
        except _StageEnd:
            pass
        finally:
            packet, self._packet = self._packet, {}
        cache.advance(self._num_tokens)
        if logits is not None:
            return logits
        return {value.source: packet[value.source] for value in self.outputs}

    def close(self) -> None:
        """Undo the hooks and let go of the model, so that nothing refers to it in a circle. Not usable afterwards."""
        for layer in self._model.layers:
            unhook(layer)
        self._model = None

    def _live(self, index: int, original: Any, layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a layer of this stage, with arguments that earlier stages made taken from the packet."""
        call: list[Any] = [list(args), kwargs]
        for path, source in self._trace.layers[index].links.items():
            if source.layer < self._start and source in self._packet:
                call = tree.put(call, path, self._packet[source])
        output = original(layer, *call[0], **call[1])
        for value in self.outputs:
            if value.source.layer == index:
                side, path = value.source.path[0], value.source.path[1:]
                self._packet[value.source] = tree.get(output if side == "out" else call, path)
        if index == self._trace.num_layers - 1:
            if not self._num_logits:
                raise _StageEnd
            if self._trace.head_by_position:
                return keep_last_positions(output, self._num_tokens, self._num_logits)
        return output

    def _ghost(self, index: int, _original: Any, _layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Stand in for a layer of another stage: something of the right structure and shape, never evaluated."""
        if index >= self._stop:
            raise _StageEnd
        use: LayerUse = self._trace.layers[index]
        call = [list(args), kwargs]
        donor = tree.get(call, use.main_arg) if use.main_arg is not None else None
        for path in use.written_args:
            tree.put(call, path, self._packet.get(Source(index, ("arg", *path)), donor))
        return self._fill(use.template, index, call, donor, ())

    def _fill(self, template: Any, index: int, call: list[Any], donor: Any, path: tree.Path) -> Any:
        """A result like the template: arrays are those sent for this layer, else the donor."""
        if isinstance(template, ArrayLeaf):
            return self._packet.get(Source(index, ("out", *path)), donor)
        if isinstance(template, ArgumentLeaf):
            return tree.get(call, template.path)
        if isinstance(template, dict):
            return {key: self._fill(item, index, call, donor, (*path, key)) for key, item in template.items()}
        if isinstance(template, tuple | list):
            items = [self._fill(item, index, call, donor, (*path, i)) for i, item in enumerate(template)]
            return type(template)(*items) if hasattr(template, "_fields") else type(template)(items)
        return template
