"""What each kind of cache keeps: its name, its bytes, and how it is cut back by the positions of drafts.

Windows and chunks hold the positions that they need then; of recurrent states, the state before each row with drafts is
kept. Only unjudged drafts cost something: without them the caches are mlx-lm's own, bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from copy import deepcopy
from typing import Any, NamedTuple

import mlx.core as mx
from mlx_lm.models import cache as mlx_caches

from exo_mesh.domain.frame import ANY_POSITION
from exo_mesh.engine.contract import COUNTED_STATES, CUT_POSITIONS, KvKind
from exo_mesh_mlx import tree


class Settled:
    """The number of positions of a sequence that no later row cuts back, and of the last row; one object for all caches
    of the sequence. It has no __dict__, so that it is not saved with them. sees_more: whether the model's code gives
    rows of several tokens a larger window than those of one."""

    __slots__ = ("length", "row", "sees_more")

    def __init__(self) -> None:
        self.length = self.row = 0
        self.sees_more = False


class WindowKVCache(mlx_caches.RotatingKVCache):  # type: ignore[misc]
    """A window that holds the window before the settled positions, too. Its keys are in order while drafts are
    unjudged, and rotate otherwise."""

    settled: Settled
    keys: Any
    values: Any

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        self.settled.row = num_tokens = keys.shape[2]
        if not self._is_in_order():
            fetched: tuple[mx.array, mx.array] = super().update_and_fetch(keys, values)
            return fetched
        needed = self.max_size - 1 + min(max(0, self.offset - self.settled.length), CUT_POSITIONS)
        self.keys = self._appended(self.keys, keys, needed)
        self.values = self._appended(self.values, values, needed)
        self.offset += num_tokens
        self._idx = self.keys.shape[2]
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """What the last row attends to."""
        first = self.keys.shape[2] - (self.max_size - 1 + self.settled.row)
        if self.offset < self.keys.shape[2] or first <= 0:
            whole: tuple[mx.array, mx.array] = super().keys_and_values()
            return whole
        return self.keys[..., first:, :], self.values[..., first:, :]

    def make_mask(self, N: int, window_size: int | None = None, return_array: bool = False) -> Any:
        if N > 1 and window_size is not None and window_size > self.max_size:
            self.settled.sees_more = True
        if N > 1 or not self._is_in_order():
            return super().make_mask(N, window_size=window_size, return_array=return_array)
        seen = min(self.offset + 1, self.max_size)
        return None if window_size is None or seen <= window_size else mx.arange(seen) >= seen - window_size

    def can_cut(self, surplus: int) -> bool:
        if self.offset < self.max_size:
            return bool(surplus <= self.offset)
        held = self.keys.shape[2]
        return bool(self._idx == held and held - surplus >= min(self.offset - surplus, self.max_size - 1) >= 0)

    def trim(self, n: int) -> int:
        if self.offset < self.max_size:
            return int(super().trim(n))
        held = self.keys.shape[2] - n
        self.keys, self.values = self.keys[..., :held, :], self.values[..., :held, :]
        self.offset -= n
        self._idx = held
        return n

    def _is_in_order(self) -> bool:
        """Whether the next positions go behind the others: there are drafts that a rotation would overwrite, or the
        window has been cut back."""
        if self.keys is None or self.offset < self.max_size:
            return False
        return bool(self.offset > self.settled.length or self.keys.shape[2] < self.max_size)

    def _appended(self, held: mx.array, new: mx.array, needed: int) -> mx.array:
        held = self._temporal_order(held)
        return mx.concatenate([held[..., max(0, held.shape[2] - needed) :, :], new], axis=2)


class ChunkKVCache(mlx_caches.ChunkedKVCache):  # type: ignore[misc]
    """A chunk that holds the beginning of the chunk of the settled positions, too."""

    settled: Settled
    keys: Any
    values: Any

    def maybe_trim_front(self) -> None:
        if self.keys is None:
            return
        valid, first = self.offset - self.start_position, self.settled.length - self.settled.length % self.chunk_size
        if (surplus := min(valid - self.chunk_size, first - self.start_position)) > 0:
            self.start_position += surplus
            self.keys = self.keys[..., surplus:valid, :]
            self.values = self.values[..., surplus:valid, :]

    def can_cut(self, surplus: int) -> bool:
        length = self.offset - surplus
        return bool(length >= 0 and self.start_position <= length - length % self.chunk_size)


def parts_of(entries: Iterable[Any]) -> list[Any]:
    """The entries, those that consist of several caches taken apart."""
    return [part for entry in entries for part in getattr(entry, "caches", None) or (entry,)]


def is_state(part: Any) -> bool:
    """Whether a cache cannot drop its last positions, but only return to an earlier state: each row replaces it."""
    if isinstance(part, WindowKVCache | ChunkKVCache):
        return False
    return type(part) is mlx_caches.RotatingKVCache or not part.is_trimmable()


def can_cut(part: Any, surplus: int) -> bool:
    """Whether a cache that is no state can drop its last positions."""
    if isinstance(part, WindowKVCache | ChunkKVCache):
        return part.can_cut(surplus)
    return bool(surplus <= part.offset)


def rollback_of(full: Sequence[Any]) -> tuple[int, bool]:
    """How many of the last positions sequences with such caches can be cut back, however long they are, and whether
    only to where a row began."""
    parts = parts_of(full)
    windows = ("max_size", "chunk_size")
    if not any(is_state(part) or any(hasattr(part, name) for name in windows) for part in parts):
        return ANY_POSITION, False
    return CUT_POSITIONS, any(is_state(part) and not _can_be_window(part) for part in parts)


def _can_be_window(part: Any) -> bool:
    """Whether it is a window without positions at its beginning that always stay."""
    return type(part) is mlx_caches.RotatingKVCache and not part.keep


class CachePast(NamedTuple):
    length: int
    states: list[dict[str, Any]]


class Pasts:
    """What one sequence keeps to be cut back."""

    def __init__(self, entries: Iterable[Any]) -> None:
        """Makes the windows and chunks among the entries hold what they need, in place."""
        self.settled = Settled()
        self._kept: list[CachePast] = []
        self._states: list[Any] = []
        for part in parts_of(entries):
            if _can_be_window(part):
                part.__class__ = WindowKVCache
            elif type(part) is mlx_caches.ChunkedKVCache:
                part.__class__ = ChunkKVCache
            if isinstance(part, WindowKVCache | ChunkKVCache):
                part.settled = self.settled
            elif is_state(part):
                self._states.append(part)

    def expect(self, length: int, *, drafted: bool, may_be_refused: bool) -> None:
        """Prepare for a row that begins at `length`, where the caches end; see Row."""
        least = length - CUT_POSITIONS
        self.settled.length = max(self.settled.length, least) if drafted else length
        self._kept = [past for past in self._kept if drafted and least <= past.length < length]
        if may_be_refused and self._states:
            # an array may be changed in place, and a copy of it is no other memory until then
            self._kept.append(CachePast(length, [deepcopy(vars(state)) for state in self._states]))

    def reaches(self, length: int) -> bool:
        """Whether the states can return to `length`."""
        return not self._states or any(past.length == length for past in self._kept)

    def go_back(self, length: int) -> None:
        """Bring the states to `length`, which is reached."""
        self.settled.length = min(self.settled.length, length)
        for past in self._kept:
            if past.length == length:
                for state, was in zip(self._states, past.states, strict=True):
                    vars(state).update(was)
        self._kept = [past for past in self._kept if past.length < length]


_ORDER: tuple[KvKind, ...] = ("full", "window", "chunked", "latent", "recurrent")


def kv_kinds(entries: Sequence[Any]) -> tuple[KvKind, ...]:
    """The kinds of cache entries after at least one forward, each once."""
    found = {kind for entry in entries for kind in _kinds(entry)}
    return tuple(kind for kind in _ORDER if kind in found)


def kv_bytes(entry: Any, num_tokens: int) -> tuple[int, int]:
    """(bytes per position, bytes per sequence of any length) of an entry after num_tokens positions."""
    per_token = fixed = 0
    for part in parts_of([entry]):
        if isinstance(part, mlx_caches.ArraysCache):
            fixed += (1 + COUNTED_STATES) * sum(array.nbytes for _, array in tree.arrays(part.cache))
        elif isinstance(part, mlx_caches.RotatingKVCache):
            fixed += (part.max_size + CUT_POSITIONS) * _position_bytes(part.keys, part.values)
        elif isinstance(part, mlx_caches.ChunkedKVCache):
            fixed += (part.chunk_size + CUT_POSITIONS) * _position_bytes(part.keys, part.values)
        elif isinstance(getattr(part, "keys", None), mx.array):
            per_token += _position_bytes(part.keys, part.values)
        else:
            window = getattr(part, "window", None)
            own = [array for _, array in tree.arrays(part.state) if array is not window and array.ndim]
            per_token += -(-sum(array.nbytes for array in own) // num_tokens)
            fixed += 0 if window is None else part.window_size * _position_bytes(window)
    return per_token, fixed


def _kinds(entry: Any) -> Iterator[KvKind]:
    for part in parts_of([entry]):
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
