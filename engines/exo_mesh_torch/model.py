"""A model opened for cutting, and the part of it that a stage runs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from inspect import signature
from pathlib import Path
from typing import Any

import msgspec
import torch
from msgspec.structs import replace

from exo_mesh.engine.contract import KvKind
from exo_mesh.errors import MeshError, ModelError
from exo_mesh.weights.gguf import BLOCK_SIZES
from exo_mesh.weights.model_files import read_json
from exo_mesh.weights.safetensors import TensorTable
from exo_mesh_torch.batches import Batch
from exo_mesh_torch.caches import CachePlan, StageCache
from exo_mesh_torch.errors import one_line
from exo_mesh_torch.families import GRID_POSITIONS
from exo_mesh_torch.ghost import TorchGhostStage
from exo_mesh_torch.image_rows import ShownImage, grid_positions, overlaps, overlay, two_way_masks
from exo_mesh_torch.parts import check_taken, withdraw
from exo_mesh_torch.skeleton import TorchCheckpoint, build_skeleton, num_layers, open_checkpoint, read_config
from exo_mesh_torch.trace import TorchTrace, find_layers, trace_model
from exo_mesh_torch.vision import has_tower

_FLOATS = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}

_LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")
"""Rotary embeddings whose frequencies follow from the longest row of a batch."""


class OpenModel(msgspec.Struct, frozen=True):
    """A checkpoint with its model on the meta device, and the trace of its layers."""

    checkpoint: TorchCheckpoint
    config: Any
    model: Any
    trace: TorchTrace
    caches: CachePlan

    @property
    def takes_images(self) -> bool:
        return has_tower(self.checkpoint)

    @property
    def batchable(self) -> bool:
        """Whether rows of different lengths may share a forward, padded on the left."""
        recurrent_only = all("recurrent" in kinds or not kinds for kinds in self.caches.kinds)
        takes_positions = "position_ids" in signature(self.model.forward).parameters
        return self.caches.batchable and not _ropes(self.config) and (takes_positions or recurrent_only)

    def kinds(self, index: int) -> tuple[KvKind, ...]:
        """The kinds of KV of layer `index`. Latent, if one row of the width of kv_lora_rank stands for all heads."""
        kinds = self.caches.kinds[index]
        buffers = list(self.trace.caches.layers[self.trace.layers[index].like].tensors())
        rank = _layer_setting(self.config, index, "kv_lora_rank")
        if rank and kinds == ("full",) and any(b.ndim == 4 and b.shape[1] == 1 and b.shape[3] >= rank for b in buffers):
            return ("latent",)
        return kinds

    def check_range(self, start: int, stop: int) -> None:
        """Raises ModelError if start or stop is not a legal cut."""
        for cut in (start, stop):
            if 0 < cut < self.trace.num_layers and cut not in self.trace.legal_cuts:
                reason = self.trace.reason or "later layers use keys and values of earlier ones"
                raise ModelError(f"{self.checkpoint.model_dir} cannot be cut before layer {cut}: {reason}")


def open_model(model_dir: Path, context_limit: int, choose: Callable[[str], torch.dtype]) -> OpenModel:
    """Read config and headers, build the model without weights and trace it. choose: from the checkpoint's dtype.
    Raises ModelError naming file and key or tensor."""
    checkpoint = open_checkpoint(model_dir)
    config = read_config(checkpoint)
    model = build_skeleton(checkpoint, config, choose(stored_dtype(checkpoint)))
    try:
        caches = CachePlan(config, context_limit)
        trace = trace_model(model, num_layers(config), caches)
        return OpenModel(checkpoint, config, model, _behind_deep_layers(trace, checkpoint), caches)
    except MeshError:
        raise
    except Exception as exc:  # configs, caches and models may raise anything
        raise ModelError(
            f"the torch engine cannot run {type(model).__name__}: its code in transformers fails in a run "
            f"without weights ({type(exc).__name__}: {one_line(exc)})"
        ) from exc


def _behind_deep_layers(trace: TorchTrace, checkpoint: TorchCheckpoint) -> TorchTrace:
    """The trace without cuts before the layers behind which rows of the vision tower are added: only the first stage
    has these rows."""
    vision = read_json(checkpoint.config_file).get("vision_config")
    deep = vision.get("deepstack_visual_indexes") if isinstance(vision, dict) and has_tower(checkpoint) else None
    if not isinstance(deep, list) or not deep:
        return trace
    cuts = tuple(cut for cut in trace.legal_cuts if cut >= len(deep))
    return replace(trace, legal_cuts=cuts, reason=trace.reason or f"its first {len(deep)} layers need the vision tower")


def stored_dtype(checkpoint: TorchCheckpoint) -> str:
    """The dtype of most floating-point elements; of quantised weights, of their scales. Blocks of GGUF files, whose
    scales are within them, count as bfloat16."""
    counts = _count_floats(checkpoint.table)
    if not counts:
        return "bfloat16"
    return counts.most_common(1)[0][0]


def _count_floats(table: TensorTable) -> Counter[str]:
    counts: Counter[str] = Counter()
    for info in table.values():
        if info.dtype in _FLOATS:
            counts[_FLOATS[info.dtype]] += info.num_bytes // (4 if info.dtype == "F32" else 2)
        elif BLOCK_SIZES.get(info.dtype, (1, 1))[0] > 1:
            counts["bfloat16"] += math.prod(info.shape)
    return counts


def _layer_setting(config: Any, index: int, name: str) -> Any:
    """A setting of layer `index`; None if there is none. Some configs have settings that differ by layer, and refuse to
    give one for all."""
    by_layer = getattr(config, "is_heterogeneous", False)
    return getattr(config.per_layer_config[index] if by_layer else config, name, None)


def _ropes(config: Any) -> bool:
    """Whether some layer has frequencies that follow from the longest row."""
    rope = getattr(config, "rope_parameters", None) or {}
    parts = [rope, *(part for part in rope.values() if isinstance(part, dict))]
    return any(part.get("rope_type") in _LENGTH_DEPENDENT_ROPE for part in parts)


class StageModel:
    """The layers `[start, stop)` of an opened model whose weights are loaded."""

    def __init__(self, opened: OpenModel, device: torch.device, start: int, stop: int) -> None:
        _, layers = find_layers(opened.model, opened.trace.num_layers)
        self._opened = opened
        self._stage = TorchGhostStage(opened.model, layers, opened.trace, start, stop, device)
        self.device = device
        self.layers = range(start, stop)
        self.hidden_shape = opened.trace.hidden_shape
        self.hidden_dtype = opened.trace.hidden_dtype
        self.vocab_size = int(opened.config.vocab_size)
        self.takes_images = opened.takes_images
        self._counts_in_grids = opened.checkpoint.model_type in GRID_POSITIONS
        self._has_attention = any(kind != "recurrent" for kinds in opened.caches.kinds for kind in kinds)

    @property
    def is_first(self) -> bool:
        return self.layers.start == 0

    @property
    def is_last(self) -> bool:
        return self.layers.stop == self._opened.trace.num_layers

    @property
    def rollback(self) -> int:
        return self._opened.caches.rollback(self.layers)

    @property
    def kv_kinds(self) -> tuple[KvKind, ...]:
        return tuple(dict.fromkeys(kind for i in self.layers for kind in self._opened.kinds(i)))

    def new_cache(self) -> StageCache:
        return self._opened.caches.new()

    def run(
        self,
        ids: Sequence[Sequence[int]],
        batch: Batch,
        hidden: torch.Tensor | None,
        num_logits: int,
        images: Mapping[int, Sequence[ShownImage]],
        *,
        wants_states: bool = False,
    ) -> torch.Tensor:
        """Append one row of ids per row of the batch, all of the same length; see TorchGhostStage.forward. images: of
        the sequences that have some; a row with image tokens is alone in its batch."""
        tokens = torch.tensor(ids, dtype=torch.long, device=self.device)
        num_tokens = tokens.shape[1]
        lengths = torch.tensor(batch.lengths, dtype=torch.long, device=self.device)[:, None]
        positions = lengths + torch.arange(num_tokens, device=self.device)
        mask: torch.Tensor | dict[str, torch.Tensor | None] | None = self._mask(batch, num_tokens)
        shown = images.get(batch.sequences[0], ())
        over = None
        if images and self._counts_in_grids:
            rows = zip(batch.sequences, batch.lengths, strict=True)
            grids = [grid_positions(images.get(sequence, ()), length, num_tokens) for sequence, length in rows]
            positions = torch.stack(grids, 1).to(self.device)
        if shown and overlaps(shown, batch.length, num_tokens):
            over = overlay(shown, batch.length, num_tokens, self.device) if self.is_first else None
            if any(image.spec.is_whole for image in shown):
                like = torch.empty((1, num_tokens, 1), dtype=self.hidden_dtype, device=self.device)
                mask = two_way_masks(self._opened.config, shown, batch.length, num_tokens, batch.cache, like)
        withdraw()  # what an error has left
        result = self._stage.forward(
            tokens,
            positions,
            mask,
            batch.cache,
            hidden,
            num_logits if self.is_last else 0,
            over,
            wants_states=wants_states,
        )
        check_taken()
        batch.lengths = [length + num_tokens for length in batch.lengths]
        return result

    def close(self) -> None:
        self._stage.close()

    def _mask(self, batch: Batch, num_tokens: int) -> torch.Tensor | None:
        """`[rows, past + n]`, 0 at the padding of shorter rows, which is between their parts and their own positions;
        None if there is no padding."""
        own = batch.own_lengths
        if min(map(sum, zip(batch.cache.shared, own, strict=True))) == batch.length or not self._has_attention:
            return None
        columns = torch.arange(batch.length + num_tokens, device=self.device)
        begins = torch.tensor([batch.length - length for length in own], device=self.device)[:, None]
        shared = torch.tensor(batch.cache.shared, device=self.device)[:, None]
        return ((columns >= begins) | (columns < shared)).long()
