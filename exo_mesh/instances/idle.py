"""When an instance that nobody uses is unloaded. Pure."""

from __future__ import annotations

from collections.abc import Mapping


class IdleClock:
    """Remembers since when each instance has had nothing to do. idle_s: how long it may; 0: for ever."""

    def __init__(self, idle_s: float) -> None:
        self._idle_s = idle_s
        self._since: dict[str, tuple[int, float]] = {}

    @property
    def is_on(self) -> bool:
        """Whether instances are unloaded at all."""
        return self._idle_s > 0

    def due(self, work: Mapping[str, tuple[int, int]], now: float) -> list[str]:
        """The instances to unload now, each told once. work: by instance, the requests that wait or run there, and the
        tokens drawn so far."""
        if not self.is_on:
            return []
        kept: dict[str, tuple[int, float]] = {}
        for name, (num_requests, num_tokens) in work.items():
            known = self._since.get(name)
            is_still = known is not None and known[0] == num_tokens and not num_requests
            kept[name] = known if known is not None and is_still else (num_tokens, now)
        due = [name for name, (_, since) in kept.items() if now - since >= self._idle_s]
        self._since = {name: known for name, known in kept.items() if name not in due}
        return due
