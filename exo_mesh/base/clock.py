"""Time as an argument: logic takes `now` in seconds; services take a Clock and never call the time module."""

from __future__ import annotations

import time
from collections.abc import Callable

Clock = Callable[[], float]
"""Seconds of a monotonic clock with an arbitrary origin."""

monotonic: Clock = time.monotonic
