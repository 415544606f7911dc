"""Says hello to suggested addresses: one dial per address at a time, with back-off, and at most MAX_DIALS at once."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from exo_mesh.base.clock import Clock
from exo_mesh.base.tasks import TaskOwner
from exo_mesh.mesh.membership.detector import Backoff

MAX_DIALS = 16
MAX_BACKOFFS = 1024
"""Most failing addresses that are remembered; a flood of suggestions evicts the oldest."""


class Dialer:
    """Dials addresses. `say_hello(address)` returns whether a peer was found there; it must not raise."""

    def __init__(self, say_hello: Callable[[str], Awaitable[bool]], tasks: TaskOwner, clock: Clock) -> None:
        self._say_hello = say_hello
        self._tasks = tasks
        self._clock = clock
        self._backoffs: dict[str, Backoff] = {}
        self._dialing: set[str] = set()

    def dial(self, address: str) -> None:
        """Try an address now, unless it is being tried, its back-off has not ended, or MAX_DIALS dials are running."""
        backoff = self._backoffs.get(address)
        if address in self._dialing or len(self._dialing) >= MAX_DIALS:
            return
        if backoff is None or backoff.may_try(self._clock()):
            self._dialing.add(address)
            self._tasks.start(self._dial(address), f"dial {address}")

    def is_failing(self, address: str) -> bool:
        """Whether the last hello to this address failed."""
        return address in self._backoffs

    async def _dial(self, address: str) -> None:
        found = False
        try:
            found = await self._say_hello(address)
        finally:
            self._dialing.discard(address)
            if found:
                self._backoffs.pop(address, None)
            else:
                self._failed(address)

    def _failed(self, address: str) -> None:
        if address not in self._backoffs and len(self._backoffs) >= MAX_BACKOFFS:
            self._backoffs.pop(next(iter(self._backoffs)))
        self._backoffs.setdefault(address, Backoff()).failed(self._clock())
