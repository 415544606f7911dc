"""The last refused peers and the reasons, for troubleshooting discovery."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

MAX_REFUSALS = 16

REFUSED_S = 60.0
"""How long one is told of after the last attempt. An address that is suggested again and again is dialled every 10 s at
least (membership/detector.py, Backoff), so what is still refused stays, and what was given up goes."""


@dataclass(frozen=True, slots=True)
class _Refusal:
    text: str
    peer_id: str
    address: str


class Refusals:
    """The latest of each kind; the oldest make room. peer_id or address may be "" where they are not known."""

    def __init__(self) -> None:
        self._until: dict[_Refusal, float] = {}

    def note(self, who: str, reason: str, now: float, *, peer_id: str = "", address: str = "") -> bool:
        """Somebody was refused just now; True if that is news."""
        self._forget_old(now)
        refusal = _Refusal(f"{who}: {reason}", peer_id, address)
        is_news = refusal.text not in self.texts(now)
        self._until.pop(refusal, None)
        self._until[refusal] = now + REFUSED_S
        if len(self._until) > MAX_REFUSALS:
            del self._until[next(iter(self._until))]
        return is_news

    def joined(self, peer_id: str, addresses: Iterable[str]) -> None:
        """This peer has been taken in: what was said of it before is over."""
        known = set(addresses)
        for one in [one for one in self._until if one.peer_id == peer_id or one.address in known]:
            del self._until[one]

    def texts(self, now: float) -> list[str]:
        """What to tell, oldest first."""
        self._forget_old(now)
        return list(dict.fromkeys(one.text for one in self._until))

    def _forget_old(self, now: float) -> None:
        for one in [one for one, until in self._until.items() if until <= now]:
            del self._until[one]
