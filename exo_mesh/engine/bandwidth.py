"""Measures how fast this machine reads memory: an upper bound for decoding, where each step reads every weight once."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, runtime_checkable

import msgspec
import numpy as np
import psutil

BUFFERS_BYTES = 256 * 2**20
"""Bytes of all buffers together: several times the last-level cache of nearly every machine (32 MiB on the machine
where this was written)."""
LEAST_BYTES = 32 * 2**20
SHARE_OF_AVAILABLE = 0.125
BUDGET_S = 0.5


@runtime_checkable
class BandwidthMeter(Protocol):
    """Optional part of a stage engine that computes on a device with memory of its own."""

    def memory_bandwidth(self) -> float:
        """Bytes a second that the device's memory delivers, measured now, within a second."""


class Bandwidth(msgspec.Struct, frozen=True):
    """A measured bandwidth. bytes_per_s: the better one of reading and copying, each byte counted as often as it
    crosses the memory bus. source: how it was measured."""

    bytes_per_s: float
    source: str


def bandwidth_of(engine: object) -> Bandwidth:
    """The bandwidth of the device that a loaded engine computes on; of the CPU's memory if the engine does not measure
    it."""
    if isinstance(engine, BandwidthMeter):
        return Bandwidth(engine.memory_bandwidth(), "measured by the engine")
    return cpu_bandwidth()


def cpu_bandwidth(num_threads: int = 0, budget_s: float = BUDGET_S) -> Bandwidth:
    """Measure the CPU's memory. Blocks for about budget_s. Runs dot products (two streams read) and copies (one
    read, one written) over buffers that no cache holds, on all cores that this process may use; the best pass of
    each counts."""
    threads = num_threads or _num_cores()
    spare = int(SHARE_OF_AVAILABLE * psutil.virtual_memory().available)
    length = max(LEAST_BYTES, min(BUFFERS_BYTES, spare)) // (2 * threads) // 4
    pairs = [(np.ones(length, np.float32), np.ones(length, np.float32)) for _ in range(threads)]
    moved = 2 * threads * length * 4
    with ThreadPoolExecutor(threads) as pool:
        # one thread per core: NumPy releases the interpreter's lock for arrays of this size
        read = _best(lambda: list(pool.map(lambda pair: float(pair[0].dot(pair[1])), pairs)), budget_s / 2)
        copy = _best(lambda: list(pool.map(lambda pair: np.copyto(pair[0], pair[1]), pairs)), budget_s / 2)
    how = f"{threads} threads of NumPy over {moved // 2**20} MiB"
    return max(Bandwidth(moved / read, f"reading, {how}"), Bandwidth(moved / copy, f"copying, {how}"), key=_rate)


def _rate(bandwidth: Bandwidth) -> float:
    return bandwidth.bytes_per_s


def _best(work: Callable[[], Sequence[object]], budget_s: float) -> float:
    """Seconds of the fastest pass within the budget; at least two passes, because the first one maps the pages."""
    fastest, deadline, passes = float("inf"), time.perf_counter() + budget_s, 0
    while passes < 2 or time.perf_counter() < deadline:
        begin = time.perf_counter()
        work()
        fastest, passes = min(fastest, time.perf_counter() - begin), passes + 1
    return fastest


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
