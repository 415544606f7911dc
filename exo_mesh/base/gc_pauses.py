"""Keeps the garbage collector from scanning what a process imports."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from exo_mesh.base.wakeups import next_wakeup

USUAL_ROUNDS, MOST_ROUNDS = 10, 100
"""Collections of the young generations between two of all objects: Python's default, and at most in a node. While a
thousand requests begin, a collection of all stops the event loop for 40 to 85 ms."""

FEW_TASKS = 300
"""While at most so many asyncio tasks run, which is two to three for each request, a node collects among all objects
whenever that is due: it takes 10 to 20 ms."""

LOOK_EVERY_S = 1.0

LARGEST_SHARE = 0.01
"""Share of its time that a node may spend on such collections."""


@contextmanager
def gc_pauses() -> Iterator[None]:
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
    """Lets Python collect among all objects by itself only after MOST_ROUNDS collections of young ones. While a burst
    of requests begins it would do so several times, because the number of objects grows by a quarter each time. Until
    then what lives in cycles and is old waits for `collect_while_few`."""
    young, middle, _ = gc.get_threshold()
    gc.set_threshold(young, middle, MOST_ROUNDS)


def is_collection_due() -> bool:
    """Whether Python would by default consider to collect among all objects now. It would then also ask whether their
    number has grown by a quarter, which no function tells."""
    return gc.get_count()[2] >= USUAL_ROUNDS


async def collect_while_few() -> None:
    """Collects among all objects when that is due and few tasks run, until cancelled."""
    while True:
        await next_wakeup(LOOK_EVERY_S)
        if is_collection_due() and len(asyncio.all_tasks()) <= FEW_TASKS:
            await asyncio.sleep(collect())


def collect(now: Callable[[], float] = time.perf_counter) -> float:
    """Collects among all objects; returns the seconds until it may be called again."""
    began = now()
    gc.collect()
    return (now() - began) / LARGEST_SHARE
