"""Watches how short of memory this machine is: periodic readings, and the levels that defences react to."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable
from enum import IntEnum

import msgspec

from exo_mesh.base.wakeups import next_wakeup
from exo_mesh.machine.memory import MemoryReader, MemoryReading, headroom
from exo_mesh.machine.wired_leak import WiredLeak

POLL_S = 1.5
KEPT = 60
"""Number of readings that are kept: a minute and a half."""

WARN_BELOW = 0.05
"""If the critical share in use is set by the user, the warning comes this much earlier."""

_log = logging.getLogger(__name__)


class PressureLevel(IntEnum):
    """How short memory is. OK: work normally. WARN: accept no new requests beside the running ones. CRITICAL: pause the
    newest request."""

    OK = 0
    WARN = 1
    CRITICAL = 2


class Floors(msgspec.Struct, frozen=True):
    """Bytes that must stay free: below critical_bytes the system itself runs short, below warn_bytes it soon will.

    The share in use is no measure: a laptop with 70 % of 24 GB in use has 7 GB for a model. A plan leaves `headroom`
    free. Once a quarter of that is used, some process takes more than it reserved; once half is used, memory is
    critical.
    """

    critical_bytes: int
    warn_bytes: int

    @staticmethod
    def of(total_bytes: int, threshold: float | None = None) -> Floors:
        """Computes the limits. threshold: the share in use that is critical, if the user has set it."""
        if threshold is not None:
            return Floors(
                total_bytes - int(threshold * total_bytes), total_bytes - int((threshold - WARN_BELOW) * total_bytes)
            )
        left_free = headroom(total_bytes)
        return Floors(left_free // 2, left_free * 3 // 4)

    def level(self, available_bytes: int, loading_bytes: int) -> PressureLevel:
        """Returns the level. loading_bytes: weights that are still being loaded, which the system counts as
        available."""
        if available_bytes <= self.critical_bytes:
            return PressureLevel.CRITICAL
        return PressureLevel.WARN if available_bytes - loading_bytes <= self.warn_bytes else PressureLevel.OK


class Needs(msgspec.Struct, frozen=True):
    """What the stages of this machine still need. loading_bytes: weights to be loaded. pending_bytes: these, and KV up
    to what their plans have reserved. num_runners: live runners."""

    loading_bytes: int = 0
    pending_bytes: int = 0
    num_runners: int = 0


class Snapshot(msgspec.Struct, frozen=True):
    """One reading. time: Unix seconds. used_share: of the total, in use by any process. wired_bytes: see
    MemoryReading."""

    time: float
    total_bytes: int
    available_bytes: int
    wired_bytes: int | None = None

    @property
    def used_share(self) -> float:
        return 1 - self.available_bytes / self.total_bytes if self.total_bytes else 0.0

    def describe(self) -> dict[str, float]:
        return {
            "time": round(self.time, 3),
            "total_bytes": self.total_bytes,
            "available_bytes": self.available_bytes,
            "pressure_pct": round(100 * self.used_share, 2),
        }


class MemoryMonitor:
    """Reads memory every poll_s. `tell` is awaited with the level and the bytes that KV may still use: when the level
    has changed, and at each reading that is not OK or that leaves less than the stages may need. threshold: the share
    in use that is critical, if the user has set it."""

    def __init__(
        self,
        read: MemoryReader,
        tell: Callable[[PressureLevel, int], Awaitable[None]],
        needs: Callable[[], Needs] = Needs,
        now: Callable[[], float] = time.time,
        *,
        threshold: float | None = None,
        poll_s: float = POLL_S,
    ) -> None:
        self._read = read
        self._threshold = threshold
        self._poll_s = poll_s
        self._tell = tell
        self._needs = needs
        self._now = now
        self._kept: deque[Snapshot] = deque(maxlen=KEPT)
        self._is_tight = False
        self._leak = WiredLeak()
        self.level = PressureLevel.OK
        self._take(self._snapshot(read()))

    @property
    def floors(self) -> Floors:
        """What must stay free on this machine."""
        return Floors.of(self.last.total_bytes, self._threshold)

    @property
    def last(self) -> Snapshot:
        return self._kept[-1]

    @property
    def kept(self) -> tuple[Snapshot, ...]:
        """The last KEPT readings, oldest first."""
        return tuple(self._kept)

    @property
    def peak_share(self) -> float:
        """The highest share in use among the last KEPT readings."""
        return max(snapshot.used_share for snapshot in self._kept)

    async def run(self) -> None:
        """Runs until cancelled. A failed reading is logged once and retried; it must not end the node."""
        failing = False
        while True:
            await next_wakeup(self._poll_s)
            before, was_tight = self.level, self._is_tight
            try:
                self._take(self._snapshot(self._read()))
                failing = False
            except OSError as exc:
                if not failing:
                    _log.warning("the memory of this machine cannot be read: %s", exc)
                failing = True
            if self.level or self.level is not before or self._is_tight or was_tight:
                await self._tell(self.level, self.free_bytes)

    @property
    def free_bytes(self) -> int:
        """Bytes that KV may still use: available memory without the weights to be loaded, down to the warning limit."""
        return max(0, self.last.available_bytes - self._needs().loading_bytes - self.floors.warn_bytes)

    def describe(self) -> dict[str, object]:
        """Describes the last reading, what must stay free, and the worst of the last minute and a half. headroom_bytes:
        what could still be used before memory is critical, after everything that is being loaded."""
        floors, needs, total = self.floors, self._needs(), self.last.total_bytes
        critical_share = 1 - floors.critical_bytes / total if total else 1.0
        return {
            **self.last.describe(),
            "threshold_pct": round(100 * critical_share, 2),
            "peak_pct": round(100 * self.peak_share, 2),
            "level": self.level.name.lower(),
            "floor_bytes": floors.critical_bytes,
            "loading_bytes": needs.loading_bytes,
            "pending_bytes": needs.pending_bytes,
            "headroom_bytes": self.headroom_bytes,
            **({} if self.last.wired_bytes is None else {"wired_bytes": self.last.wired_bytes}),
        }

    @property
    def headroom_bytes(self) -> int:
        """Bytes that could still be used before memory is critical, after everything that is being loaded."""
        return self.last.available_bytes - self._needs().loading_bytes - self.floors.critical_bytes

    @property
    def leaked_bytes(self) -> int:
        """Memory that stays wired although no runner lives here; 0 if there is none."""
        return self._leak.num_bytes

    @property
    def loading_bytes(self) -> int:
        """Weights that are still being loaded, which the system counts as available."""
        return self._needs().loading_bytes

    @property
    def used_bytes(self) -> int:
        return self.last.total_bytes - self.last.available_bytes

    def _snapshot(self, reading: MemoryReading) -> Snapshot:
        return Snapshot(self._now(), reading.total_bytes, reading.available_bytes, reading.wired_bytes)

    def _take(self, snapshot: Snapshot) -> None:
        self._kept.append(snapshot)
        needs, floors = self._needs(), self.floors
        self._is_tight = self.free_bytes < needs.pending_bytes
        self._leak.note(snapshot.wired_bytes, snapshot.total_bytes, needs.num_runners, snapshot.time)
        level = floors.level(snapshot.available_bytes, needs.loading_bytes)
        if level is not self.level:
            was, self.level = self.level, level
            _log.log(
                logging.WARNING if level > was else logging.INFO,
                "memory pressure is %s: %.2f of %.1f GB are free, weights still need %.2f GB, critical below %.2f GB",
                level.name.lower(), snapshot.available_bytes / 1e9, snapshot.total_bytes / 1e9,
                needs.loading_bytes / 1e9, floors.critical_bytes / 1e9,
            )  # fmt: skip
