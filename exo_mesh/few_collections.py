"""Keeps the garbage collector from scanning what a process imports."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from exo_mesh.beat import next_beat

USUAL_ROUNDS, BUSY_ROUNDS = 10, 100
"""Collections of the young generations between two of all objects: Python's default, and at most in a node that serves
requests. While a thousand requests begin, a collection of all stops the event loop for 40 to 85 ms."""

IDLE_EVERY_S = 5.0
"""Seconds between checks whether this process is idle."""


@contextmanager
def few_collections() -> Iterator[None]:
    """Runs no garbage collection inside the block, then exempts all objects made so far from later collections.

    The imports of a node make 80,000 objects that live for ever. Without this the start scans them again and again,
    an eighth of its CPU time, and each later full collection stops the event loop for about 50 ms. About 2,000
    objects that the imports leave behind are never freed.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
        gc.freeze()
    finally:
        if was_enabled:
            gc.enable()


def rare_full_collections() -> None:
    """Lets Python collect among all objects only after BUSY_ROUNDS collections of young ones. While a burst of requests
    begins it would do so several times, because the number of objects grows by a quarter each time. What lives in
    cycles and is old waits for `collect_while_idle`."""
    young, middle, _ = gc.get_threshold()
    gc.set_threshold(young, middle, BUSY_ROUNDS)


def is_collection_due() -> bool:
    """Whether Python would by default collect among all objects now."""
    return gc.get_count()[2] >= USUAL_ROUNDS


async def collect_while_idle(work: Callable[[], str]) -> None:
    """Collects among all objects while this process is idle, until cancelled; see rare_full_collections.

    work: returns what the process works for, "" if it is idle.
    """
    while True:
        await next_beat(IDLE_EVERY_S)
        if is_collection_due() and not work():
            gc.collect()
