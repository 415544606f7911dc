"""Decides when an unused instance is unloaded. Pure."""

from __future__ import annotations

from collections.abc import Mapping


class IdleClock:
    """Remembers since when each instance has been idle. idle_s: how long an instance may be idle unless a client has
    set another time for it; 0: for ever."""

    def __init__(self, idle_s: float) -> None:
        self._idle_s = idle_s
        self._since: dict[str, tuple[int, float]] = {}
        self._wished_s: dict[str, float] = {}

    @property
    def is_on(self) -> bool:
        """Whether any instance may be unloaded."""
        return self._idle_s > 0 or bool(self._wished_s)

    def wish(self, name: str, idle_s: float) -> None:
        """Set how long this instance may be idle from now on; negative: for ever. The last call wins."""
        self._wished_s[name] = idle_s

    def is_kept(self, name: str) -> bool:
        """Whether a client wants the instance to stay loaded for ever."""
        return self._wished_s.get(name, 0.0) < 0

    def left_s(self, name: str, now: float) -> float | None:
        """Seconds until the instance is unloaded if nobody uses it, as seen at the last round; None: never."""
        limit_s = self._wished_s.get(name, self._idle_s or -1.0)
        if limit_s < 0:
            return None
        return max(0.0, limit_s - (now - self._since[name][1])) if name in self._since else limit_s

    def due(self, work: Mapping[str, tuple[int, int]], now: float) -> list[str]:
        """The instances to unload now; each is returned once. work: by instance, the number of requests that wait or
        run there, and the tokens generated so far."""
        if not self.is_on:
            return []
        kept: dict[str, tuple[int, float]] = {}
        for name, (num_requests, num_tokens) in work.items():
            known = self._since.get(name)
            is_still = known is not None and known[0] == num_tokens and not num_requests
            kept[name] = known if known is not None and is_still else (num_tokens, now)
        due = [name for name in kept if name in self._since and self._is_due(name, now - kept[name][1])]
        self._since = {name: known for name, known in kept.items() if name not in due}
        self._wished_s = {name: wish for name, wish in self._wished_s.items() if name in self._since}
        return due

    def _is_due(self, name: str, idle_s: float) -> bool:
        wished_s = self._wished_s.get(name)
        if wished_s is None:
            return self._idle_s > 0 and idle_s >= self._idle_s
        return idle_s > 0 and 0 <= wished_s <= idle_s  # idle_s > 0: seen idle twice, as telemetry may be 1 s old
