"""Lets the periodic tasks of a process wake together."""

from __future__ import annotations

import asyncio


async def next_beat(period_s: float) -> None:
    """Sleep until the clock of the loop shows the next multiple of period_s that is at least a quarter of it away.

    Loops with equal or multiple periods then wake together: an idle node wakes twice a second and not twenty times.
    """
    loop = asyncio.get_running_loop()
    pause_s = period_s - loop.time() % period_s
    await asyncio.sleep(pause_s if pause_s >= period_s / 4 else pause_s + period_s)
