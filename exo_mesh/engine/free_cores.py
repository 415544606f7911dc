"""How many threads an engine should compute with, by the cores that other programs leave free.

The threads of a BLAS library wait for each other within each product. If one of them shares its core with another
program, all wait until it gets the core again. Measured with two threads on two cores beside 20 busy programs: a
fifteenth of the speed of one thread.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import psutil

CGROUPS, OWN_CGROUP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")

PERIOD_S = 0.5
"""Least time between two readings of the system; a reading takes 0.1 ms, with many cores a few."""

STALE_S = 2.0
"""An older reading says nothing of now: the engine rested. The next two are FIRST_S apart."""

FIRST_S = 0.05
"""Time between the first two readings after a rest; the system counts in steps of 0.01 s for each core."""

LOWER, RAISE = 0.4, 0.15
"""Parts of a core that count as a whole one. A thread is given up if less than 1 - LOWER of its core is free, and a
further one taken if at least 1 - RAISE of its core is: other programs use a little all the time."""


class CpuReading(msgspec.Struct, frozen=True):
    """Seconds since some time: on the clock, of all programs on the cores that this process may use, and of this
    process and the node that started it, which handles the tokens that an engine computes."""

    at_s: float
    busy_s: float
    own_s: float


def read_cpu() -> CpuReading:
    """The reading of now."""
    times = psutil.cpu_times(percpu=True)
    mine = set(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else set(range(len(times)))
    if max(mine) >= len(times):  # cores are off, or a container shows others: positions are no numbers of cores
        mine = set(range(len(times)))
    busy_s = sum(
        sum(one) - one.idle - getattr(one, "iowait", 0.0) - getattr(one, "guest", 0.0) - getattr(one, "guest_nice", 0.0)
        for core, one in enumerate(times)
        if core in mine
    )
    return CpuReading(time.monotonic(), busy_s, time.process_time() + _parent_s())


def _parent_s() -> float:
    """CPU seconds of the process that started this one, without its other children; 0 if it has ended."""
    with contextlib.suppress(psutil.Error):
        times = psutil.Process(os.getppid()).cpu_times()
        return float(times.user + times.system)
    return 0.0


def quota_cores(root: Path = CGROUPS, own: Path = OWN_CGROUP) -> float:
    """How many cores the control groups of this process let it use, as `docker run --cpus` sets them; infinity without
    a limit, or where the system has no control groups of version 2."""
    least = math.inf
    with contextlib.suppress(OSError, ValueError, IndexError):
        path = own.read_text().split("::", 1)[1].strip().lstrip("/")
        for group in (root / path, *(root / path).parents):
            if not group.is_relative_to(root):
                break
            with contextlib.suppress(OSError, ValueError):
                quota, period = (group / "cpu.max").read_text().split()
                least = min(least, int(quota) / int(period))
    return least


def threads_for(free_cores: float, now: int, most: int) -> int:
    """The number of threads, 1 to `most`, to continue with after `now` threads. free_cores: not used by others."""
    fewer, more = int(free_cores + LOWER), int(free_cores + RAISE)
    return max(1, min(most, max(more, min(now, fewer))))


class FreeCores:
    """Follows the cores that other programs leave free. For one thread."""

    def __init__(self, most: int, read: Callable[[], CpuReading] = read_cpu, num_cores: int | None = None) -> None:
        """most: threads that are used if nothing else runs. num_cores: that this process may use."""
        self._most = most
        self._read = read
        usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self._num_cores = usable if num_cores is None else num_cores
        self._before = read()
        self._wait_s = FIRST_S
        self.threads = most

    @classmethod
    def within_quota(cls, most: int) -> FreeCores:
        """For at most so many threads, or as many as the control groups of this process allow."""
        return cls(math.ceil(max(1.0, min(most, quota_cores()))))

    def now(self) -> int:
        """The number of threads to use from now on; reads the system if that is due. Takes less than a microsecond most
        times."""
        return self.follow() if self.is_due() else self.threads

    def is_due(self) -> bool:
        """Whether it is time for the next reading."""
        return self._most > 1 and time.monotonic() - self._before.at_s >= self._wait_s

    def follow(self) -> int:
        """Read the system again. Returns the number of threads to use from now on."""
        now, before = self._read(), self._before
        self._before = now
        if now.at_s - before.at_s > STALE_S:
            self._wait_s = FIRST_S
            return self.threads
        self._wait_s = PERIOD_S
        if now.at_s > before.at_s:
            others_s = max(0.0, (now.busy_s - before.busy_s) - (now.own_s - before.own_s))
            free_cores = self._num_cores - others_s / (now.at_s - before.at_s)
            self.threads = threads_for(free_cores, self.threads, self._most)
        return self.threads


class ThreadsByLoad:
    """Keeps the number of a library's threads at the cores that other programs leave free. For one thread."""

    def __init__(self, most: int, apply: Callable[[int], object]) -> None:
        """most: the number that the library has now. apply: sets another one."""
        self._most = most
        self._apply = apply
        self._cores = FreeCores.within_quota(most)
        if self._cores.threads != most:
            apply(self._cores.threads)

    def adapt(self) -> None:
        """Follow the load of the machine, between two products. Takes less than a microsecond most times."""
        before = self._cores.threads
        if self._cores.now() != before:
            self._apply(self._cores.threads)

    def close(self) -> None:
        """Leave the library as it was."""
        if self._cores.threads != self._most:
            self._apply(self._most)
