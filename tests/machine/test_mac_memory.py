"""The memory of a Mac, from what `vm_stat` printed on two of 32 GiB: one that is idle, one that swaps."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from exo_mesh.machine.mac_memory import MacMemory, parse_vm_stat
from exo_mesh.machine.memory import MemoryReading
from exo_mesh.machine.pressure import Floors, PressureLevel
from exo_mesh.machine.wired_leak import WiredLeak

TOTAL = 32 * 2**30
PAGE = 16384

IDLE = """Mach Virtual Memory Statistics: (page size of 16384 bytes)
Pages free:                                     9436.
Pages active:                                 774260.
Pages inactive:                               915780.
Pages speculative:                              1639.
Pages throttled:                                   0.
Pages wired down:                             184732.
Pages purgeable:                               22877.
"Translation faults":                       37287533.
Pages copy-on-write:                         5732353.
File-backed pages:                           1021174.
Anonymous pages:                              670505.
Pages stored in compressor:                   371034.
Pages occupied by compressor:                 167682.
Swapouts:                                          0.
"""

SWAPPING = """Mach Virtual Memory Statistics: (page size of 16384 bytes)
Pages free:                                    10069.
Pages active:                                 432859.
Pages inactive:                               426177.
Pages speculative:                              5899.
Pages throttled:                                   0.
Pages wired down:                             171481.
Pages purgeable:                               11278.
"Translation faults":                     1935466161.
File-backed pages:                            398262.
Anonymous pages:                              466673.
Pages stored in compressor:                  1108263.
Pages occupied by compressor:                1013366.
"""


@pytest.mark.parametrize(
    ("output", "pages", "wired"),
    [
        (IDLE, 2_097_152 - 184_732 - 670_505 - 167_682, 184_732),
        (SWAPPING, 2_097_152 - 171_481 - 466_673 - 1_013_366, 171_481),
    ],
)
def test_what_is_available_is_what_neither_wires_nor_holds_data_of_programs(
    output: str, pages: int, wired: int
) -> None:
    assert parse_vm_stat(output, TOTAL) == (pages * PAGE, wired * PAGE)


@pytest.mark.parametrize("output", ["", "vm_stat: command not found", IDLE.replace("Anonymous", "Other"), IDLE[60:]])
def test_another_output_is_no_reading(output: str) -> None:
    assert parse_vm_stat(output, TOTAL) is None


def test_a_mac_whose_memory_holds_files_is_not_short() -> None:
    """Free pages alone would be 155 MB of 32 GiB, which is critical."""
    available, _ = parse_vm_stat(IDLE, TOTAL) or (0, 0)
    assert Floors.of(TOTAL).level(available, 0) is PressureLevel.OK
    assert Floors.of(TOTAL).level(9436 * PAGE, 0) is PressureLevel.CRITICAL


@pytest.fixture
def outputs() -> list[str]:
    return [IDLE]


@pytest.fixture
def memory(outputs: list[str]) -> Iterator[MacMemory]:
    read = MacMemory(lambda: MemoryReading(TOTAL, 123, why="the system's memory"), lambda: outputs[-1], poll_s=0.001)
    yield read
    read.close()


def test_the_tool_is_asked_again_and_the_collector_stands_in(memory: MacMemory, outputs: list[str]) -> None:
    def until_available(wanted: int) -> None:
        give_up_at = time.monotonic() + 5
        while memory().available_bytes != wanted:
            assert time.monotonic() < give_up_at

    until_available(1_074_233 * PAGE)
    outputs.append(SWAPPING)
    until_available(445_632 * PAGE)
    assert memory().wired_bytes == 171_481 * PAGE
    outputs.append("")
    until_available(123)
    assert memory().wired_bytes is None


def test_wired_memory_that_nobody_uses_is_a_leak_once_it_stays() -> None:
    leak = WiredLeak()
    leak.note(9 * 10**9, TOTAL, 1, now=0.0)
    leak.note(9 * 10**9, TOTAL, 0, now=10.0)
    leak.note(9 * 10**9, TOTAL, 0, now=39.0)
    assert leak.num_bytes == 0, "it may still be unwired"
    leak.note(9 * 10**9, TOTAL, 0, now=40.0)
    assert leak.num_bytes == 9 * 10**9
    leak.note(3 * 10**9, TOTAL, 0, now=41.0)
    assert leak.num_bytes == 0
    leak.note(9 * 10**9, 512 * 2**30, 0, now=42.0)
    leak.note(9 * 10**9, 512 * 2**30, 0, now=99.0)
    assert leak.num_bytes == 0, "on a machine of that size macOS wires so much itself"
