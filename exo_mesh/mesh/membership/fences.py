"""Remembers deleted instances: up to which ballot each instance id is void, on every peer. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import msgspec

from exo_mesh.domain.plan import NO_BALLOT, Ballot

FENCE_S = 24 * 3600.0
"""How long a deletion is remembered: a laptop that slept overnight must not restore a deleted instance."""

MAX_FENCES = 10_000
"""Most deletions that are remembered; the oldest are dropped first. Each takes about 100 bytes on the wire."""

LEAP = 1_000_000
"""How far above the highest known ballot a deletion reaches. A disconnected peer may meanwhile place or recover the
same instance by ballots unknown here; each placement raises the counter by one."""

_MAX_ID, _MAX_PROPOSER, _MAX_COUNTER = 128, 64, 2**62


class Fence(msgspec.Struct, frozen=True):
    """One deletion: ballots of this instance up to `ballot` are void. left_s: remaining time for which it is
    remembered."""

    instance_id: str
    ballot: Ballot
    left_s: float

    @property
    def is_plausible(self) -> bool:
        """Whether the values are in range; a peer may send anything."""
        return (
            0 < len(self.instance_id) <= _MAX_ID
            and 0 < len(self.ballot.proposer) <= _MAX_PROPOSER
            and 0 < self.ballot.counter < _MAX_COUNTER
            and 0 < self.left_s <= FENCE_S
        )


class _Held(msgspec.Struct, frozen=True):
    ballot: Ballot
    noted_at: float
    until: float


class Fences:
    """The deletions that a peer knows. A higher ballot of an id replaces a lower one, so merging commutes and repeats
    change nothing. Times are seconds of any monotonic clock, passed by the caller.

    `sum` is 64 bits over ids and ballots: peers with equal sums hold the same deletions.
    """

    def __init__(self) -> None:
        self._held: dict[str, _Held] = {}
        self.sum = 0

    def __len__(self) -> int:
        return len(self._held)

    def add(self, fence: Fence, now: float) -> bool:
        """Store a deletion; False if it is known already or not plausible."""
        held = self._held.get(fence.instance_id)
        if not fence.is_plausible or (held is not None and held.ballot >= fence.ballot):
            return False
        self._drop(fence.instance_id)
        self._held[fence.instance_id] = _Held(fence.ballot, now, now + fence.left_s)
        self.sum ^= _hash(fence.instance_id, fence.ballot)
        if len(self._held) > MAX_FENCES:
            self._drop(min(self._held, key=lambda name: self._held[name].until))
        return True

    def ballot(self, instance_id: str) -> Ballot:
        """The highest void ballot of an instance; NO_BALLOT if it was not deleted."""
        held = self._held.get(instance_id)
        return NO_BALLOT if held is None else held.ballot

    def covers(self, instance_id: str, ballot: Ballot) -> bool:
        """Whether the instance with this ballot was deleted."""
        return ballot <= self.ballot(instance_id)

    def noted_since(self, instance_id: str, since: float) -> bool:
        """Whether this peer has learnt since `since` that the instance was deleted."""
        held = self._held.get(instance_id)
        return held is not None and held.noted_at >= since

    def all(self, now: float) -> Iterator[Fence]:
        """The deletions to send to other peers, each with its remaining time."""
        for instance_id, held in self._held.items():
            if held.until > now:
                yield Fence(instance_id, held.ballot, held.until - now)

    def expire(self, now: float) -> None:
        """Drop the deletions whose time has ended."""
        for instance_id in [name for name, held in self._held.items() if held.until <= now]:
            self._drop(instance_id)

    def _drop(self, instance_id: str) -> None:
        held = self._held.pop(instance_id, None)
        if held is not None:
            self.sum ^= _hash(instance_id, held.ballot)


def _hash(instance_id: str, ballot: Ballot) -> int:
    text = f"{instance_id}\n{ballot.counter}\n{ballot.proposer}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest())
