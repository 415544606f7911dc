"""Causal attention of one sequence's new queries over its keys and values, in the two modes.

Queries come scaled by head_dim ** -0.5. Head h of the queries uses head h // (heads / kv_heads) of keys and values.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import numpy as np

from exo_mesh_numpy.kernels import TILE
from exo_mesh_numpy.kv import KEY_BLOCK
from exo_mesh_numpy.scratch import Scratch

MAX_SCORES = 2**22
"""Scores held at once (16 MiB); longer contexts process fewer heads, then fewer queries at once."""

MAX_QUERIES = 64
"""Queries processed at once: no key after the last query is used, and the scores stay in the cache."""

LARGE_GROUP = 4
"""Query heads per kv head from which BLAS is faster with all of them as a matrix than with each as a vector."""


class Attention(Protocol):
    def attend(self, queries: np.ndarray, keys: np.ndarray, values: np.ndarray, pos0: int, out: np.ndarray) -> None:
        """Compute attention into `out`. queries, out: float32 `[n, heads, head_dim]` of positions from pos0 on. keys,
        values: `[kv_heads, capacity, head_dim]`, filled up to position pos0 + n."""


def _shares(queries: np.ndarray, num_kv_heads: int, pos0: int) -> Iterator[tuple[slice, slice]]:
    """(kv heads, queries) to process at once, so that there are never many more than MAX_SCORES scores."""
    num_queries, num_heads, _ = queries.shape
    per_query = num_heads // num_kv_heads * (pos0 + num_queries)
    heads = min(num_kv_heads, max(1, MAX_SCORES // (per_query * num_queries)))
    step = max(1, min(MAX_QUERIES, MAX_SCORES // (per_query * heads)))
    for first in range(0, num_kv_heads, heads):
        for begin in range(0, num_queries, step):
            yield slice(first, min(first + heads, num_kv_heads)), slice(begin, min(begin + step, num_queries))


def _query_heads(kv_heads: slice, queries: np.ndarray, num_kv_heads: int) -> slice:
    """The query heads that use these kv heads."""
    group = queries.shape[1] // num_kv_heads
    return slice(kv_heads.start * group, kv_heads.stop * group)


class FastAttention:
    """Attention over all keys at once."""

    def __init__(self, scratch: Scratch) -> None:
        self._scratch = scratch

    def attend(self, queries: np.ndarray, keys: np.ndarray, values: np.ndarray, pos0: int, out: np.ndarray) -> None:
        for heads, part in _shares(queries, len(keys), pos0):
            length = pos0 + part.stop
            mine = _query_heads(heads, queries, len(keys))
            self._attend(queries[part, mine], keys[heads, :length], values[heads, :length], out[part, mine])

    def _attend(self, queries: np.ndarray, keys: np.ndarray, values: np.ndarray, out: np.ndarray) -> None:
        num_queries, _, head_dim = queries.shape
        num_kv_heads, length, _ = keys.shape
        grouped: np.ndarray
        result: np.ndarray
        if num_queries == 1 and queries.shape[1] < LARGE_GROUP * num_kv_heads:
            self._attend_once(queries[0], keys, values, out[0])
            return
        if num_queries == 1:
            # all query heads of a kv head at once
            grouped = queries.reshape(num_kv_heads, -1, head_dim)
            result = out.reshape(grouped.shape)
        else:
            shape = (num_queries, num_kv_heads, -1, head_dim)
            grouped, result = (array.reshape(shape).transpose(1, 2, 0, 3) for array in (queries, out))
            keys, values = keys[:, None], values[:, None]
        scores = self._scratch.take("scores", *grouped.shape[:-1], length)
        np.matmul(grouped, keys.swapaxes(-1, -2), out=scores)
        if num_queries > 1:
            future = np.triu(np.ones((num_queries, num_queries), bool), 1)
            np.copyto(scores[..., -num_queries:], -np.inf, where=future)
        scores -= scores.max(axis=-1, keepdims=True)
        np.exp(scores, out=scores)
        np.matmul(scores, values, out=result)
        result /= scores.sum(axis=-1, keepdims=True)

    def _attend_once(self, query: np.ndarray, keys: np.ndarray, values: np.ndarray, out: np.ndarray) -> None:
        """Attention of one query `[heads, head_dim]`, as a product of a matrix and a vector for each head."""
        num_kv_heads, length, head_dim = keys.shape
        grouped = query.reshape(num_kv_heads, -1, head_dim, 1)
        scores = self._scratch.take("scores", *grouped.shape[:2], length)
        np.matmul(keys[:, None], grouped, out=scores[..., None])
        scores -= scores.max(axis=-1, keepdims=True)
        np.exp(scores, out=scores)
        result = out.reshape(num_kv_heads, -1, 1, head_dim)
        np.matmul(scores[:, :, None], values[:, None], out=result)
        result /= scores.sum(axis=-1, keepdims=True)[..., None]


class TiledAttention:
    """Attention in fixed tiles. Queries are SIMD lanes of tiles of 16, keys come in blocks of 32 that are added up in
    order.

    Blocks beyond a query's own position add exact zeros to it, so its bits depend on its own keys alone.
    """

    def __init__(self, scratch: Scratch) -> None:
        self._scratch = scratch

    def attend(self, queries: np.ndarray, keys: np.ndarray, values: np.ndarray, pos0: int, out: np.ndarray) -> None:
        for heads, part in _shares(queries, len(keys), pos0):
            mine = _query_heads(heads, queries, len(keys))
            self._attend(queries[part, mine], keys[heads], values[heads], pos0 + part.start, out[part, mine])

    def _attend(self, queries: np.ndarray, keys: np.ndarray, values: np.ndarray, pos0: int, out: np.ndarray) -> None:
        num_queries, num_heads, head_dim = queries.shape
        num_kv_heads = len(keys)
        group = num_heads // num_kv_heads
        lanes = self._lanes(queries, num_kv_heads)
        num_tiles = lanes.shape[1]
        num_blocks = -(-(pos0 + num_queries) // KEY_BLOCK)
        keys, values = (
            array[:, : num_blocks * KEY_BLOCK].reshape(num_kv_heads, 1, num_blocks, KEY_BLOCK, head_dim)
            for array in (keys, values)
        )
        scores = self._scratch.take("scores", num_kv_heads, num_tiles, num_blocks, KEY_BLOCK, TILE)
        np.matmul(keys, lanes[:, :, None].swapaxes(-1, -2), out=scores)
        self._hide_future(scores, pos0, group, num_queries)
        scores -= scores.max(axis=(2, 3), keepdims=True)
        np.exp(scores, out=scores)
        weights = np.add.reduce(scores, axis=3)
        total = np.zeros((num_kv_heads, num_tiles, TILE), np.float32)
        result = np.zeros((num_kv_heads, num_tiles, head_dim, TILE), np.float32)
        part = np.empty_like(result)
        for block in range(num_blocks):
            total += weights[:, :, block]
            np.matmul(values[:, :, block].swapaxes(-1, -2), scores[:, :, block], out=part)
            result += part
        result /= total[:, :, None]
        rows = result.swapaxes(-1, -2).reshape(num_kv_heads, -1, head_dim)[:, : num_queries * group]
        shape = (num_kv_heads, num_queries, group, head_dim)
        out.reshape(num_queries, num_kv_heads, group, head_dim)[...] = rows.reshape(shape).swapaxes(0, 1)

    def _lanes(self, queries: np.ndarray, num_kv_heads: int) -> np.ndarray:
        """`[kv_heads, tiles, 16, head_dim]`: (query, head of its group) one after the other, then zeros."""
        num_queries, num_heads, head_dim = queries.shape
        used = num_queries * num_heads // num_kv_heads
        lanes = self._scratch.take("lanes", num_kv_heads, -(-used // TILE) * TILE, head_dim)
        grouped = queries.reshape(num_queries, num_kv_heads, -1, head_dim).swapaxes(0, 1)
        lanes[:, :used] = grouped.reshape(num_kv_heads, used, head_dim)
        lanes[:, used:] = 0
        return lanes.reshape(num_kv_heads, -1, TILE, head_dim)

    def _hide_future(self, scores: np.ndarray, pos0: int, group: int, num_queries: int) -> None:
        """Set scores of positions after a lane's query to -inf. Lanes without a query count as the last one."""
        num_tiles, num_blocks = scores.shape[1:3]
        first = pos0 // KEY_BLOCK
        lane = np.arange(num_tiles * TILE) // group
        position = (pos0 + np.minimum(lane, num_queries - 1)).reshape(num_tiles, 1, 1, TILE)
        key = np.arange(first * KEY_BLOCK, num_blocks * KEY_BLOCK).reshape(-1, KEY_BLOCK, 1)
        np.copyto(scores[:, :, first:], -np.inf, where=key > position)
