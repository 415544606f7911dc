"""The last refused peers and the reasons, for troubleshooting discovery."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

MAX_REFUSALS = 16

REFUSED_S = 60.0
"""How long a refusal is shown after the last attempt. An address that is suggested repeatedly is dialled at least every
10 s (detector.py, Backoff), so an ongoing refusal stays and one that is no longer attempted disappears."""


class _Refusal(msgspec.Struct, frozen=True):
    text: str
    peer_id: str
    address: str


class Refusals:
    """The latest refusal of each kind; the oldest ones are dropped. peer_id or address may be "" if unknown."""

    def __init__(self) -> None:
        self._until: dict[_Refusal, float] = {}

    def note(self, who: str, reason: str, now: float, *, peer_id: str = "", address: str = "") -> bool:
        """Record a refusal; True if it was not recorded yet."""
        self._forget_old(now)
        refusal = _Refusal(f"{who}: {reason}", peer_id, address)
        is_news = refusal.text not in self.texts(now)
        self._until.pop(refusal, None)
        self._until[refusal] = now + REFUSED_S
        if len(self._until) > MAX_REFUSALS:
            del self._until[next(iter(self._until))]
        return is_news

    def joined(self, peer_id: str, addresses: Iterable[str]) -> None:
        """Drop the refusals of a peer that was admitted."""
        known = set(addresses)
        for one in [one for one in self._until if one.peer_id == peer_id or one.address in known]:
            del self._until[one]

    def texts(self, now: float) -> list[str]:
        """The current refusals, oldest first."""
        self._forget_old(now)
        return list(dict.fromkeys(one.text for one in self._until))

    def holds(self, peer_id: str, addresses: Iterable[str], now: float) -> bool:
        """Whether a peer with this id, or at one of these addresses, is being refused."""
        self._forget_old(now)
        known = set(addresses)
        return any(one.peer_id == peer_id or one.address in known for one in self._until)

    def _forget_old(self, now: float) -> None:
        for one in [one for one, until in self._until.items() if until <= now]:
            del self._until[one]
