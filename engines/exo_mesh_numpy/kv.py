"""Keys and values of one sequence on one stage; several sequences can hold the first part together."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import numpy as np

from exo_mesh.engine.contract import LEAST_SHARED as LEAST_SHARED

KEY_BLOCK = 32
"""Positions that deterministic attention processes at once. Fixed, because it decides the order in which sums are
added."""

STEP = 2 * KEY_BLOCK
"""Positions by which the room grows. Moving n positions once in 64 tokens costs less than 2 % of reading them for each
token, and at most 63 positions of a sequence are unused."""

_serials = itertools.count()


class SharedKv:
    """Keys and values of some positions that several sequences hold together. They never change. layers: for each layer
    float32 `[2 * kv_heads, length, head_dim]`. holders: the number of sequences."""

    def __init__(self, layers: list[np.ndarray]) -> None:
        self.serial = next(_serials)
        self.layers = layers
        self.length = layers[0].shape[1]
        self.num_bytes = sum(layer.nbytes for layer in layers)
        self.holders = 0


class Assembly:
    """Puts the parts of a sequence's layer together for attention, in one buffer for all sequences of a stage.

    Sequences that share their first part usually follow each other in a frame: then only the rest is copied.
    """

    def __init__(self) -> None:
        self._buffer = np.zeros((0, 0, 0), np.float32)
        self._holds: tuple[int, ...] = ()

    def whole(self, index: int, parts: Iterable[SharedKv], rest: np.ndarray, shared: int) -> np.ndarray:
        """`[2 * kv_heads, shared + capacity, head_dim]` of layer `index`; valid until the next call. rest: the
        sequence's own `[2 * kv_heads, capacity, head_dim]`."""
        heads, capacity, head_dim = rest.shape
        stop = shared + capacity
        if self._buffer.shape[1] < stop:
            self._buffer = np.zeros((heads, stop + stop // 4, head_dim), np.float32)
            self._holds = ()
        wanted = (index, *(part.serial for part in parts))
        if self._holds != wanted:
            at = 0
            for part in parts:
                self._buffer[:, at : at + part.length] = part.layers[index]
                at += part.length
            self._holds = wanted
        self._buffer[:, shared:stop] = rest
        return self._buffer[:, :stop]


class SequenceKv:
    """The KV of one sequence: `parts` that it may share with others, then its own `layers`. layers: for each layer
    float32 `[2 * kv_heads, capacity, head_dim]`, the heads of keys before those of values. shared: positions of all
    parts; shared + capacity is a multiple of STEP, and grows as needed."""

    def __init__(
        self, num_layers: int, num_kv_heads: int, head_dim: int, max_tokens: int, assembly: Assembly | None = None
    ) -> None:
        self.num_kv_heads = num_kv_heads
        self.max_tokens = max_tokens
        self.length = 0
        self.num_bytes = 0
        """Bytes of `layers`; shared parts count once for all their sequences."""
        self.shared = 0
        self.parts: tuple[SharedKv, ...] = ()
        self.layers = [np.zeros((2 * num_kv_heads, 0, head_dim), np.float32)] * num_layers
        self._assembly = assembly or Assembly()

    def begin_row(self, pos0: int, n: int) -> None:
        """Cut the sequence back to position pos0, and make room for n more, which count as held from now on."""
        if self.parts and (pos0 < self.shared or all(part.holders == 1 for part in self.parts)):
            self._own(pos0)
        self.reserve(pos0 + n)
        self.length = pos0 + n

    def reserve(self, num_positions: int) -> None:
        """Make room for positions `[0, num_positions)`; existing values stay."""
        if num_positions > self.shared + self.layers[0].shape[1]:
            self._make_room(num_positions, max(0, self.length - self.shared))

    def _make_room(self, num_positions: int, held: int) -> None:
        """held: own positions that stay."""
        num_heads, _, head_dim = self.layers[0].shape
        capacity = -(-num_positions // STEP) * STEP - self.shared
        for index, old in enumerate(self.layers):
            # zeros, because deterministic attention multiplies the values beyond the end by zero
            self.layers[index] = np.zeros((num_heads, capacity, head_dim), np.float32)
            self.layers[index][:, :held] = old[:, :held]
        self.num_bytes = len(self.layers) * num_heads * capacity * head_dim * 4

    def take(self, other: SequenceKv, num_positions: int) -> None:
        """Begin with the first positions of another sequence of the same stage; they are shared if they are many."""
        self._hold(other.share(num_positions))
        self.reserve(num_positions)
        for index, own in enumerate(self.layers):
            own[:, : num_positions - self.shared] = other.values(index, self.shared, num_positions)
        self.length = num_positions

    def share(self, num_positions: int) -> tuple[SharedKv, ...]:
        """Parts with the first positions of this sequence, not all of them perhaps, that others may hold too. Moves its
        own values into a part if they are many."""
        own = min(num_positions, self.length) - self.shared
        if own >= LEAST_SHARED:
            part = SharedKv([layer[:, :own].copy() for layer in self.layers])
            self.layers = [layer[:, own:] for layer in self.layers]
            self._hold((*self.parts, part))
            self._make_room(self.length, self.length - self.shared)
        stops = itertools.accumulate(part.length for part in self.parts)
        return tuple(part for part, stop in zip(self.parts, stops, strict=True) if stop <= num_positions)

    def values(self, index: int, start: int, stop: int) -> np.ndarray:
        """A copy of positions `[start, stop)` of a layer, `[2 * kv_heads, stop - start, head_dim]`."""
        pieces, at = [], 0
        for part in self.parts:
            pieces.append(part.layers[index][:, max(0, start - at) : max(0, stop - at)])
            at += part.length
        pieces.append(self.layers[index][:, max(0, start - at) : max(0, stop - at)])
        return np.concatenate(pieces, axis=1)

    def write(self, layer: int, pos0: int, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Write rows `[n, 2 * kv_heads, head_dim]`, keys before values, at positions from pos0 on, for which room must
        have been reserved. Returns the keys and the values of the layer, `[kv_heads, room, head_dim]` each, valid until
        the next call for any sequence."""
        held, at = self.layers[layer], pos0 - self.shared
        held[:, at : at + len(rows)] = rows.transpose(1, 0, 2)
        if self.parts:
            held = self._assembly.whole(layer, self.parts, held, self.shared)
        return held[: self.num_kv_heads], held[self.num_kv_heads :]

    def release(self) -> None:
        """Give the shared parts up: the sequence ends."""
        self._hold(())

    def _hold(self, parts: tuple[SharedKv, ...]) -> None:
        for part in parts:
            part.holders += 1
        for part in self.parts:
            part.holders -= 1
        self.parts, self.shared = parts, sum(part.length for part in parts)

    def _own(self, num_positions: int) -> None:
        """Copy the first positions into own memory as far as they are in parts that end beyond them, or that no other
        sequence holds."""
        stops = itertools.accumulate(part.length for part in self.parts)
        is_alone = all(part.holders == 1 for part in self.parts)
        kept = () if is_alone else tuple(p for p, stop in zip(self.parts, stops, strict=True) if stop <= num_positions)
        start = sum(part.length for part in kept)
        own = [self.values(index, start, num_positions) for index in range(len(self.layers))]
        self._hold(kept)
        self.layers, self.length = own, num_positions
        self._make_room(max(1, num_positions), num_positions - start)
