"""Power, temperature and load from trees of files like /sys (tests/machine/recorded)."""

from __future__ import annotations

from pathlib import Path

import pytest

from exo_mesh.domain.power import HardwareReading
from exo_mesh.machine.power.energy_meter import EnergyMeter
from exo_mesh.machine.power.meter import read_files
from exo_mesh.machine.power.system_files import (
    locked_energy_zones,
    parse_devfreq_load,
    parse_npu_load,
    read_accelerators,
    read_battery_w,
    read_energy_zones,
    read_temperature,
)
from tests.support.recorded import plant, write


class Box:
    """A machine with a tree of files, whose meter is read at times of our choice."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.meter = EnergyMeter()

    def read(self, now: float, **files: str) -> HardwareReading:
        return self.meter.take(now, read_files(self.root))


def test_a_card_of_amd_says_everything_but_its_energy(tmp_path: Path) -> None:
    (card,) = read_accelerators(plant(tmp_path, "amd-card.sysfs"))
    assert (card.kind, card.vendor, card.name, card.in_processor) == ("gpu", "amd", "Radeon RX 7900 XTX", False)
    told = card.values.describe()
    assert set(told.pop("sources").values()) == {"amdgpu"}
    assert told == {
        "utilization": 0.87, "power_w": 312.0, "temperature_c": 61.0, "memory_used_bytes": 18253611008,
        "memory_total_bytes": 25753026560, "mapped_used_bytes": 104857600, "mapped_total_bytes": 33554432000,
        "clock_hz": 2482000000.0,
    }  # fmt: skip


def test_a_machine_draws_what_its_processors_and_its_cards_draw_together(tmp_path: Path) -> None:
    box = Box(plant(tmp_path, "amd-card.sysfs"))
    first = box.read(100.0)
    assert first.machine.power_w == 312.0, "a counter says nothing before its second reading"
    write(tmp_path, "class/powercap/intel-rapl:0/energy_uj", str(1000000 + 2 * 40_000_000))
    second = box.read(102.0)
    assert second.machine.power_w == 352.0 and second.machine.energy_j == 704.0
    assert second.machine.sources["power_w"] == "rapl+amdgpu"
    assert second.machine.sources["energy_j"] == "rapl+amdgpu*", "the card's energy was added up from its watts"
    assert second.machine.temperature_c == 72.5
    assert {part.name: part.power_w for part in second.parts} == {"cpu": 40.0, "gpu0": 312.0}


def test_the_gpu_in_a_processor_is_not_counted_twice(tmp_path: Path) -> None:
    box = Box(plant(tmp_path, "amd-apu.sysfs"))
    assert box.read(0.0).machine.power_w == 41.0, "until the processor's counter says more"
    write(tmp_path, "class/powercap/intel-rapl:0/energy_uj", str(2000000 + 55_000_000))
    reading = box.read(1.0)
    assert reading.machine.power_w == 55.0 and reading.machine.energy_j == 55.0
    assert reading.accelerators[0].values.power_w == 41.0
    assert reading.accelerators[0].values.utilization == 0.0, "measured, and idle: that is no unknown value"


def test_counters_begin_again_at_their_maximum(tmp_path: Path) -> None:
    box = Box(plant(tmp_path, "intel-laptop.sysfs"))
    write(tmp_path, "class/power_supply/BAT0/status", "Charging")
    box.read(0.0)
    write(tmp_path, "class/powercap/intel-rapl:0/energy_uj", "9671150")  # 328,850 to the end, then 9,671,150
    write(tmp_path, "class/powercap/intel-rapl:0:2/energy_uj", "7000000")
    reading = box.read(1.0)
    assert {part.name: part.power_w for part in reading.parts} == {"cpu": 10.0, "memory": 2.0}
    assert reading.machine.power_w == 12.0 and reading.machine.sources["power_w"] == "rapl"


def test_a_counter_that_was_set_to_zero_has_not_gained_a_kilowatt_hour(tmp_path: Path) -> None:
    box = Box(plant(tmp_path, "amd-apu.sysfs"))
    box.read(0.0)
    write(tmp_path, "class/powercap/intel-rapl:0/energy_uj", "0")
    assert [part.name for part in box.read(1.0).parts] == ["gpu0"]


def test_nothing_is_counted_for_the_time_in_which_the_machine_slept(tmp_path: Path) -> None:
    box = Box(plant(tmp_path, "amd-card.sysfs"))
    box.read(0.0)
    assert box.read(2.0).machine.energy_j == 624.0
    assert box.read(8000.0).machine.energy_j == 624.0


def test_on_battery_the_machine_draws_what_the_battery_gives(tmp_path: Path) -> None:
    box = Box(plant(tmp_path, "intel-laptop.sysfs"))
    box.read(0.0)
    write(tmp_path, "class/powercap/intel-rapl:0/energy_uj", "262143009000000")
    reading = box.read(2.0)
    assert reading.machine.power_w == 18.25 and reading.machine.energy_j == 36.5
    assert reading.machine.sources["energy_j"] == "battery*"
    write(tmp_path, "class/power_supply/BAT0/power_now", "")
    assert read_battery_w(tmp_path) is None
    write(tmp_path, "class/power_supply/BAT0/current_now", "-1500000")
    write(tmp_path, "class/power_supply/BAT0/voltage_now", "11400000")
    assert read_battery_w(tmp_path) == pytest.approx(17.1)


def test_a_card_with_only_a_counter_gets_the_watts_that_it_comes_to(tmp_path: Path) -> None:
    box = Box(plant(tmp_path, "intel-arc.sysfs"))
    (card,) = box.read(0.0).accelerators
    assert card.id == "gpu0" and card.values.power_w is None and card.values.energy_j == 123.5
    write(tmp_path, "class/drm/card0/device/hwmon/hwmon2/energy1_input", str(123456789 + 90_000_000))
    assert box.read(2.0).accelerators[0].values.power_w == 45.0


def test_an_npu_tells_its_load_by_its_driver_or_by_devfreq(tmp_path: Path) -> None:
    (npu,) = read_accelerators(plant(tmp_path, "rk3588.sysfs"))
    told = npu.values.describe()
    assert (told["utilization"], told["clock_hz"], told["temperature_c"]) == (0.31, 1e9, 46.2)
    assert told["sources"] == {"utilization": "rknpu", "clock_hz": "devfreq", "temperature_c": "thermal"}
    (tmp_path / "kernel/debug/rknpu/load").unlink()  # only root may read it
    (npu,) = read_accelerators(tmp_path)
    assert npu.values.utilization == 0.0 and npu.values.sources["utilization"] == "devfreq"


def test_loads_that_make_no_sense_are_unknown() -> None:
    assert parse_npu_load("NPU load:  40%") == 0.4
    assert parse_npu_load("") is None and parse_npu_load("NPU load") is None
    assert parse_devfreq_load("37@1000000000Hz") == 0.37 and parse_devfreq_load("5") == 0.05
    assert parse_devfreq_load("0@") is None and parse_devfreq_load("busy") is None


def test_the_hottest_sensor_counts_and_zones_only_without_sensors(tmp_path: Path) -> None:
    assert read_temperature(tmp_path) is None
    plant(tmp_path, "rk3588.sysfs")
    assert read_temperature(tmp_path) == (47.153, "thermal")
    write(tmp_path, "class/hwmon/hwmon0/temp1_input", "39000")
    assert read_temperature(tmp_path) == (39.0, "hwmon")


def test_an_empty_tree_says_nothing_at_all(tmp_path: Path) -> None:
    reading = Box(tmp_path).read(0.0)
    assert reading.describe() == {"machine": {"sources": {}}, "accelerators": []}


def test_counters_that_only_root_may_read_are_named(tmp_path: Path) -> None:
    plant(tmp_path, "intel-laptop.sysfs")
    file = tmp_path / "class/powercap/intel-rapl:0/energy_uj"
    assert locked_energy_zones(tmp_path) == []
    assert locked_energy_zones(tmp_path, lambda one: one != file) == [file]
    file.unlink()
    file.mkdir()  # unreadable for root as well
    assert [zone.name for zone in read_energy_zones(tmp_path)] == ["intel-rapl:0:2"]
