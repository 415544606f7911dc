"""Queue of updates still to be gossiped, each a limited number of times. Pure."""

from __future__ import annotations

import math
from collections.abc import Hashable
from typing import Generic, TypeVar

import msgspec

MAX_ITEMS = 1024
"""Most updates waiting at once; the most often sent update is dropped first."""

Key = TypeVar("Key", bound=Hashable)


def retransmissions(num_others: int) -> int:
    """How often one peer passes one update on: 3 log2(n) times reaches every peer with high probability (SWIM, 4.1)."""
    return math.ceil(3 * math.log2(num_others + 2))


class _Item(msgspec.Struct):
    num_sent: int
    left: int


class GossipQueue(Generic[Key]):
    """Queue of keys, each sent a limited number of times, least-sent first. Putting a key again restarts its count."""

    def __init__(self) -> None:
        self._items: dict[Key, _Item] = {}

    def __len__(self) -> int:
        return len(self._items)

    def put(self, key: Key, times: int) -> None:
        """Send `key` this many times from now on."""
        self._items.pop(key, None)
        if len(self._items) >= MAX_ITEMS:
            del self._items[max(self._items, key=lambda one: self._items[one].num_sent)]
        if times > 0:
            self._items[key] = _Item(0, times)

    def take(self, most: int) -> list[Key]:
        """Up to `most` keys for one message, counted as sent."""
        chosen = sorted(self._items, key=lambda one: self._items[one].num_sent)[:most]
        for key in chosen:
            item = self._items[key]
            item.num_sent += 1
            item.left -= 1
            if item.left <= 0:
                del self._items[key]
        return chosen

    def drop(self, key: Key) -> None:
        self._items.pop(key, None)
