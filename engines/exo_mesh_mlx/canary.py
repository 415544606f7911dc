"""Checks that a tensor group computes the same as one machine.

A prompt goes through the group in small steps of layers. The leader also computes each step alone, from the same
inputs, with unsplit layers that it reads for this and drops again. The prompt is longer than two prefill chunks,
because groups over RDMA were seen to go wrong there without an error.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import msgspec
import numpy as np
from mlx.utils import tree_map
from mlx_lm.models.cache import make_prompt_cache

from exo_mesh.engine.contract import GroupCheck, LoadProgress
from exo_mesh.errors import CanaryError, EngineError
from exo_mesh_mlx import packets, wire
from exo_mesh_mlx.caches import SequenceCache, plan_caches
from exo_mesh_mlx.cuts import why_not
from exo_mesh_mlx.ghost import MlxGhostStage, Packet
from exo_mesh_mlx.ranks import Ranks
from exo_mesh_mlx.trace import MlxTrace
from exo_mesh_mlx.whole import WholeStage, whole_layout

TOLERANCE = {"float32": 1e-3, "float16": 1e-2, "bfloat16": 5e-2}
"""Largest distance of a token's result in one step, as a vector, from one machine's result, relative to the length of
the latter. Both have the same inputs, so only rounding may differ (measured: docs/how-it-works/tensor-groups.md)."""

ROUTED_SHARE = 1 / 8
"""Share of the tokens of a chunk that may be further off if a layer chooses among experts: rounding changes a choice
that was nearly even, and then that token has another result."""

PART_TOKENS, DECODE_STEPS, LOGITS = 64, 8, 8


class _Chunk(msgspec.Struct):
    """Tokens of one forward. packet: their values after the steps so far. group_s: seconds that the group has computed
    them."""

    tokens: list[int]
    packet: Packet
    group_s: float = 0.0
    alone_s: list[float] = msgspec.field(default_factory=list)
    """For each step of one layer: seconds on the leader alone."""


class Canary:
    """The check. Runs once, on all ranks at the same time. Leaves the model without hooks."""

    def __init__(
        self, model: nn.Module, reference: nn.Module, trace: MlxTrace | None, ranks: Ranks, layers: tuple[int, int]
    ) -> None:
        """model: this rank's, split. reference: the same model unsplit, lazy. layers: `[start, stop)` of the stage."""
        self._model: Any = model
        self._reference: Any = reference
        self._trace, self._ranks = trace, ranks
        self._start, self._stop = layers
        self._worst = 0.0
        self._complaint = ""
        self._kv_heads = 0

    def run(self, vocab_size: int, context_limit: int, chunk_tokens: int, progress: LoadProgress) -> GroupCheck:
        """Run the check. Raises CanaryError on every rank, with layers and difference, if the group computes other
        results."""
        reduces = (self._ranks.all_reduce_s(), self._ranks.reduce_bytes_per_s())
        chunks = self._chunks(vocab_size, context_limit, chunk_tokens)
        steps = list(self._steps())
        for index, (start, stop) in enumerate(steps):
            progress(index, len(steps))
            self._step(start, stop, chunks)
            (failed,) = self._ranks.of_leader([float(bool(self._complaint))])
            if failed:
                raise CanaryError(self._complaint or f"the leader finds that layers {start} to {stop - 1} are wrong")
        progress(len(steps), len(steps))
        alone_layer_s = _median([seconds for chunk in chunks[4:] for seconds in chunk.alone_s])
        # the first chunk also reads the layer
        figures = (max(chunk.group_s for chunk in chunks), alone_layer_s, _median(chunks[1].alone_s), self._worst)
        all_reduce_s, bytes_per_s, chunk_s, layer_s, alone_chunk_s, worst = self._ranks.of_leader((*reduces, *figures))
        return GroupCheck(all_reduce_s, bytes_per_s, chunk_s, layer_s, alone_chunk_s, worst, self._kv_heads)

    def _chunks(self, vocab_size: int, context_limit: int, chunk_tokens: int) -> list[_Chunk]:
        """Two whole chunks, a part of a third, and decode steps; all smaller if the context is."""
        room = context_limit - DECODE_STEPS
        if room < 3:
            raise EngineError(f"a context of {context_limit} positions is too short to check a tensor group with")
        chunk = min(chunk_tokens, max(1, (room - 1) // 2))
        sizes = [chunk, chunk, min(PART_TOKENS, chunk, room - 2 * chunk), *[1] * DECODE_STEPS]
        begins = np.cumsum([0, *sizes])
        tokens = [(7919 * place + 13) % max(2, vocab_size) for place in range(int(begins[-1]))]
        shape = self._trace.live_values(self._start) if self._trace is not None and self._start else ()
        return [
            _Chunk(tokens[begin : begin + n], _noise(packets.zeros(shape, 1, n), int(begin)))
            for begin, n in zip(begins, sizes, strict=False)
        ]

    def _steps(self) -> Iterator[tuple[int, int]]:
        """The stage's layers from each legal cut to the next: single layers, in nearly all models."""
        trace, start = self._trace, self._start
        inner = range(self._start + 1, self._stop) if trace is not None else ()
        for cut in inner:
            if trace is not None and not why_not(self._reference, trace, cut):
                yield start, cut
                start = cut
        yield start, self._stop

    def _step(self, start: int, stop: int, chunks: list[_Chunk]) -> None:
        """Advance all chunks through layers `[start, stop)` of the group; on the leader, compare."""
        results = list(self._through(self._model, start, stop, chunks))
        if self._ranks.is_leader:
            errors: list[tuple[int, np.ndarray, str]] = []
            expected = self._through(self._reference, start, stop, chunks)
            for place, (ours, theirs) in enumerate(zip(results, expected, strict=True)):
                errors += [(place, error, dtype) for error, dtype in _errors(ours, theirs)]
            routed = _chooses(self._reference.layers[start:stop])
            self._judge(start, stop, errors, routed=routed)
            _let_go(self._reference.layers[start:stop])
        for chunk, result in zip(chunks, results, strict=True):
            chunk.packet = {} if isinstance(result, mx.array) else result
        gc.collect()  # a hooked model and its layers refer to each other
        mx.clear_cache()

    def _through(self, model: Any, start: int, stop: int, chunks: list[_Chunk]) -> Iterator[mx.array | Packet]:
        """Results of the chunks, evaluated, one after the other over one cache."""
        full, trace = make_prompt_cache(model), self._trace
        layout = whole_layout(full) if trace is None else plan_caches(trace, full, start, stop)
        stage: MlxGhostStage | WholeStage = WholeStage(model)
        if trace is not None:
            stage = MlxGhostStage(model, trace, start, stop)
        cache = SequenceCache(full, layout)
        try:
            for chunk in chunks:
                began = time.perf_counter()
                n = len(chunk.tokens)
                ids = mx.array([chunk.tokens], mx.int32)
                result = stage.forward(ids, cache.full, chunk.packet, min(n, LOGITS))
                cache.advance(n)
                if isinstance(result, mx.array):
                    result = result[:, -LOGITS:]
                mx.eval(result, cache.arrays())
                took_s = time.perf_counter() - began
                if model is self._model:
                    chunk.group_s += took_s
                    self._kv_heads = max(self._kv_heads, cache.kv_heads())
                elif stop - start == 1:
                    chunk.alone_s.append(took_s)
                yield result
        finally:
            stage.close()

    def _judge(self, start: int, stop: int, errors: list[tuple[int, np.ndarray, str]], *, routed: bool) -> None:
        """Record an error if the results are too far apart. Decode steps count as one chunk."""
        by_chunk: dict[tuple[int, str], list[np.ndarray]] = {}
        for place, error, dtype in errors:
            by_chunk.setdefault((min(place, 3), dtype), []).append(error)
        for (place, dtype), parts in by_chunk.items():
            error = np.concatenate(parts)
            self._worst = max(self._worst, float(error.max()))
            allowed = int(len(error) * ROUTED_SHARE) if routed else 0
            off = int((~(error <= TOLERANCE[dtype])).sum())
            if off > allowed and not self._complaint:
                self._complaint = (
                    f"layers {start} to {stop - 1} of the tensor group and of one machine differ: {off} of "
                    f"{len(error)} tokens of chunk {place + 1} by more than {TOLERANCE[dtype]}, the worst by "
                    f"{float(error.max()):.3g} of its length"
                )


def _median(seconds: Sequence[float]) -> float:
    return statistics.median(seconds) if seconds else 0.0


def _noise(packet: Packet, seed: int) -> Packet:
    """Random values in place of earlier stages: the same on every rank."""
    made: Packet = {}
    for source, array in packet.items():
        if not mx.issubdtype(array.dtype, mx.floating):
            made[source] = array
            continue
        values = np.random.Generator(np.random.Philox(seed)).standard_normal(array.shape, np.float32)
        made[source] = mx.array(values).astype(array.dtype)
    return made


def _errors(ours: mx.array | Packet, theirs: mx.array | Packet) -> Iterator[tuple[np.ndarray, str]]:
    """For each floating value float32 `[tokens]`: distance from `theirs`, relative to its length; infinite if only one
    of the two is finite."""
    pairs: list[tuple[mx.array, mx.array]] = []
    if isinstance(ours, dict) and isinstance(theirs, dict):
        pairs = [(ours[source], array) for source, array in theirs.items()]
    elif isinstance(ours, mx.array) and isinstance(theirs, mx.array):
        pairs = [(ours, theirs)]
    for mine, other in pairs:
        if mx.issubdtype(other.dtype, mx.floating):
            yield _distance(mine, other), wire.dtype_name(other.dtype)


def _distance(mine: mx.array, other: mx.array) -> np.ndarray:
    """The distance per token; tokens are the axis before the last."""
    a, b = (array.astype(mx.float32).reshape(-1, array.shape[-1]) for array in (mine, other))
    number = mx.isfinite(b)
    alike = (mx.isfinite(a) == number).all(axis=-1)
    a, b = mx.where(number, a, 0.0), mx.where(number, b, 0.0)
    length = mx.maximum(mx.linalg.norm(b, axis=-1), 1e-20)
    apart = mx.where(alike, mx.linalg.norm(a - b, axis=-1) / length, mx.array(np.inf, mx.float32))
    mx.eval(apart)
    return np.array(apart)


def _chooses(layers: Sequence[nn.Module]) -> bool:
    """Whether some of these layers choose among experts."""
    return any("Switch" in type(module).__name__ for layer in layers for module in layer.modules())


def _let_go(layers: Sequence[nn.Module]) -> None:
    """Drop the weights that were read of layers that are not needed again."""
    for layer in layers:
        layer.update(tree_map(_unread, layer.parameters()))


def _unread(value: Any) -> Any:
    return mx.zeros(value.shape, value.dtype) if isinstance(value, mx.array) else value
