"""The timeouts of the membership and the back-off of dials. Pure: the caller passes the time."""

from __future__ import annotations

import msgspec


class Timing(msgspec.Struct, frozen=True):
    """Durations in seconds. period_s: between two rounds of probes, and of anti-entropy. probe_s: timeout of a direct
    probe, and again of an indirect probe. suspicion_s: shortest time that a suspect has to refute (see
    `swim.suspicion_s`). gossip_s: between two rounds of gossip. call_s: timeout of other calls. stall_s: a node that
    was not scheduled for this long was suspended itself.

    In a small mesh, where every peer detects a failure itself, a silent peer is dead everywhere after at most period +
    2 probe + suspicion = 4 s on a LAN. A peer whose process was killed, so that its port refuses connections, is dead
    without a suspicion: after period + 0.3 s, or sooner if a call to it breaks.
    """

    period_s: float = 1.0
    probe_s: float = 0.75
    suspicion_s: float = 1.5
    gossip_s: float = 0.2
    call_s: float = 1.5
    stall_s: float = 1.0


LAN = Timing()


class Backoff(msgspec.Struct):
    """When to dial an address again: at once, then after 0.5 s, doubling up to `longest_s`."""

    longest_s: float = 10.0
    not_before: float = 0.0
    pause_s: float = 0.5

    def may_try(self, now: float) -> bool:
        return now >= self.not_before

    def failed(self, now: float) -> None:
        self.not_before = now + self.pause_s
        self.pause_s = min(2 * self.pause_s, self.longest_s)
