"""From how much memory is in use to what the mesh does about it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from exo_mesh.machine.memory import MemoryReading
from exo_mesh.machine.pressure import KEPT, MemoryMonitor, PressureLevel, critical_share, tier

GIB = 2**30


@pytest.mark.parametrize(
    ("gib", "share"), [(16, 0.70), (31.9, 0.70), (32, 0.75), (63.9, 0.75), (64, 0.80), (127.9, 0.80), (128, 0.85)]
)
def test_larger_machines_may_be_fuller(gib: float, share: float) -> None:
    assert tier(int(gib * GIB)) == share
    assert critical_share(int(gib * GIB), int(gib * GIB / 2)) == share


def test_what_plans_have_reserved_is_no_pressure() -> None:
    """16 GiB of which plans and others need 13: it is critical half a GiB above that, not at 70 %."""
    assert critical_share(16 * GIB, 13 * GIB) == pytest.approx(13.5 / 16)
    assert critical_share(16 * GIB, 20 * GIB) == pytest.approx(15.5 / 16), "however much was promised"


class Machine:
    """A machine with 100 GiB, of which any number may be in use; `told` has what its monitor said."""

    def __init__(self) -> None:
        self.used = 0
        self.broken = False
        self.told: list[PressureLevel] = []
        self.monitor = MemoryMonitor(self.read, self.tell, poll_s=0.001)

    def read(self) -> MemoryReading:
        if self.broken:
            raise OSError("no /proc")
        return MemoryReading(100 * GIB, (100 - self.used) * GIB)

    async def tell(self, level: PressureLevel) -> None:
        self.told.append(level)

    async def until_told(self, level: PressureLevel) -> None:
        async with asyncio.timeout(5):
            while level not in self.told[-1:]:
                await asyncio.sleep(0.001)


@pytest.fixture
async def machine() -> AsyncIterator[Machine]:
    machine = Machine()
    task = asyncio.create_task(machine.monitor.run())
    yield machine
    assert not task.done()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_a_level_is_told_when_it_comes_repeated_while_it_lasts_and_told_when_it_ends(machine: Machine) -> None:
    for used, level in (
        (76, PressureLevel.WARN),
        (80, PressureLevel.CRITICAL),
        (79, PressureLevel.WARN),
        (20, PressureLevel.OK),
    ):
        machine.used = used
        await machine.until_told(level)
    assert machine.told.count(PressureLevel.OK) == 1
    told = machine.monitor.describe()
    assert (told["level"], told["threshold_pct"], told["pressure_pct"], told["peak_pct"]) == ("ok", 80.0, 20.0, 80.0)
    assert told["headroom_bytes"] == pytest.approx(60 * GIB, abs=1)
    machine.used = 90
    await machine.until_told(PressureLevel.CRITICAL)
    machine.told.clear()
    await machine.until_told(PressureLevel.CRITICAL)


async def test_a_minute_and_a_half_is_kept(machine: Machine) -> None:
    async with asyncio.timeout(5):
        while len(machine.monitor.kept) < KEPT:
            await asyncio.sleep(0.001)
        first = machine.monitor.kept[0]
        while first in machine.monitor.kept:
            await asyncio.sleep(0.001)
    assert len(machine.monitor.kept) == KEPT


async def test_a_reading_that_fails_does_not_end_the_readings(machine: Machine) -> None:
    machine.broken = True
    last = machine.monitor.last
    async with asyncio.timeout(5):
        await asyncio.sleep(0.01)
    assert machine.monitor.last.time - last.time < 5 and machine.told == []
    machine.broken, machine.used = False, 90
    await machine.until_told(PressureLevel.CRITICAL)
