"""The forward pass of a stage's layers, for Llama, Mistral, Qwen2, Qwen3 and SmolLM3.

A *pass* takes at most `Kernels.max_tokens` tokens through all layers. All its rows share the products; only attention
runs sequence by sequence. Buffers have as many rows as `Kernels.padded` returns; rows beyond the tokens hold any finite
values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from exo_mesh_numpy.attention import Attention, FastAttention, TiledAttention
from exo_mesh_numpy.kernels import FastKernels, Kernels, TiledKernels
from exo_mesh_numpy.kv import SequenceKv
from exo_mesh_numpy.model_config import ModelConfig
from exo_mesh_numpy.rope import RopeTable, rotate
from exo_mesh_numpy.scratch import Scratch
from exo_mesh_numpy.weights import LayerWeights, Linear, StageWeights

CACHED_ROWS = 32
"""Rows whose gates are computed at once, so that the steps find them in the cache."""


class RowPiece(msgspec.Struct, frozen=True):
    """n tokens of one sequence from position pos0 on, in one pass. source: index of the first of them in the frame."""

    kv: SequenceKv
    pos0: int
    n: int
    source: int


class Decoder:
    """The layers of one stage. Mutates only the KV of the pieces that it gets."""

    def __init__(
        self, config: ModelConfig, weights: StageWeights, mode: str, before_layer: Callable[[], None] = lambda: None
    ) -> None:
        """mode: "fast" or "deterministic". before_layer: called before the products of each layer."""
        self._before_layer = before_layer
        self._config = config
        self._weights = weights
        self._scratch = Scratch()
        self._rope = RopeTable(config.rope)
        tiled = mode == "deterministic"
        self.kernels: Kernels = TiledKernels(self._scratch) if tiled else FastKernels()
        self._attention: Attention = (TiledAttention if tiled else FastAttention)(self._scratch)

    def buffer(self, num_tokens: int) -> np.ndarray:
        """Float32 `[padded, hidden]` for `run`; valid until the next call."""
        return self._scratch.take("hidden", self.kernels.padded(num_tokens), self._config.hidden_size)

    def run(self, hidden: np.ndarray, pieces: Sequence[RowPiece]) -> None:
        """Run `hidden`, a buffer filled with the tokens of the pieces in order, through all layers, in place."""
        positions = np.zeros(len(hidden), np.int64)
        begin = 0
        for piece in pieces:
            positions[begin : begin + piece.n] = np.arange(piece.pos0, piece.pos0 + piece.n)
            begin += piece.n
        cos, sin = self._rope.at(positions)
        for index, layer in enumerate(self._weights.layers):
            self._before_layer()
            self._attend(index, layer, hidden, cos, sin, pieces)
            self._feed_forward(layer, hidden)

    def logits(self, hidden: np.ndarray, wanted: np.ndarray) -> np.ndarray:
        """Float32 `[len(wanted), vocab]` of rows `wanted` (at least one) of `hidden`, in a new array."""
        assert self._weights.head is not None
        normed = self._final(hidden, wanted)
        out = np.empty((len(normed), len(self._weights.head)), np.float32)
        self.kernels.product(normed, self._weights.head, out)
        return out[: len(wanted)]

    def final_states(self, hidden: np.ndarray, wanted: np.ndarray) -> np.ndarray:
        """Float32 `[len(wanted), hidden]` after the last norm, of rows `wanted` (at least one), in a new array."""
        return self._final(hidden, wanted)[: len(wanted)].copy()

    def _final(self, hidden: np.ndarray, wanted: np.ndarray) -> np.ndarray:
        """The rows `wanted` after the last norm, in scratch, padded."""
        assert self._weights.norm is not None
        rows = self._scratch.take("wanted", self.kernels.padded(len(wanted)), hidden.shape[1])
        rows[: len(wanted)] = hidden[wanted]
        return self._norm(rows, self._weights.norm)

    def _attend(
        self,
        index: int,
        layer: LayerWeights,
        hidden: np.ndarray,
        cos: np.ndarray,
        sin: np.ndarray,
        pieces: Sequence[RowPiece],
    ) -> None:
        config, num_rows = self._config, len(hidden)
        turned = config.num_heads + config.num_kv_heads
        normed = self._norm(hidden, layer.input_norm)
        heads = self._linear("qkv", normed, layer.qkv).reshape(num_rows, -1, config.head_dim)
        if layer.qk_norm is not None:
            self._norm_heads(heads[:, :turned], layer.qk_norm)
        if layer.has_rope:
            rotate(heads[:, :turned], cos, sin, self._scratch.take("turned", num_rows, turned, config.head_dim))
        heads[:, : config.num_heads] *= np.float32(config.head_dim**-0.5)
        mixed = self._scratch.take("mixed", num_rows, config.num_heads, config.head_dim)
        begin = 0
        for piece in pieces:
            rows = heads[begin : begin + piece.n]
            keys, values = piece.kv.write(index, piece.pos0, rows[:, config.num_heads :])
            result = mixed[begin : begin + piece.n]
            self._attention.attend(rows[:, : config.num_heads], keys, values, piece.pos0, result)
            begin += piece.n
        hidden += self._linear("output", mixed.reshape(num_rows, -1), layer.output)

    def _feed_forward(self, layer: LayerWeights, hidden: np.ndarray) -> None:
        both = self._linear("gate_up", self._norm(hidden, layer.mlp_norm), layer.gate_up)
        width = both.shape[1] // 2
        active = self._scratch.take("active", len(hidden), width)
        for begin in range(0, len(hidden), CACHED_ROWS):
            rows = slice(begin, begin + CACHED_ROWS)
            _gate(both[rows, :width], both[rows, width:], active[rows])
        hidden += self._linear("down", active, layer.down)

    def _linear(self, name: str, rows: np.ndarray, linear: Linear) -> np.ndarray:
        """The product of rows and weights, `[rows, outputs]`, in the scratch buffer `name`."""
        out = self._scratch.take(name, len(rows), len(linear.weight))
        self.kernels.product(rows, linear.weight, out)
        if linear.bias is not None:
            out += linear.bias
        return out

    def _norm(self, rows: np.ndarray, weight: np.ndarray) -> np.ndarray:
        """RMS norm of each row, in scratch."""
        out = self._scratch.take("normed", *rows.shape)
        if len(rows) == 1:  # the same in fewer steps; only mode=fast has single rows
            mean = float(np.dot(rows[0], rows[0])) / rows.shape[1]
            np.multiply(rows, (mean + self._config.eps) ** -0.5, out=out)
            out *= weight
            return out
        np.multiply(rows, rows, out=out)
        np.divide(rows, self._root_mean(out), out=out)
        out *= weight
        return out

    def _norm_heads(self, heads: np.ndarray, weight: np.ndarray) -> None:
        """RMS norm of each head `[rows, heads, head_dim]`, in place."""
        squares = self._scratch.take("squares", *heads.shape)
        np.multiply(heads, heads, out=squares)
        heads /= self._root_mean(squares)
        heads *= weight

    def _root_mean(self, squares: np.ndarray) -> np.ndarray:
        """sqrt(mean + eps) over the last axis, which is kept with size 1. NumPy sums a row in an order that depends on
        its length alone."""
        size = squares.shape[-1]
        mean: np.ndarray = np.add.reduce(squares, axis=-1, keepdims=True, initial=size * self._config.eps)
        mean /= size
        np.sqrt(mean, out=mean)
        return mean


def _gate(gate: np.ndarray, up: np.ndarray, out: np.ndarray) -> None:
    """out = silu(gate) * up, with silu(x) = x / (1 + exp(-x))."""
    np.negative(gate, out=out)
    np.exp(out, out=out)
    out += 1
    np.divide(gate, out, out=out)
    out *= up
