"""The MLX StageEngine: rows in, activations or logits out, a KV cache per sequence. All on the calling thread."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from exo_mesh.domain.frame import Fault, Row
from exo_mesh.domain.shard import Shard
from exo_mesh.domain.tensor import Tensor
from exo_mesh.engine.contract import (
    UNKNOWN_STAGE,
    Capabilities,
    LoadProgress,
    LoadRequest,
    StageInput,
    StageOutput,
    row_defect,
)
from exo_mesh.errors import EngineError, MeshError, ModelError
from exo_mesh_mlx import packets, wire
from exo_mesh_mlx.caches import CacheLayout, SequenceCache, can_always_trim, plan_caches
from exo_mesh_mlx.ghost import GhostStage, Packet
from exo_mesh_mlx.loading import Checkpoint, build_model, open_checkpoint, read_layers, trace_checkpoint
from exo_mesh_mlx.trace import Trace
from exo_mesh_mlx.whole import WholeStage, whole_layout

BUFFER_CACHE_BYTES = 256 * 2**20
"""What MLX may keep of freed buffers for reuse: a few prefill chunks' activations, not a second model."""

WARM_UP_SEQUENCE = -1


@dataclass(slots=True)
class _Sequence:
    cache: SequenceCache
    max_tokens: int


class MlxStage:
    """Rows of any lengths may share a forward; they are computed one after the other, each with its own cache."""

    capabilities = Capabilities(ragged=True, rollback="any", dtypes=wire.ACTIVATION_DTYPES)

    def __init__(self) -> None:
        self._stage: GhostStage | WholeStage | None = None
        self._model: Any = None
        self._layout = CacheLayout((), ())
        self._sequences: dict[int, _Sequence] = {}
        self._vocab_size = 0

    def load(self, request: LoadRequest, progress: LoadProgress) -> None:
        mx.set_cache_limit(BUFFER_CACHE_BYTES)
        shard = request.shard
        checkpoint = open_checkpoint(request.model_dir)
        trace = self._trace(checkpoint, shard)
        self._model = build_model(checkpoint)
        if len(self._model.layers) != shard.num_layers:
            raise EngineError(f"{shard} does not fit: {request.model_dir} has {len(self._model.layers)} layers")
        full = make_prompt_cache(self._model)
        if not can_always_trim(full):
            self.capabilities = Capabilities(ragged=True, rollback="none", dtypes=wire.ACTIVATION_DTYPES)
        self._vocab_size = checkpoint.vocab_size
        if trace is None:
            self._layout, self._stage = whole_layout(full), WholeStage(self._model)
        else:
            self._layout = plan_caches(trace, full, shard.start, shard.stop)
            self._stage = GhostStage(self._model, trace, shard.start, shard.stop)
        read_layers(self._model, shard.start, shard.stop, progress)
        self._warm_up(shard, request.model_dir)

    def insert(self, sequence: int, max_tokens: int) -> None:
        self._sequences.setdefault(sequence, _Sequence(self._new_cache(), max_tokens))

    def forward(self, stage_input: StageInput) -> StageOutput:
        stage = self._loaded()
        if not stage_input.rows:
            return StageOutput(logits=None if stage.outputs else np.zeros((0, self._vocab_size), np.float32))
        try:
            received = packets.unpack(stage.inputs, stage_input.tensors, [row.n for row in stage_input.rows])
            results: list[Packet | mx.array | None] = []
            faults: dict[int, Fault] = {}
            begin = 0
            for row, packet in zip(stage_input.rows, received, strict=True):
                tokens = stage_input.token_ids[begin : begin + row.n]
                begin += row.n
                defect = "poisoned earlier in this frame" if row.sequence in faults else self._prepare(row, tokens)
                if defect:
                    faults.setdefault(row.sequence, Fault(row.sequence, UNKNOWN_STAGE, "bad_row", defect))
                    results.append(None)
                else:
                    ids = mx.array(np.asarray(tokens, np.int32))[None]
                    results.append(stage.forward(ids, self._sequences[row.sequence].cache, packet, row.num_logits))
            return self._output(stage_input.rows, results, tuple(faults.values()))
        except MeshError:
            raise
        except Exception as exc:  # model code and mlx raise anything
            raise EngineError(f"mlx failed in a forward of {len(stage_input.rows)} rows: {exc}") from exc

    def remove(self, sequence: int) -> None:
        self._sequences.pop(sequence, None)

    def sequences(self) -> Sequence[int]:
        return list(self._sequences)

    def memory_bytes(self) -> int:
        return int(mx.get_active_memory())

    def close(self) -> None:
        self._sequences.clear()
        if self._stage is not None:
            self._stage.close()
        self._stage = self._model = None
        mx.clear_cache()

    def _trace(self, checkpoint: Checkpoint, shard: Shard) -> Trace | None:
        """How to cut the model; None for a model that cannot be cut and need not be."""
        try:
            return trace_checkpoint(checkpoint)
        except ModelError:
            if shard.is_first and shard.is_last:
                return None
            raise

    def _loaded(self) -> GhostStage | WholeStage:
        if self._stage is None:
            raise EngineError("the stage is not loaded")
        return self._stage

    def _new_cache(self) -> SequenceCache:
        self._loaded()
        return SequenceCache(make_prompt_cache(self._model), self._layout)

    def _prepare(self, row: Row, tokens: Sequence[int]) -> str | None:
        """Bring the KV of the row's sequence to pos0; why it cannot be done, or None."""
        held = self._sequences.get(row.sequence)
        defect = row_defect(row, None if held is None else held.cache.length, 0 if held is None else held.max_tokens)
        if defect or held is None:
            return defect
        if self._vocab_size and not 0 <= min(tokens) <= max(tokens) < self._vocab_size:
            return f"a token id is outside 0..{self._vocab_size - 1}"
        if row.pos0 == 0 and held.cache.length:
            held.cache = self._new_cache()
        elif not held.cache.cut_back(row.pos0):
            return f"this KV cache cannot be cut back from {held.cache.length} to {row.pos0} positions"
        return None

    def _output(
        self, rows: Sequence[Row], results: Sequence[Packet | mx.array | None], faults: tuple[Fault, ...]
    ) -> StageOutput:
        """Evaluate results and the caches of all rows at once, and copy the results out."""
        stage = self._loaded()
        touched = sorted({row.sequence for row in rows} & self._sequences.keys())
        states = [array for sequence in touched for array in self._sequences[sequence].cache.arrays()]
        if stage.outputs:
            sizes = [row.n for row in rows]
            packed = packets.pack(stage.outputs, [None if isinstance(r, mx.array) else r for r in results], sizes)
            mx.eval(packed, states)
            return StageOutput(tensors={key: wire.to_tensor(array) for key, array in packed.items()}, faults=faults)
        wanted = [self._last_logits(row, result) for row, result in zip(rows, results, strict=True) if row.num_logits]
        mx.eval(wanted, states)
        width = wanted[0].shape[-1] if wanted else self._vocab_size
        logits = [np.array(array) for array in wanted] or [np.zeros((0, width), np.float32)]
        return StageOutput(logits=np.concatenate(logits), faults=faults)

    def _last_logits(self, row: Row, result: Packet | mx.array | None) -> mx.array:
        """float32 `[num_logits, vocab]`; zeros for a row that was not computed."""
        if isinstance(result, mx.array):
            return result[0, -row.num_logits :].astype(mx.float32)
        return mx.zeros((row.num_logits, self._vocab_size), mx.float32)

    def _warm_up(self, shard: Shard, model_dir: Path) -> None:
        """One forward over zeros: reads embedding or head where needed, builds kernels, shows that the cut works."""
        stage = self._loaded()
        tensors: Mapping[str, Tensor] = {}
        if stage.inputs:
            zeros = {value.source: mx.zeros(value.shape, value.dtype) for value in stage.inputs}
            packed = packets.pack(stage.inputs, [zeros], [1])
            tensors = {key: wire.to_tensor(array) for key, array in packed.items()}
        self.insert(WARM_UP_SEQUENCE, 1)
        try:
            self.forward(StageInput((Row(WARM_UP_SEQUENCE, 0, 1, 1),), (0,), tensors))
        except EngineError as exc:
            raise ModelError(f"{shard} of {model_dir} cannot run as a stage: {exc}") from exc
        self.remove(WARM_UP_SEQUENCE)
        mx.clear_cache()
