"""Check architectures in processes of their own, so that one that crashes takes no other with it."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool

from tools.architectures.check import Outcome, check

DEADLINE_S = 600
"""For one architecture; the slowest takes half a minute on one shared core."""


class _Worker:
    """One process at a time, begun again after a crash. Used by one thread."""

    def __init__(self) -> None:
        self._pool: ProcessPoolExecutor | None = None

    def check(self, architecture: str) -> Outcome:
        if self._pool is None:
            # mlx does not survive a fork
            self._pool = ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))
        try:
            return self._pool.submit(check, architecture).result(DEADLINE_S)
        except BrokenProcessPool:
            self._pool = None
            return Outcome(architecture, "failed", "the process crashed")
        except TimeoutError:
            pool, self._pool = self._pool, None
            for process in list(pool._processes.values()):
                process.kill()
            return Outcome(architecture, "failed", f"no end after {DEADLINE_S} s")

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()


def check_all(architectures: Sequence[str], jobs: int, report: Callable[[Outcome], None]) -> list[Outcome]:
    """Outcomes in the order given; report is called with each as it comes."""
    workers = [_Worker() for _ in range(jobs)]
    free = list(workers)

    def one(architecture: str) -> Outcome:
        worker = free.pop()
        try:
            outcome = worker.check(architecture)
        finally:
            free.append(worker)
        report(outcome)
        return outcome

    try:
        with ThreadPoolExecutor(jobs) as threads:
            return list(threads.map(one, architectures))
    finally:
        for worker in workers:
            worker.close()
