"""Determines the kinds of KV of a model's caches, and their bytes per position and per sequence."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models import cache as mlx_caches

from exo_mesh.engine.contract import KvKind
from exo_mesh_mlx import tree

_ORDER: tuple[KvKind, ...] = ("full", "window", "chunked", "latent", "recurrent")


def kv_kinds(entries: Sequence[Any]) -> tuple[KvKind, ...]:
    """The kinds of cache entries after at least one forward, each once."""
    found = {kind for entry in entries for kind in _kinds(entry)}
    return tuple(kind for kind in _ORDER if kind in found)


def kv_bytes(entry: Any, num_tokens: int) -> tuple[int, int]:
    """(bytes per position, bytes per sequence of any length) of an entry after num_tokens positions."""
    per_token = fixed = 0
    for part in _parts(entry):
        if isinstance(part, mlx_caches.ArraysCache):
            fixed += sum(array.nbytes for _, array in tree.arrays(part.cache))
        elif isinstance(part, mlx_caches.RotatingKVCache):
            fixed += part.max_size * _position_bytes(part.keys, part.values)
        elif isinstance(part, mlx_caches.ChunkedKVCache):
            fixed += part.chunk_size * _position_bytes(part.keys, part.values)
        elif isinstance(getattr(part, "keys", None), mx.array):
            per_token += _position_bytes(part.keys, part.values)
        else:
            window = getattr(part, "window", None)
            own = [array for _, array in tree.arrays(part.state) if array is not window and array.ndim]
            per_token += -(-sum(array.nbytes for array in own) // num_tokens)
            fixed += 0 if window is None else part.window_size * _position_bytes(window)
    return per_token, fixed


def _kinds(entry: Any) -> Iterator[KvKind]:
    for part in _parts(entry):
        if isinstance(part, mlx_caches.RotatingKVCache):
            yield "window"
        elif isinstance(part, mlx_caches.ChunkedKVCache):
            yield "chunked"
        elif isinstance(part, mlx_caches.ArraysCache):
            yield "recurrent"
        elif hasattr(part, "window"):  # a window beside keys and values of groups of positions
            yield "window"
            yield "latent"
        else:
            yield "latent" if _is_latent(part) else "full"


def _parts(entry: Any) -> Sequence[Any]:
    return getattr(entry, "caches", None) or (entry,)


def _position_bytes(*arrays: mx.array) -> int:
    """Bytes of one position in arrays `[1, .., positions, width]`."""
    return sum(array.nbytes // array.shape[-2] for array in arrays)


def _is_latent(part: Any) -> bool:
    """Whether a part is of multi-head latent attention: only that keeps one narrow head, whose two arrays differ in
    width."""
    keys, values = getattr(part, "keys", None), getattr(part, "values", None)
    if not isinstance(keys, mx.array) or not isinstance(values, mx.array):
        return False
    return bool(keys.shape[1] == 1 and keys.shape[-1] != values.shape[-1])
