"""Runs layers `[start, stop)` of a model by the model's own, unchanged forward pass ("ghost layers").

The layer list, the config and the cache keep their full length, so every index and mask in the forward code stays
right. Layers outside the range are ghosts: those before it return their input, the one behind it ends the pass. The
first layer of the range gets the hidden state from the previous stage. Modules that belong before the layers and are
not loaded here return zeros, which are not used.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from exo_mesh.errors import EngineError, ModelError
from exo_mesh_torch.caches import StageCache
from exo_mesh_torch.calls import call_arguments, get_hidden, put_hidden
from exo_mesh_torch.image_rows import Overlay
from exo_mesh_torch.trace import TorchTrace


class StageEnd(Exception):
    """Not an error: leaves the forward pass with the hidden state when the stage's part is done."""

    def __init__(self, hidden: torch.Tensor, *, is_final: bool = False) -> None:
        """is_final: it is the input of the head, and has no axis of parallel hidden states."""
        super().__init__()
        self.hidden = hidden
        self.is_final = is_final


class TorchGhostStage:
    """A model with its layers' forwards replaced. Not re-entrant: one forward at a time."""

    def __init__(
        self, model: Any, layers: nn.ModuleList, trace: TorchTrace, start: int, stop: int, device: torch.device
    ) -> None:
        """Changes `model` in place. Raises ModelError if start or stop is not a legal cut."""
        for cut in (start, stop):
            if 0 < cut < trace.num_layers and cut not in trace.legal_cuts:
                raise ModelError(f"the model cannot be cut before layer {cut}: {trace.reason or 'shared values'}")
        self._model = model
        self._start, self._stop, self._num_layers = start, stop, trace.num_layers
        self._streams = trace.streams
        self._ghosts = [i for i in range(trace.num_layers) if not start <= i < stop]
        self._received: torch.Tensor | None = None
        self._num_logits = 0
        self._wants_states = self._has_head = False
        self._overlay: Overlay | None = None
        self._takes_logits_to_keep = "logits_to_keep" in call_arguments(model, None, logits_to_keep=0)  # type: ignore[arg-type]
        for index in self._ghosts:
            layers[index].forward = self._ghost(index, trace.layers[index].returns)
        if start:
            layers[start].forward = self._first(layers[start].forward)
            silence(model, trace.first, device)
        else:
            model.get_input_embeddings().register_forward_hook(self._put_images)
        if stop == trace.num_layers:
            layers[stop - 1].register_forward_hook(self._after_last)
            head = model.get_output_embeddings()
            if head is not None:
                self._has_head = True
                head.register_forward_pre_hook(self._before_head)

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        mask: torch.Tensor | dict[str, torch.Tensor | None] | None,
        cache: StageCache,
        hidden: torch.Tensor | None,
        num_logits: int,
        images: Overlay | None = None,
        *,
        wants_states: bool = False,
    ) -> torch.Tensor:
        """Run the stage. token_ids, positions `[rows, n]` int64, or `[3, rows, n]` for time, row and column; mask
        `[rows, past + n]`, one mask for each kind of layer, or None; hidden `[rows, n, …]`. images: on the first stage,
        the rows that replace embeddings.

        Returns the hidden state `[rows, n, …]`, or on the last stage logits `[rows, num_logits, vocab]`; with
        num_logits 0 the result of the last layer; with wants_states the input of the head, `[rows, n, width]`. Appends
        n positions to `cache`. Raises EngineError for states of a model without a head.
        """
        self._wants_states = wants_states and self._stop == self._num_layers
        if self._wants_states:
            if not self._has_head:
                raise EngineError("this model has no head, whose input would be the hidden states")
            num_logits = token_ids.shape[1]
        self._received = hidden.movedim(2, 0) if hidden is not None and self._streams else hidden
        self._num_logits = num_logits
        self._overlay = images
        keep: Mapping[str, int] = {"logits_to_keep": num_logits} if self._takes_logits_to_keep else {}
        arguments = call_arguments(self._model, cache, position_ids=positions, attention_mask=mask, **keep)
        if mask is None:
            arguments.pop("attention_mask", None)
        if images is not None and images.deep:
            arguments |= {"visual_pos_masks": images.where, "deepstack_visual_embeds": list(images.deep)}
        try:
            result: torch.Tensor = self._model(input_ids=token_ids, **arguments).logits[:, -num_logits:]
        except StageEnd as end:
            result = end.hidden.movedim(0, 2) if self._streams and not end.is_final else end.hidden
        finally:
            self._received = self._overlay = None
        cache.skip(self._ghosts, token_ids.shape[1])
        return result

    def close(self) -> None:
        """Remove the references to this object from inside the model, so that no reference cycle stays."""
        for module in self._model.modules():
            vars(module).pop("forward", None)
        self._model = None

    def _ghost(self, index: int, returns: int) -> Any:
        def forward(*args: Any, **kwargs: Any) -> Any:
            hidden = get_hidden(args, kwargs)
            if index >= self._stop:
                raise StageEnd(hidden)
            return (hidden, *[None] * (returns - 1)) if returns else hidden

        return forward

    def _first(self, original: Any) -> Any:
        def forward(*args: Any, **kwargs: Any) -> Any:
            assert self._received is not None, "a stage behind the first is given a hidden state"
            args, kwargs = put_hidden(args, kwargs, self._received)
            return original(*args, **kwargs)

        return forward

    def _put_images(self, _embedding: nn.Module, _args: Any, output: torch.Tensor) -> torch.Tensor | None:
        """Put the rows of images in place of the embeddings of their placeholders."""
        if self._overlay is None:
            return None
        where = self._overlay.where[..., None].expand_as(output)
        return output.masked_scatter(where, self._overlay.embeds.to(output.dtype))

    def _after_last(self, _layer: nn.Module, _args: Any, output: Any) -> None:
        if not self._num_logits:
            raise StageEnd(output[0] if isinstance(output, tuple) else output)

    def _before_head(self, _head: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Keep only the positions whose logits are wanted, in one piece: torch copies all of the head's weights to
        multiply them with a strided hidden state. `contiguous` would keep the odd stride of an axis of size 1."""
        hidden, *others = args
        if self._wants_states:
            raise StageEnd(hidden, is_final=True)
        return (hidden[:, -self._num_logits :].clone(memory_format=torch.contiguous_format), *others)


def silence(model: nn.Module, names: frozenset[str], device: torch.device) -> None:
    """Make modules whose parameters are only used before the first layer return zeros, or their input.

    A single zero of the same shape replaces their weights, because some code reads the device of the embedding.
    """
    for path in {name.rpartition(".")[0] for name in names}:
        module = model.get_submodule(path)
        for name, weight in module.named_parameters(recurse=False):
            if weight.is_meta:
                zero = torch.zeros(1, dtype=weight.dtype, device=device).expand(weight.shape)
                setattr(module, name, nn.Parameter(zero, requires_grad=False))
        module.forward = _zeros(module)


def _zeros(module: nn.Module) -> Any:
    """A forward for an embedding that returns zeros; for any other module, a forward that returns its input."""
    weight: Any = getattr(module, "weight", None)

    def embedding(*args: Any, **kwargs: Any) -> torch.Tensor:
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
        ids = next((tensor for tensor in tensors if not tensor.is_floating_point()), tensors[0])
        return torch.zeros((*ids.shape, weight.shape[-1]), dtype=weight.dtype, device=ids.device)

    def other(given: torch.Tensor, *_args: Any, **_kwargs: Any) -> torch.Tensor:
        return given

    return embedding if isinstance(module, nn.Embedding) else other
