"""An encoder of transformers, opened for cutting: its layers see a whole text at once and keep nothing between frames.

Outside the layers there are only embeddings before them, and a norm, pooler or classifier behind them, in all families
that are supported. So names alone say what belongs to which stage.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModel, AutoModelForSequenceClassification

from exo_mesh.domain.embedding import is_classifier
from exo_mesh.errors import MeshError, ModelError
from exo_mesh.weights.model_files import read_json
from exo_mesh_torch.caches import StageCache
from exo_mesh_torch.calls import get_hidden, put_hidden
from exo_mesh_torch.errors import one_line
from exo_mesh_torch.ghost import StageEnd, silence
from exo_mesh_torch.model import stored_dtype
from exo_mesh_torch.skeleton import TorchCheckpoint, make_skeleton, num_layers, open_checkpoint, read_config
from exo_mesh_torch.trace import TorchLayerUse, TorchTrace, find_layers

_EMBEDDINGS = re.compile(r"(^|\.)embeddings\.")
_OTHER_HEADS = r"(^|\.)(pooler|cls|lm_head|head|decoder|predictions|classifier|pre_classifier|vocab_\w+)\."
"""Tensors of heads that do not take part in a vector; checkpoints of many embedding models still have them."""


class OpenEncoder:
    """A checkpoint with its model on the meta device. is_classifier: it gives scores, else states of all tokens."""

    def __init__(self, model_dir: Path, choose: Callable[[str], torch.dtype]) -> None:
        """choose: from the checkpoint's dtype. Raises ModelError naming file and key or tensor."""
        self.checkpoint = open_checkpoint(model_dir)
        self.config = read_config(self.checkpoint)
        self.is_classifier = is_classifier(read_json(self.checkpoint.config_file))
        dtype = choose(stored_dtype(self.checkpoint))
        self.model: Any = _skeleton(self.checkpoint, self.config, dtype, is_classifier=self.is_classifier)
        self.trace = _trace(self.model, num_layers(self.config), int(self.config.hidden_size), dtype)

    @property
    def vocab_size(self) -> int:
        return int(self.config.vocab_size)


def _skeleton(checkpoint: TorchCheckpoint, config: Any, dtype: torch.dtype, *, is_classifier: bool) -> Any:
    kind = AutoModelForSequenceClassification if is_classifier else AutoModel
    more = {} if is_classifier or not _takes_pooling(config) else {"add_pooling_layer": False}
    model: Any = make_skeleton(checkpoint, dtype, lambda: kind.from_config(config, dtype=dtype, **more))
    if not is_classifier:
        model._keys_to_ignore_on_load_unexpected = [*(model._keys_to_ignore_on_load_unexpected or ()), _OTHER_HEADS]
    return model


def _takes_pooling(config: Any) -> bool:
    """Whether the family's model makes a pooler by default."""
    return "add_pooling_layer" in inspect.signature(AutoModel._model_mapping[type(config)].__init__).parameters


def _trace(model: nn.Module, count: int, width: int, dtype: torch.dtype) -> TorchTrace:
    prefix, _ = find_layers(model, count)
    outside = {name for name, _ in model.named_parameters() if not name.startswith(f"{prefix}.")}
    first = frozenset(name for name in outside if _EMBEDDINGS.search(name))
    return TorchTrace(
        prefix=prefix,
        layers=tuple(TorchLayerUse(0, index) for index in range(count)),
        hidden_shape=(width,),
        hidden_dtype=dtype,
        streams=False,
        legal_cuts=tuple(range(1, count)),
        reason="",
        first=first,
        last=frozenset(outside - first),
        everywhere=frozenset(),
        caches=StageCache([]),
    )


class EncoderStage:
    """The layers `[start, stop)` of an opened encoder whose weights are loaded. Not re-entrant."""

    def __init__(self, opened: OpenEncoder, device: torch.device, start: int, stop: int) -> None:
        """Changes the model in place."""
        self._model, self._opened, self.device = opened.model, opened, device
        self.is_first, self.is_last = start == 0, stop == opened.trace.num_layers
        self._received: torch.Tensor | None = None
        self._takes_types = "token_type_ids" in inspect.signature(opened.model.forward).parameters
        _, layers = find_layers(opened.model, opened.trace.num_layers)
        for index, layer in enumerate(layers):
            if index < start:
                layer.forward = _pass_on
            elif index == start and start:
                layer.forward = self._first(layer.forward)
            elif index >= stop:
                layer.forward = _end
        if start:
            silence(opened.model, opened.trace.first, device)

    def forward(self, ids: Sequence[Sequence[int]], second: int, hidden: torch.Tensor | None) -> torch.Tensor:
        """Run texts of one length. second: see Row. hidden: `[texts, n, width]` from the previous stage.

        Returns the hidden state `[texts, n, width]`; on the last stage of a classifier scores `[texts, labels]`.
        """
        tokens = torch.tensor(ids, dtype=torch.long, device=self.device)
        more = {}
        if second and self._takes_types:
            types = (torch.arange(tokens.shape[1], device=self.device) >= second).long()
            more["token_type_ids"] = types.expand(tokens.shape).contiguous()
        self._received = hidden
        try:
            output = self._model(input_ids=tokens, **more)
        except StageEnd as end:
            return end.hidden
        finally:
            self._received = None
        result: torch.Tensor = output.logits if self._opened.is_classifier else output.last_hidden_state
        return result

    def close(self) -> None:
        """Remove the references to this object from inside the model, so that no reference cycle stays."""
        for module in self._model.modules():
            vars(module).pop("forward", None)
        self._model = None

    def _first(self, original: Any) -> Any:
        def forward(*args: Any, **kwargs: Any) -> Any:
            assert self._received is not None, "a stage behind the first is given a hidden state"
            args, kwargs = put_hidden(args, kwargs, self._received)
            return original(*args, **kwargs)

        return forward


def _pass_on(*args: Any, **kwargs: Any) -> torch.Tensor:
    """The forward of a layer before the stage."""
    return get_hidden(args, kwargs)


def _end(*args: Any, **kwargs: Any) -> Any:
    """The forward of a layer behind the stage."""
    raise StageEnd(get_hidden(args, kwargs))


def check_range(opened: OpenEncoder, start: int, stop: int, count: int) -> None:
    """Raises ModelError if a stage of `count` layers does not fit the model."""
    if opened.trace.num_layers != count:
        where = opened.checkpoint.model_dir
        raise ModelError(f"layers {start} to {stop - 1} of {count} do not fit: {where} has {opened.trace.num_layers}")


def open_encoder(model_dir: Path, choose: Callable[[str], torch.dtype]) -> OpenEncoder:
    """Open an encoder. Raises ModelError."""
    try:
        return OpenEncoder(model_dir, choose)
    except MeshError:
        raise
    except Exception as exc:  # configs and models may raise anything
        raise ModelError(f"{model_dir / 'config.json'}: {type(exc).__name__}: {one_line(exc)}") from exc
