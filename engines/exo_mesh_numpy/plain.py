"""A simple NumPy loop for one sequence of a Llama, with which `bench` compares this engine."""

from __future__ import annotations

import numpy as np

from exo_mesh_numpy.model_config import ModelConfig
from exo_mesh_numpy.weights import LayerWeights, StageWeights


class PlainLoop:
    """A whole model without biases and without norms of heads, as in textbooks: a new array for each step."""

    def __init__(self, config: ModelConfig, weights: StageWeights, max_tokens: int) -> None:
        self._config, self._weights = config, weights
        shape = (len(weights.layers), 2, config.num_kv_heads, max_tokens, config.head_dim)
        self._kv = np.zeros(shape, np.float32)

    def forward(self, ids: np.ndarray, pos0: int) -> np.ndarray:
        """Float32 logits `[vocab]` of the last of token ids `[n]`, at positions from pos0 on."""
        weights = self._weights
        assert weights.embedding is not None and weights.norm is not None and weights.head is not None
        hidden = weights.embedding[ids]
        angles = np.arange(pos0, pos0 + len(ids), dtype=np.float32)[:, None] * self._config.rope.inv_freq
        cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
        for layer, kv in zip(weights.layers, self._kv, strict=True):
            hidden = hidden + self._attend(layer, kv, self._norm(hidden, layer.input_norm), pos0, cos, sin)
            both = self._norm(hidden, layer.mlp_norm) @ layer.gate_up.weight.T
            gate, up = np.split(both, 2, axis=1)
            hidden = hidden + (gate / (1 + np.exp(-gate)) * up) @ layer.down.weight.T
        logits: np.ndarray = (self._norm(hidden[-1:], weights.norm) @ weights.head.T)[0]
        return logits

    def _norm(self, rows: np.ndarray, weight: np.ndarray) -> np.ndarray:
        mean = (rows * rows).mean(axis=-1, keepdims=True)
        normed: np.ndarray = rows / np.sqrt(mean + np.float32(self._config.eps)) * weight
        return normed

    def _attend(
        self, layer: LayerWeights, kv: np.ndarray, rows: np.ndarray, pos0: int, cos: np.ndarray, sin: np.ndarray
    ) -> np.ndarray:
        config, n = self._config, len(rows)
        heads = (rows @ layer.qkv.weight.T).reshape(n, -1, config.head_dim)
        ends = (config.num_heads, config.num_heads + config.num_kv_heads)
        queries, keys, values = np.split(heads, ends, axis=1)
        queries, keys = turn(queries, cos, sin), turn(keys, cos, sin)
        length = pos0 + n
        kv[0][:, pos0:length], kv[1][:, pos0:length] = keys.transpose(1, 0, 2), values.transpose(1, 0, 2)
        grouped = queries.reshape(n, config.num_kv_heads, -1, config.head_dim).transpose(1, 2, 0, 3)
        scores = grouped @ kv[0][:, None, :length].swapaxes(-1, -2) * np.float32(config.head_dim**-0.5)
        if n > 1:
            scores[..., -n:] += np.triu(np.full((n, n), -np.inf, np.float32), 1)
        scores = np.exp(scores - scores.max(axis=-1, keepdims=True))
        mixed = scores / scores.sum(axis=-1, keepdims=True) @ kv[1][:, None, :length]
        result: np.ndarray = mixed.transpose(2, 0, 1, 3).reshape(n, -1) @ layer.output.weight.T
        return result


def turn(heads: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    left, right = np.split(heads, 2, axis=-1)
    return np.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1)
