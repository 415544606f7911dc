"""How hot this machine is and what it draws, as far as its system says so without special rights.

Linux: the sensors of hwmon, else the thermal zones; the power that GPU drivers report there, and of the processors the
energy counters of powercap, which only some systems let everybody read. NVIDIA's GPUs: nvidia-smi. macOS tells neither
to programs without root rights, so both stay unknown there.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from exo_mesh.clock import Clock, monotonic
from exo_mesh.machine.accelerator_readings import ask

READ_EVERY_S = 10.0

NVIDIA_SENSORS = ("--query-gpu=temperature.gpu,power.draw", "--format=csv,noheader,nounits")
"""Arguments of nvidia-smi whose output `parse_nvidia_sensors` reads."""

MIN_C, MAX_C = 1.0, 150.0
"""A sensor outside is not connected, or broken."""

MAX_W = 20_000.0


@dataclass(frozen=True, slots=True)
class SensorReading:
    """temperature_c: the hottest sensor. power_w: of all processors and GPUs that say it. 0: unknown."""

    temperature_c: float = 0.0
    power_w: float = 0.0


@dataclass(frozen=True, slots=True)
class EnergyCounter:
    """What a processor has used since some time, in microjoules; it wraps at max_uj."""

    uj: int
    max_uj: int


class Sensors:
    """`last` is what was read last; `keep` reads in a thread, since a driver may take seconds to answer."""

    def __init__(
        self, root: Path = Path("/sys"), read_nvidia: Callable[[], str] | None = None, clock: Clock = monotonic
    ):
        self._root = root
        self._read_nvidia = read_nvidia or _nvidia
        self._clock = clock
        self._energy: tuple[float, dict[str, EnergyCounter]] = (0.0, {})
        self.last = SensorReading()

    async def keep(self) -> None:
        """Read every READ_EVERY_S, for ever; returns at once where there is nothing to read."""
        if sys.platform == "darwin":
            return
        while True:
            await asyncio.to_thread(self.read)
            await asyncio.sleep(READ_EVERY_S)

    def read(self) -> SensorReading:
        """Blocking."""
        gpus = list(parse_nvidia_sensors(self._read_nvidia()))
        heats = [celsius for celsius, _ in gpus] + list(read_temperatures(self._root))
        watts = [power for _, power in gpus] + list(read_powers(self._root)) + [self._processor_power()]
        hottest = max((heat for heat in heats if MIN_C <= heat <= MAX_C), default=0.0)
        self.last = SensorReading(round(hottest, 1), round(sum(power for power in watts if 0 < power < MAX_W), 1))
        return self.last

    def _processor_power(self) -> float:
        """From two readings of the energy counters; 0 for the first."""
        (since, before), now = self._energy, self._clock()
        counters = read_energy(self._root)
        self._energy = now, counters
        if not before or now <= since:
            return 0.0
        used_uj = sum(
            (counter.uj - before[name].uj) % max(counter.max_uj, 1)
            for name, counter in counters.items()
            if name in before
        )
        return used_uj / 1e6 / (now - since)


def parse_nvidia_sensors(output: str) -> Iterator[tuple[float, float]]:
    """(°C, W) of each GPU; 0 for what a GPU does not tell ("[N/A]")."""
    for line in output.splitlines():
        fields = [field.strip() for field in line.split(",")]
        if len(fields) == 2:
            yield _float(fields[0]), _float(fields[1])


def read_temperatures(root: Path) -> Iterator[float]:
    """°C of every sensor of hwmon; of the thermal zones if there is none."""
    found = [_number(file) / 1000 for file in sorted(root.glob("class/hwmon/hwmon*/temp*_input"))]
    yield from found or [_number(file) / 1000 for file in sorted(root.glob("class/thermal/thermal_zone*/temp"))]


def read_powers(root: Path) -> Iterator[float]:
    """W of the drivers of GPUs that report power to hwmon: amdgpu and xe. Other sensors there measure parts of them, or
    batteries."""
    for folder in sorted(root.glob("class/hwmon/hwmon*")):
        if _text(folder / "name") in ("amdgpu", "xe"):
            yield (_number(folder / "power1_average") or _number(folder / "power1_input")) / 1e6


def read_energy(root: Path) -> dict[str, EnergyCounter]:
    """The counters of whole processors; those of their parts, such as intel-rapl:0:1, are within them."""
    found = {}
    for folder in sorted(root.glob("class/powercap/intel-rapl:*")):
        counter = EnergyCounter(int(_number(folder / "energy_uj")), int(_number(folder / "max_energy_range_uj")))
        if folder.name.count(":") == 1 and counter.uj > 0:
            found[folder.name] = counter
    return found


def _nvidia() -> str:
    return ask(["nvidia-smi", *NVIDIA_SENSORS]) if shutil.which("nvidia-smi") else ""


def _number(file: Path) -> float:
    return _float(_text(file))


def _float(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return 0.0


def _text(file: Path) -> str:
    with contextlib.suppress(OSError):
        return file.read_bytes()[:64].decode(errors="replace").strip()
    return ""
