"""Waiting for things that have no event."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable


async def until(condition: Callable[[], object], timeout_s: float = 15.0, what: str = "") -> float:
    """Seconds until the condition holds; the test fails if it never does. Prints them if `what` says what they are."""
    begin = time.monotonic()
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.01)
    took_s = time.monotonic() - begin
    if what:
        print(f"{what}: {took_s:.2f} s")
    return took_s
