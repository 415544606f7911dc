"""Reads power, temperature and load from the files that Linux provides below /sys, without talking to a device.

Every function takes the root of such a tree and returns what it finds there; a file that is missing or unreadable
counts as absent. Sources: the kernel's documentation of hwmon, powercap, amdgpu, power_supply and devfreq.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec

from exo_mesh.domain.power import AcceleratorReading, DeviceValues

SYS = Path("/sys")

MIN_C, MAX_C = 1.0, 150.0
"""Plausible temperatures. A sensor outside this range is not connected, or broken."""

MAX_W = 20_000.0
"""Most plausible power of a machine that runs a node; a larger figure means a broken sensor."""

_MAX_FILE_BYTES = 256
_AMD_VENDOR, _INTEL_VENDOR = "0x1002", "0x8086"
_INTEL_DRIVERS = ("i915", "xe")


class EnergyZone(msgspec.Struct, frozen=True):
    """A counter of RAPL. part: "cpu" for the package of a processor, "memory" for its DRAM. uj: microjoules since some
    time; the counter wraps at max_uj."""

    name: str
    part: str
    uj: int
    max_uj: int


# Processors: RAPL, which AMD's processors support too.


def read_energy_zones(root: Path = SYS) -> list[EnergyZone]:
    """Reads the energy counters of processors and their memory. A package includes its cores, so counters of cores are
    left out; so is "psys", which includes everything on some laptops and nothing on others."""
    zones = []
    for folder in sorted((root / "class/powercap").glob("intel-rapl:*")):
        part = _part_of(folder.name, text(folder / "name"))
        uj, max_uj = number(folder / "energy_uj"), number(folder / "max_energy_range_uj")
        if part and uj is not None and max_uj:
            zones.append(EnergyZone(folder.name, part, int(uj), int(max_uj)))
    return zones


def locked_energy_zones(
    root: Path = SYS, may_read: Callable[[Path], bool] = lambda file: os.access(file, os.R_OK)
) -> list[Path]:
    """Lists counters of processors that exist but that this user may not read: usually only root may."""
    found = (root / "class/powercap").glob("intel-rapl:*/energy_uj")
    return sorted(file for file in found if file.parent.name.count(":") == 1 and not may_read(file))


def gained_uj(before: EnergyZone, now: EnergyZone) -> int:
    """Returns a counter's gain; the counter may have wrapped once."""
    return (now.uj - before.uj) % max(1, now.max_uj)


def _part_of(folder: str, name: str) -> str:
    if folder.count(":") == 1:
        return "" if name == "psys" else "cpu"
    return "memory" if name == "dram" else ""


# The whole machine.


def read_battery_w(root: Path = SYS) -> float | None:
    """Power that the machine draws from its batteries; None unless it runs on them."""
    watts = []
    for folder in sorted((root / "class/power_supply").glob("*")):
        if text(folder / "type") != "Battery" or text(folder / "status") != "Discharging":
            continue
        power_uw, current_ua, voltage_uv = (number(folder / f"{what}_now") for what in ("power", "current", "voltage"))
        if power_uw is None and current_ua is not None and voltage_uv is not None:
            power_uw = current_ua * voltage_uv / 1e6
        if power_uw is not None:
            watts.append(abs(power_uw) / 1e6)  # some drivers report a negative number
    return watts_or_none(sum(watts))


def read_temperature(root: Path = SYS) -> tuple[float, str] | None:
    """Returns (°C, source) of the hottest hwmon sensor; of the thermal zones if there is no such sensor."""
    for source, pattern in (
        ("hwmon", "class/hwmon/hwmon*/temp*_input"),
        ("thermal", "class/thermal/thermal_zone*/temp"),
    ):
        degrees = [celsius_or_none(number(file), 1000) for file in root.glob(pattern)]
        if known := [one for one in degrees if one is not None]:
            return max(known), source
    return None


# Accelerators. Their ids are assigned later, because other sources have accelerators too.


def read_accelerators(root: Path = SYS) -> list[AcceleratorReading]:
    """Reads the GPUs of AMD and Intel, then the NPU of a Rockchip board."""
    cards = sorted((root / "class/drm").glob("card[0-9]*/device"), key=lambda device: _card_number(device.parent.name))
    found = [reading for device in cards if (reading := _gpu(device)) is not None]
    npu = read_rockchip_npu(root)
    return [*found, npu] if npu is not None else found


def _is_apu(device: Path) -> bool:
    """Whether an AMD GPU is part of the processor package, so that the package's counter includes its energy. Its
    gpu_metrics table begins with its size, then its format revision: 2 and 3 are of APUs."""
    with contextlib.suppress(OSError), (device / "gpu_metrics").open("rb") as table:
        head = table.read(4)
        return len(head) > 2 and head[2] in (2, 3)
    return False


def _card_number(name: str) -> int:
    return int(re.sub(r"\D", "", name) or 0)


def _gpu(device: Path) -> AcceleratorReading | None:
    if "-" in device.parent.name:  # card0-DP-1 is a connector
        return None
    vendor = text(device / "vendor")
    if vendor == _AMD_VENDOR or (not vendor and (device / "mem_info_vram_total").exists()):
        return _amd(device)
    return _intel(device) if vendor == _INTEL_VENDOR else None


def _amd(device: Path) -> AcceleratorReading | None:
    used, total, mapped_used, mapped_total = (
        number(device / f"mem_info_{kind}_{what}") for kind in ("vram", "gtt") for what in ("used", "total")
    )
    if not total:
        return None
    busy = number(device / "gpu_busy_percent")
    sensors = _hwmon(device, ("amdgpu",))
    watts = hertz = celsius = None
    if sensors is not None:
        microwatts = number(sensors / "power1_average")
        microwatts = number(sensors / "power1_input") if microwatts is None else microwatts
        watts = watts_or_none(None if microwatts is None else microwatts / 1e6)
        hertz, celsius = number(sensors / "freq1_input"), celsius_or_none(number(sensors / "temp1_input"), 1000)
    values = DeviceValues.of(
        "amdgpu", utilization=share_or_none(busy), power_w=watts, temperature_c=celsius, memory_used_bytes=used,
        memory_total_bytes=total, mapped_used_bytes=mapped_used, mapped_total_bytes=mapped_total, clock_hz=hertz,
    )  # fmt: skip
    name = text(device / "product_name") or f"AMD GPU {text(device / 'device')}".strip()
    return AcceleratorReading("", "gpu", "amd", name, values, _is_apu(device))


def _intel(device: Path) -> AcceleratorReading | None:
    """Reads a separate card; the GPU in a processor has no sensors, and the package's counter includes its energy."""
    sensors = _hwmon(device, _INTEL_DRIVERS)
    if sensors is None:
        return None
    microjoules = number(sensors / "energy1_input")
    celsius = celsius_or_none(number(sensors / "temp2_input") or number(sensors / "temp1_input"), 1000)
    joules = None if microjoules is None else microjoules / 1e6
    values = DeviceValues.of(text(sensors / "name"), temperature_c=celsius, energy_j=joules)
    return AcceleratorReading("", "gpu", "intel", f"Intel GPU {text(device / 'device')}".strip(), values)


def _hwmon(device: Path, names: Iterable[str]) -> Path | None:
    folders = sorted((device / "hwmon").glob("hwmon*"))
    return next((folder for folder in folders if text(folder / "name") in names), None)


def read_rockchip_npu(root: Path = SYS) -> AcceleratorReading | None:
    """Reads the NPU of a Rockchip chip: the load from its driver, which usually only root may read, or devfreq."""
    scaling = next(iter(sorted((root / "class/devfreq").glob("*.npu"))), None)
    cores = parse_npu_load(text(root / "kernel/debug/rknpu/load"))
    if scaling is None and cores is None:
        return None
    values = DeviceValues()
    if cores is not None:
        values = DeviceValues.of("rknpu", utilization=cores)
    if scaling is not None:
        load = parse_devfreq_load(text(scaling / "load"))
        values = values.merged(DeviceValues.of("devfreq", utilization=load, clock_hz=number(scaling / "cur_freq")))
    celsius = _zone_celsius(root, "npu")
    values = values.merged(DeviceValues.of("thermal", temperature_c=celsius))
    return AcceleratorReading("", "npu", "rockchip", "Rockchip NPU", values)


def parse_npu_load(line: str) -> float | None:
    """Mean of the cores, 0 to 1, in `NPU load:  Core0: 25%, Core1:  0%, Core2:  0%,`; chips with one core list one."""
    shares = [int(percent) for percent in re.findall(r"(\d{1,3})\s*%", line)]
    return min(1.0, sum(shares) / len(shares) / 100) if shares else None


def parse_devfreq_load(line: str) -> float | None:
    """Reads `37@1000000000Hz` as 0.37; some kernels write only the number."""
    found = re.match(r"(\d{1,3})(@\d+Hz)?$", line)
    return min(1.0, int(found[1]) / 100) if found else None


def _zone_celsius(root: Path, kind: str) -> float | None:
    for zone in sorted((root / "class/thermal").glob("thermal_zone*")):
        if kind in text(zone / "type"):
            return celsius_or_none(number(zone / "temp"), 1000)
    return None


# Files and plausible values.


def text(file: Path) -> str:
    """Returns the beginning of a file, without surrounding white space; "" if it cannot be read."""
    with contextlib.suppress(OSError), file.open("rb") as opened:
        return opened.read(_MAX_FILE_BYTES).decode(errors="replace").strip()
    return ""


def number(file: Path) -> float | None:
    """Returns the number in a file; None if there is none."""
    with contextlib.suppress(ValueError):
        return float(text(file))
    return None


def celsius_or_none(value: float | None, per_degree: float = 1.0) -> float | None:
    """Returns degrees; None for a sensor that is not connected, or broken."""
    return value / per_degree if value is not None and MIN_C <= value / per_degree <= MAX_C else None


def watts_or_none(value: float | None) -> float | None:
    """Returns watts; None for 0, which sensors report that measure nothing, and for implausible values."""
    return value if value is not None and 0 < value < MAX_W else None


def share_or_none(percent: float | None) -> float | None:
    """Returns a share from 0 to 1; None if the value is not a percentage."""
    return percent / 100 if percent is not None and 0 <= percent <= 100 else None
