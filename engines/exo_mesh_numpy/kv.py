"""Keys and values of one sequence on one stage."""

from __future__ import annotations

import numpy as np

KEY_BLOCK = 32
"""Positions that deterministic attention processes at once. Fixed, because it decides the order in which sums are
added."""

STEP = 2 * KEY_BLOCK
"""Positions by which the room grows. Moving n positions once in 64 tokens costs less than 2 % of reading them for each
token, and at most 63 positions of a sequence are unused."""


class SequenceKv:
    """The KV of one sequence. layers: for each layer float32 `[2 * kv_heads, capacity, head_dim]`, the heads of keys
    before those of values. capacity is a multiple of STEP, and grows as needed."""

    def __init__(self, num_layers: int, num_kv_heads: int, head_dim: int, max_tokens: int) -> None:
        self.num_kv_heads = num_kv_heads
        self.max_tokens = max_tokens
        self.length = 0
        self.num_bytes = 0
        self.layers = [np.zeros((2 * num_kv_heads, 0, head_dim), np.float32)] * num_layers

    def reserve(self, num_positions: int) -> None:
        """Make room for positions `[0, num_positions)`; existing values stay."""
        num_heads, capacity, head_dim = self.layers[0].shape
        if num_positions <= capacity:
            return
        grown = -(-num_positions // STEP) * STEP
        for index, old in enumerate(self.layers):
            # zeros, because deterministic attention multiplies the values beyond the end by zero
            self.layers[index] = np.zeros((num_heads, grown, head_dim), np.float32)
            self.layers[index][:, : self.length] = old[:, : self.length]
        self.num_bytes = len(self.layers) * num_heads * grown * head_dim * 4

    def take(self, other: SequenceKv, num_positions: int) -> None:
        """Begin with a copy of the first positions of another sequence of the same stage."""
        self.reserve(num_positions)
        for own, source in zip(self.layers, other.layers, strict=True):
            own[:, :num_positions] = source[:, :num_positions]
        self.length = num_positions

    def write(self, layer: int, pos0: int, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Write rows `[n, 2 * kv_heads, head_dim]`, keys before values, at positions from pos0 on, for which room must
        have been reserved. Returns the keys and the values of the layer, `[kv_heads, capacity, head_dim]` each."""
        held = self.layers[layer]
        held[:, pos0 : pos0 + len(rows)] = rows.transpose(1, 0, 2)
        return held[: self.num_kv_heads], held[self.num_kv_heads :]
