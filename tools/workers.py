"""Checks models in separate processes, so that a crash ends no other check."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Generic, TypeVar

T = TypeVar("T")

DEADLINE_S = 600
"""Time limit for one model; the slowest takes half a minute on one shared core."""


def _redirect(file: str) -> None:
    """Writes what this process says on standard error into a file, which outlives a crash."""
    os.dup2(os.open(file, os.O_WRONLY | os.O_APPEND), 2)


class _Worker(Generic[T]):
    """One process at a time, restarted after a crash. Used by one thread."""

    def __init__(self, check: Callable[[str], T], failed: Callable[[str, str], T]) -> None:
        self._check, self._failed = check, failed
        self._pool: ProcessPoolExecutor | None = None
        self._said = tempfile.NamedTemporaryFile(mode="r", errors="replace")  # noqa: SIM115 - closed in close

    def check(self, name: str) -> T:
        if self._pool is None:
            # mlx does not survive a fork
            spawn = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(1, spawn, initializer=_redirect, initargs=(self._said.name,))
        try:
            return self._pool.submit(self._check, name).result(DEADLINE_S)
        except BrokenProcessPool:
            self._pool = None
            said = self._said.read().strip().splitlines()
            asserted = [line for line in said if "ASSERT" in line] or said or ["it said nothing"]
            return self._failed(name, f"the process crashed: {asserted[-1].rpartition('/')[2][-200:]}")
        except TimeoutError:
            pool, self._pool = self._pool, None
            for process in list(pool._processes.values()):
                process.kill()
            return self._failed(name, f"no end after {DEADLINE_S} s")

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()
        self._said.close()


def check_all(
    names: Sequence[str],
    jobs: int,
    report: Callable[[T], None],
    check: Callable[[str], T],
    failed: Callable[[str, str], T],
) -> list[T]:
    """Returns outcomes in the given order; report is called with each as it arrives.

    check: a function of a module, which never raises. failed: makes the outcome, from name and reason, of a check that
    crashed or did not end.
    """
    workers = [_Worker(check, failed) for _ in range(jobs)]
    free = list(workers)

    def one(name: str) -> T:
        worker = free.pop()
        try:
            outcome = worker.check(name)
        finally:
            free.append(worker)
        report(outcome)
        return outcome

    try:
        with ThreadPoolExecutor(jobs) as threads:
            return list(threads.map(one, names))
    finally:
        for worker in workers:
            worker.close()
