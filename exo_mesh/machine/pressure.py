"""How short of memory this machine is: readings at a steady beat, and the levels that defences hang on."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import IntEnum

from exo_mesh.machine.memory import MemoryReader, MemoryReading, headroom

POLL_S = 1.5
KEPT = 60
"""Readings that are kept: a minute and a half."""

_TIERS = ((128, 0.85), (64, 0.80), (32, 0.75), (0, 0.70))
"""(GiB of memory from which, share in use that is critical): a small machine has less to spare in absolute terms."""

WARN_BELOW = 0.05
"""The warning comes so much earlier than the critical share."""

_log = logging.getLogger(__name__)


class PressureLevel(IntEnum):
    """OK: work. WARN: take no new requests on beside those that run. CRITICAL: let the newest one wait."""

    OK = 0
    WARN = 1
    CRITICAL = 2


def tier(total_bytes: int) -> float:
    """The share of memory in use at which a machine of this size is critical, if plans need no more than that."""
    return next(share for gib, share in _TIERS if total_bytes >= gib * 2**30)


def critical_share(total_bytes: int, planned_bytes: int) -> float:
    """The share in use from which on memory is critical: the tier, or a little above what was agreed to be used.

    planned_bytes: what was in use without us, and what plans have reserved since. A plan leaves `headroom` free; with
    half of that gone something takes more than it said, and it is critical in any case.
    """
    margin = headroom(total_bytes) // 2
    agreed = min(planned_bytes + margin, total_bytes - margin)
    return max(tier(total_bytes), agreed / total_bytes) if total_bytes else 1.0


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One reading. time: Unix seconds. used_share: of the total, in use by anybody."""

    time: float
    total_bytes: int
    available_bytes: int

    @property
    def used_share(self) -> float:
        return 1 - self.available_bytes / self.total_bytes if self.total_bytes else 0.0

    def level(self, threshold: float) -> PressureLevel:
        if self.used_share >= threshold:
            return PressureLevel.CRITICAL
        return PressureLevel.WARN if self.used_share >= threshold - WARN_BELOW else PressureLevel.OK

    def describe(self) -> dict[str, float]:
        return {
            "time": round(self.time, 3),
            "total_bytes": self.total_bytes,
            "available_bytes": self.available_bytes,
            "pressure_pct": round(100 * self.used_share, 2),
        }


class MemoryMonitor:
    """Reads every poll_s. `tell` is awaited with the level when it has changed, and again with each reading that is not
    OK: so that whoever comes new hears of it, too. threshold: the critical share, where somebody has set it."""

    def __init__(
        self,
        read: MemoryReader,
        tell: Callable[[PressureLevel], Awaitable[None]],
        reserved_bytes: Callable[[], int] = lambda: 0,
        now: Callable[[], float] = time.time,
        *,
        threshold: float | None = None,
        poll_s: float = POLL_S,
    ) -> None:
        self._read = read
        self._fixed_threshold = threshold
        self._poll_s = poll_s
        self._tell = tell
        self._reserved_bytes = reserved_bytes
        self._now = now
        self._kept: deque[Snapshot] = deque(maxlen=KEPT)
        self.level = PressureLevel.OK
        first = self._snapshot(read())
        self._used_without_us = first.total_bytes - first.available_bytes
        self._take(first)

    @property
    def threshold(self) -> float:
        """The share in use that is critical now."""
        if self._fixed_threshold is not None:
            return self._fixed_threshold
        return critical_share(self.last.total_bytes, self._used_without_us + self._reserved_bytes())

    @property
    def last(self) -> Snapshot:
        return self._kept[-1]

    @property
    def kept(self) -> tuple[Snapshot, ...]:
        """The last KEPT readings, oldest first."""
        return tuple(self._kept)

    @property
    def peak_share(self) -> float:
        """The most that was in use in the last KEPT readings."""
        return max(snapshot.used_share for snapshot in self._kept)

    async def run(self) -> None:
        """Until cancelled. A reading that fails is told once and tried again: it must not end the node."""
        failing = False
        while True:
            await asyncio.sleep(self._poll_s)
            before = self.level
            try:
                self._take(self._snapshot(await asyncio.to_thread(self._read)))
                failing = False
            except OSError as exc:
                if not failing:
                    _log.warning("the memory of this machine cannot be read: %s", exc)
                failing = True
            if self.level or self.level is not before:
                await self._tell(self.level)

    def describe(self) -> dict[str, object]:
        """The last reading, the threshold, and the worst of the last minute and a half."""
        return {
            **self.last.describe(),
            "threshold_pct": round(100 * self.threshold, 2),
            "peak_pct": round(100 * self.peak_share, 2),
            "level": self.level.name.lower(),
            "headroom_bytes": int(self.threshold * self.last.total_bytes) - self.used_bytes,
        }

    @property
    def used_bytes(self) -> int:
        return self.last.total_bytes - self.last.available_bytes

    def _snapshot(self, reading: MemoryReading) -> Snapshot:
        return Snapshot(self._now(), reading.total_bytes, reading.available_bytes)

    def _take(self, snapshot: Snapshot) -> None:
        self._kept.append(snapshot)
        threshold = self.threshold
        level = snapshot.level(threshold)
        if level is not self.level:
            was, self.level = self.level, level
            _log.log(
                logging.WARNING if level > was else logging.INFO,
                "memory: %.0f %% of %.1f GB in use, %s (critical at %.0f %%)",
                100 * snapshot.used_share, snapshot.total_bytes / 1e9, level.name.lower(), 100 * threshold,
            )  # fmt: skip
