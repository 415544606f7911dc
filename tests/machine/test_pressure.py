"""From how much memory is in use to what the mesh does about it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from exo_mesh.machine.memory import MemoryReading
from exo_mesh.machine.pressure import KEPT, Floors, MemoryMonitor, Needs, PressureLevel

GIB = 2**30


@pytest.mark.parametrize(
    ("total", "available", "level"),
    [
        (24, 7.2, PressureLevel.OK),
        (24, 0.9, PressureLevel.OK),
        (24, 0.7, PressureLevel.WARN),
        (24, 0.4, PressureLevel.CRITICAL),
        (4, 0.35, PressureLevel.OK),
        (4, 0.25, PressureLevel.WARN),
        (4, 0.15, PressureLevel.CRITICAL),
    ],
)
def test_what_is_free_decides_and_not_what_is_in_use(total: float, available: float, level: PressureLevel) -> None:
    """A laptop with 70 % of 24 GiB in use by other programs has room for a model of 7 MB."""
    assert Floors.of(int(total * GIB)).level(int(available * GIB), 0) is level


def test_weights_that_are_still_to_be_loaded_are_not_free() -> None:
    floors = Floors.of(24 * GIB)
    assert floors.level(7 * GIB, 6 * GIB) is PressureLevel.OK
    assert floors.level(7 * GIB, int(6.5 * GIB)) is PressureLevel.WARN


def test_a_share_that_somebody_has_set_is_kept_to() -> None:
    floors = Floors.of(100 * GIB, threshold=0.8)
    levels = [floors.level(int(free * GIB), 0) for free in (26, 24, 19)]
    assert levels == [PressureLevel.OK, PressureLevel.WARN, PressureLevel.CRITICAL]


async def test_stages_hear_what_their_kv_may_still_take_as_long_as_it_is_less_than_they_may_need() -> None:
    told: list[tuple[PressureLevel, int]] = []
    available = 10 * GIB

    async def tell(level: PressureLevel, free_bytes: int) -> None:
        told.append((level, free_bytes))

    def read() -> MemoryReading:
        return MemoryReading(24 * GIB, available)

    monitor = MemoryMonitor(read, tell, lambda: Needs(2 * GIB, 6 * GIB), poll_s=0.001)
    task = asyncio.create_task(monitor.run())
    async with asyncio.timeout(5):
        while len(monitor.kept) < 5:
            await asyncio.sleep(0.001)
        assert not told, "there are 7 GiB for the 6 that they may need"
        available = 5 * GIB
        while not told:
            await asyncio.sleep(0.001)
        available = 20 * GIB
        while told[-1][1] < 10 * GIB:
            await asyncio.sleep(0.001)
    assert told[0] == (PressureLevel.OK, 5 * GIB - 2 * GIB - 3 * GIB // 4)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


class Machine:
    """A machine with 100 GiB, of which any number may be in use; `told` has what its monitor said."""

    def __init__(self) -> None:
        self.used = 0
        self.broken = False
        self.told: list[PressureLevel] = []
        self.monitor = MemoryMonitor(self.read, self.tell, poll_s=0.001, threshold=0.8)

    def read(self) -> MemoryReading:
        if self.broken:
            raise OSError("no /proc")
        return MemoryReading(100 * GIB, (100 - self.used) * GIB)

    async def tell(self, level: PressureLevel, free_bytes: int) -> None:
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
