"""Decides which layers of a stage go onto the GPUs of the library, from the bytes that are free there. Pure."""

from __future__ import annotations

import bisect
from collections.abc import Sequence

import msgspec

FREE_SHARE = 0.9
"""Share of a GPU's free bytes that a stage plans with: drivers take memory of their own, and it is in pieces."""

RESERVE_BYTES = 256 * 2**20
"""Free bytes of each GPU that are left to the buffers of a forward pass: 128 MiB of attention scores at most, and as
much for the other results."""

OUT_OF_MEMORY = ("memory", "alloc", "buffer")
"""Words of the library's errors for a device that is full."""

_LEVELS = 2**16
"""How finely several GPUs are filled alike: to a multiple of this part of their room."""


class StageNeeds(msgspec.Struct, frozen=True):
    """The bytes that a stage needs on a device. layers[i]: of its layer i, with the keys and values of the longest
    sequence. head: of the logits; 0 before the last stage."""

    layers: tuple[int, ...]
    head: int = 0


class Offload(msgspec.Struct, frozen=True):
    """How many layers go onto GPUs. llama.cpp takes the head first, which counts as a layer, then layers from the last
    one on. shares: how many of them each GPU takes, those of the first GPU before those of the second; () lets
    llama.cpp divide them by the free bytes."""

    layers: int = 0
    shares: tuple[int, ...] = ()


def share_layers(needs: StageNeeds, free_bytes: Sequence[int], most: int | None = None) -> Offload:
    """As many layers as fit on GPUs with so many free bytes, at most `most`. GPUs are filled alike as far as possible,
    because every further sequence takes as much again for its keys and values."""
    rooms = [max(0, int(FREE_SHARE * free) - RESERVE_BYTES) for free in free_bytes]
    sizes = (*needs.layers, needs.head)
    if most is not None:
        sizes = sizes[max(0, len(sizes) - most) :]
    count = sum(_filled(sizes, rooms))
    if count <= (needs.head == 0):  # before the last stage the head is nothing
        return Offload()

    def at(level: int) -> tuple[int, ...]:
        return _filled(sizes, [room * level // _LEVELS for room in rooms])

    return Offload(count, at(bisect.bisect_left(range(_LEVELS), count, key=lambda level: sum(at(level)))))


def _filled(sizes: Sequence[int], rooms: Sequence[int]) -> tuple[int, ...]:
    """How many of the last sizes each room takes if the last room is filled first. No other way places more."""
    shares, left = [0] * len(rooms), len(sizes)
    for index in reversed(range(len(rooms))):
        room = rooms[index]
        while room > 0 and left and sizes[left - 1] <= room:
            left -= 1
            room -= sizes[left]
            shares[index] += 1
    return tuple(shares)


def attempts(needs: StageNeeds, free_bytes: Sequence[int]) -> tuple[Offload, ...]:
    """What to try, one after another as long as a GPU is full: all layers that should fit, half of them, none."""
    first = share_layers(needs, free_bytes)
    return tuple(dict.fromkeys((first, share_layers(needs, free_bytes, first.layers // 2), Offload())))


def is_full(error: str) -> bool:
    """Whether an error of the library says that a device has no memory left."""
    return any(word in error.lower() for word in OUT_OF_MEMORY)
