"""How patient the membership is, and when to dial an address again. Pure: the caller brings the time."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds. period_s: between two rounds of probes, and of anti-entropy. probe_s: for the answer to a direct probe,
    and as much again for an indirect one. suspicion_s: the least that a suspect has to refute (`swim.suspicion_s` has
    the rest). gossip_s: between two rounds of telling news. call_s: for other calls. stall_s: a node that was not
    scheduled for this long has stood still itself.

    In a small mesh, whose peers all find it out by themselves, a silent peer is dead everywhere after at most
    period + 2 probe + suspicion = 4 s on a LAN. One whose process was killed, so that its port refuses, is dead
    without a suspicion: after period + 0.3 s, sooner where a call to it breaks.
    """

    period_s: float = 1.0
    probe_s: float = 0.75
    suspicion_s: float = 1.5
    gossip_s: float = 0.2
    call_s: float = 1.5
    stall_s: float = 1.0


LAN = Timing()


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
