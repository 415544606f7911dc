"""What processes hold and spend: descriptors and CPU time."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import psutil

from tests.support.peers import Peer
from tests.support.processes import eventually

LINGERING = 20
"""Sockets of closed gRPC channels that a process may still have: with every 80 abandoned requests their number went up
and down between 3 and 16, and did not grow."""

SAMPLE_S = 1.0
"""CPU time is counted in hundredths of a second: over a second, one of them is a percent."""


def family(peers: Sequence[Peer]) -> list[psutil.Process]:
    """The nodes and all their runners."""
    return [process for peer in peers for process in (psutil.Process(peer.child.pid), *peer.runners())]


def descriptors(processes: Sequence[psutil.Process]) -> dict[int, int]:
    """{pid: how many it has open}"""
    return {process.pid: process.num_fds() for process in processes}


def no_more(processes: Sequence[psutil.Process], before: dict[int, int]) -> bool:
    """Does each have at most LINGERING more descriptors than before? Whatever leaks one per request has far more."""
    return all(count <= before[pid] + LINGERING for pid, count in descriptors(processes).items())


def settled(read: Callable[[], int]) -> int:
    """What is read once it has been the same for SAMPLE_S, which is two heartbeats of a stage. Fails if it never is."""
    last, since = read(), time.monotonic()

    def is_settled() -> bool:
        nonlocal last, since
        if (now := read()) != last:
            last, since = now, time.monotonic()
        return time.monotonic() - since > SAMPLE_S

    assert eventually(is_settled, 30)
    return last


class CpuMeter:
    """Seconds of CPU that processes take per second, over the time since the last reading."""

    def __init__(self, processes: Sequence[psutil.Process]) -> None:
        self._processes = processes
        self._last = (time.monotonic(), self._spent_s())

    def read(self) -> float | None:
        """None, and the reading goes on, if the last one is less than SAMPLE_S ago."""
        now, (since, spent_s) = time.monotonic(), self._last
        if now - since < SAMPLE_S:
            return None
        self._last = (now, self._spent_s())
        return (self._last[1] - spent_s) / (now - since)

    def next(self) -> float:
        """The next reading, SAMPLE_S after the last one or later."""
        rates: list[float] = []
        assert eventually(lambda: rates.extend(rate for rate in [self.read()] if rate is not None) or bool(rates))
        return rates[0]

    def is_below(self, bound: float) -> bool:
        rate = self.read()
        return rate is not None and rate <= bound

    def _spent_s(self) -> float:
        times = [process.cpu_times() for process in self._processes]
        return sum(one.user + one.system for one in times)
