"""Keys and values of one sequence on one stage."""

from __future__ import annotations

import numpy as np

KEY_BLOCK = 32
"""Positions that deterministic attention takes at once. Fixed, as it decides the order in which sums are added."""

STEP = 2 * KEY_BLOCK
"""Positions that room is made for at once. Moving n positions each 64 tokens costs less than 2 % of reading them for
each token, and never more than 63 positions of a sequence lie idle."""


class SequenceKv:
    """Per layer float32 `[kv_heads, capacity, head_dim]`; capacity is a multiple of STEP, and grows as needed."""

    def __init__(self, num_layers: int, num_kv_heads: int, head_dim: int, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self.length = 0
        empty = np.zeros((num_kv_heads, 0, head_dim), np.float32)
        self.keys = [empty] * num_layers
        self.values = [empty] * num_layers
        self.num_bytes = 0

    def reserve(self, num_positions: int) -> None:
        """Make room for positions `[0, num_positions)`; what was there stays."""
        num_heads, capacity, head_dim = self.keys[0].shape
        if num_positions <= capacity:
            return
        grown = -(-num_positions // STEP) * STEP
        for arrays in (self.keys, self.values):
            for layer, old in enumerate(arrays):
                # zeros, as deterministic attention multiplies what lies beyond the end by zero
                arrays[layer] = np.zeros((num_heads, grown, head_dim), np.float32)
                arrays[layer][:, : self.length] = old[:, : self.length]
        self.num_bytes = 2 * len(self.keys) * num_heads * grown * head_dim * 4

    def write(self, layer: int, pos0: int, keys: np.ndarray, values: np.ndarray) -> None:
        """Put keys and values `[n, kv_heads, head_dim]` at positions from pos0 on; room must have been reserved."""
        span = slice(pos0, pos0 + len(keys))
        self.keys[layer][:, span] = keys.transpose(1, 0, 2)
        self.values[layer][:, span] = values.transpose(1, 0, 2)
