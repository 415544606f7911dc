"""Lets the periodic tasks of a process wake together."""

from __future__ import annotations

import asyncio


async def next_wakeup(period_s: float) -> None:
    """Sleep until the clock of the loop shows the next multiple of period_s that is at least a quarter of it away.

    Loops with equal or multiple periods then wake together: an idle node wakes twice a second and not twenty times.
    """
    await asyncio.sleep(until_wakeup(period_s))


def until_wakeup(period_s: float) -> float:
    """Seconds until the time for which `next_wakeup` waits, for a wait that something else may end earlier."""
    pause_s = period_s - asyncio.get_running_loop().time() % period_s
    return pause_s if pause_s >= period_s / 4 else pause_s + period_s
