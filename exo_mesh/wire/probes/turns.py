"""Decides which probes of one address are datagrams. Pure: the caller passes the time."""

from __future__ import annotations

ANSWER_S = 0.1
"""How long a datagram's answer may take before the peer is called. Less than the 187 ms after which an answer counts as
slow (swim.PROMPT), so that a lost datagram does not change the local health."""

FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0
"""How long probes are calls after a datagram without an answer: one probe after a loss, longer each time while a
firewall drops datagrams."""


class DatagramTurns:
    """Decides for one address of a peer whether the next probe is a datagram.

    incarnation: the start of the peer that datagrams are meant for; 0 while probes must be calls, because no call has
    shown that the peer takes datagrams, or the last call failed. So datagrams never hide that calls fail.
    """

    def __init__(self) -> None:
        self.incarnation = 0
        self._not_before = 0.0
        self._pause_s = FIRST_PAUSE_S

    def may_ask(self, now: float) -> bool:
        """Whether the next probe may be a datagram."""
        return self.incarnation != 0 and now >= self._not_before

    def called(self, incarnation: int, *, takes_datagrams: bool) -> None:
        """Record a probe that was a call and was answered by this start of the peer."""
        self.incarnation = incarnation if takes_datagrams else 0

    def call_failed(self) -> None:
        """Record that the peer did not answer a call."""
        self.incarnation = 0

    def answered(self) -> None:
        """Record an answered datagram."""
        self._pause_s = FIRST_PAUSE_S

    def missed(self, now: float) -> None:
        """Record a datagram without an answer."""
        self._not_before = now + self._pause_s
        self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
