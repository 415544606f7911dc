"""Temperature and power from a tree of files like /sys, and from nvidia-smi's words."""

from __future__ import annotations

from pathlib import Path

from exo_mesh.machine.sensors import SensorReading, Sensors, parse_nvidia_sensors


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / "class" / name).parent.mkdir(parents=True, exist_ok=True)
        (root / "class" / name).write_text(text)


def test_the_hottest_sensor_counts_and_power_is_added_up(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "hwmon/hwmon0/name": "k10temp\n",
            "hwmon/hwmon0/temp1_input": "61500\n",
            "hwmon/hwmon1/name": "amdgpu\n",
            "hwmon/hwmon1/temp1_input": "72000\n",
            "hwmon/hwmon1/power1_average": "45000000\n",
            "hwmon/hwmon2/name": "BAT0\n",
            "hwmon/hwmon2/power1_input": "9000000\n",
            "hwmon/hwmon3/temp1_input": "-128000\n",
            "thermal/thermal_zone0/temp": "99000\n",
        },
    )
    assert Sensors(tmp_path, lambda: "80, 250.5\n").read() == SensorReading(80.0, 295.5)
    assert Sensors(tmp_path, lambda: "").read() == SensorReading(72.0, 45.0)


def test_boards_without_hwmon_have_thermal_zones_and_others_nothing(tmp_path: Path) -> None:
    assert Sensors(tmp_path, lambda: "").read() == SensorReading(0.0, 0.0)
    write(tmp_path, {"thermal/thermal_zone0/temp": "48000", "thermal/thermal_zone1/temp": "broken"})
    assert Sensors(tmp_path, lambda: "").read() == SensorReading(48.0, 0.0)


def test_power_of_processors_is_what_their_counters_gained_also_when_they_wrap(tmp_path: Path) -> None:
    now = [10.0]
    sensors = Sensors(tmp_path, lambda: "", lambda: now[0])
    counter = "powercap/intel-rapl:0/energy_uj"
    write(tmp_path, {counter: "90000000", "powercap/intel-rapl:0/max_energy_range_uj": "100000000"})
    write(tmp_path, {"powercap/intel-rapl:0:0/energy_uj": "5", "powercap/intel-rapl:0:0/max_energy_range_uj": "9"})
    assert sensors.read().power_w == 0.0
    now[0] += 10.0
    write(tmp_path, {counter: "40000000"})
    assert sensors.read().power_w == 5.0


def test_a_gpu_that_does_not_tell_is_not_read_as_a_number() -> None:
    assert list(parse_nvidia_sensors("[N/A], 31.25\nsome warning\n45, [Not Supported]\n")) == [
        (0.0, 31.25),
        (45.0, 0.0),
    ]
