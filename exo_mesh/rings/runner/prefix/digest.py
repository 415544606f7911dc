"""Makes the digest of what a ring keeps, which entry peers compare with their prompts. Pure."""

from __future__ import annotations

import heapq

import msgspec

from exo_mesh.domain.routing.digest import (
    MAX_ENTRIES,
    MOST_BLOCKS,
    SALT_BYTES,
    entry_of,
    hashes_at,
    pack,
    sampled_counts,
)
from exo_mesh.rings.runner.prefix.cache import KeptSequence, PrefixCache
from exo_mesh.rings.runner.prefix.index import BLOCK_TOKENS

EVERY_S = 2.0
"""Minimum time between two digests: entry peers hear of a new one about a second later anyway."""

MOST_HASHED, MOST_HASHED_BYTES = 32, 1 << 20
"""Most sequences, and most bytes of their tokens, that are hashed for one digest, about 1 ms each. The rest is hashed
for the next digest."""


class DigestMaker(msgspec.Struct):
    """Makes the digest of one cache. salt: random bytes of this driver, SALT_BYTES of them.

    The sequences that were used last come first. Sequences of a scope of their own are not in it, and requests that
    store nothing are not in the cache.
    """

    cache: PrefixCache
    salt: bytes
    digest: bytes = b""
    """The last one made; b"" if nothing is kept."""
    _made_of: int = 0
    _made_at: float = float("-inf")
    _entries: dict[tuple[int, int], list[bytes]] = msgspec.field(default_factory=dict)
    """By sequence and length: its entries, the entry of its end first. Only of sequences in the last digest."""

    def __post_init__(self) -> None:
        if len(self.salt) != SALT_BYTES:
            raise ValueError(f"a salt has {SALT_BYTES} bytes, not {len(self.salt)}")

    def is_due(self, now: float) -> bool:
        """Whether the cache has changed since the last digest, and that one is old enough. From any thread."""
        return self.cache.changes != self._made_of and now - self._made_at >= EVERY_S

    def make(self, now: float) -> bytes:
        """Make the digest of this moment. now: seconds of any one clock."""
        self._made_of, self._made_at = self.cache.changes, now
        shared = (one for one in self.cache.sequences() if not one.scope and not one.last_stages)
        chosen = heapq.nlargest(MAX_ENTRIES, shared, key=lambda one: one.used_at)
        num_hashed, hashed_bytes = 0, 0
        entries: dict[tuple[int, int], list[bytes]] = {}
        for one in chosen:
            key = one.id, one.length
            if (found := self._entries.get(key)) is None:
                is_too_much = num_hashed == MOST_HASHED or hashed_bytes + len(one.content) > MOST_HASHED_BYTES
                if num_hashed and is_too_much:
                    self._made_of = -1  # so that the next digest has it
                    continue
                num_hashed, hashed_bytes = num_hashed + 1, hashed_bytes + len(one.content)
                found = self._hash(one)
            entries[key] = found
        self._entries = entries
        ends = [found[0] for found in entries.values() if found]
        parts = [entry for found in entries.values() for entry in found[1:]]
        half = MAX_ENTRIES // 2
        self.digest = pack(self.salt, dict.fromkeys([*ends[:half], *parts, *ends[half:]]))
        return self.digest

    def _hash(self, kept: KeptSequence) -> list[bytes]:
        """The entries of a sequence. Where KV cannot be cut back, only all of it can be used."""
        num_blocks = min(kept.length // BLOCK_TOKENS, MOST_BLOCKS)
        counts = sampled_counts(num_blocks) if self.cache.cuts_back else [num_blocks]
        hashes = hashes_at(kept.content, counts)
        return [entry_of(self.salt, count, one) for count, one in zip(counts, hashes, strict=True)][::-1]
