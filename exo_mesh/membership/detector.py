"""Deciding whether a peer is alive. Pure: the caller brings the time."""

from __future__ import annotations

from dataclasses import dataclass

DEAD_AFTER_S = 3.0
"""A peer that nobody here has heard for this long is dead: three probes, a second apart."""

MIN_FAILURES = 2
"""Probes that must have failed as well: a node that itself stood still for a while has heard nobody, and must ask
before it judges."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds. call_s: longest wait for an answer to a probe. retry_s: pause after a failed one."""

    exchange_every_s: float = 1.0
    retry_s: float = 0.3
    call_s: float = 1.5
    dead_after_s: float = DEAD_AFTER_S


LAN = Timing()


@dataclass(slots=True)
class Liveness:
    """What is known of one peer's signs of life; any message of it counts. Mutated by the three methods."""

    last_heard: float
    dead_after_s: float = DEAD_AFTER_S
    failures: int = 0

    def heard(self, now: float) -> None:
        self.last_heard = now
        self.failures = 0

    def probe_failed(self) -> None:
        self.failures += 1

    def is_dead(self, now: float) -> bool:
        return self.failures >= MIN_FAILURES and now - self.last_heard > self.dead_after_s


@dataclass(slots=True)
class Backoff:
    """When to dial an address again: at once, then after 0.5 s, doubling up to `longest_s`."""

    longest_s: float = 10.0
    not_before: float = 0.0
    pause_s: float = 0.5

    def may_try(self, now: float) -> bool:
        return now >= self.not_before

    def failed(self, now: float) -> None:
        self.not_before = now + self.pause_s
        self.pause_s = min(2 * self.pause_s, self.longest_s)
