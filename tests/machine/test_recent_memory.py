"""The memory is read once for several questions in a row."""

from __future__ import annotations

from exo_mesh.machine.memory import MemoryReading
from exo_mesh.machine.recent_memory import RecentMemory


def test_a_reading_serves_for_a_moment() -> None:
    now = 10.0
    readings = iter(MemoryReading(100, left) for left in (50, 40, 30))
    recent = RecentMemory(lambda: next(readings), 0.25, lambda: now)
    assert [recent().available_bytes for _ in range(3)] == [50, 50, 50]
    now = 10.25
    assert [recent().available_bytes for _ in range(2)] == [40, 40]
    now = 99.0
    assert recent().available_bytes == 30
