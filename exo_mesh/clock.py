"""Time as an argument: logic takes `now` in seconds; services take a Clock and never call the time module."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

Clock = Callable[[], float]
"""Seconds of a monotonic clock with an arbitrary origin."""

monotonic: Clock = time.monotonic


async def next_beat(period_s: float) -> None:
    """Sleep until the clock of the loop shows the next multiple of period_s that is at least a quarter of it away.

    Loops with equal or multiple periods then wake together: an idle node wakes twice a second and not twenty times.
    """
    loop = asyncio.get_running_loop()
    pause_s = period_s - loop.time() % period_s
    await asyncio.sleep(pause_s if pause_s >= period_s / 4 else pause_s + period_s)
