"""Reads all sources every READ_EVERY_S in a thread of its own, and keeps the newest figures for the event loop.

The event loop only takes the stored figures. The values of a source that hangs, ends or gives nothing are absent.
"""

from __future__ import annotations

import hashlib
import logging
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import psutil
from msgspec.structs import replace

from exo_mesh.base.clock import Clock, monotonic
from exo_mesh.base.telemetry.hardware_metrics import HardwareMetrics
from exo_mesh.domain.power import NO_HARDWARE, UNKNOWN, DeviceValues, HardwareReading, PartPower
from exo_mesh.machine.power import system_files
from exo_mesh.machine.power.apple import AppleSample, AppleTool, find_tool
from exo_mesh.machine.power.energy_meter import EnergyMeter, RawReading
from exo_mesh.machine.power.nvidia import NvidiaReader
from exo_mesh.machine.power.samples import hardware_samples

READ_EVERY_S = 2.0

STALE_S = 10.0
"""Figures that are older than this are not shown any more: a file or a driver hangs."""

_log = logging.getLogger(__name__)


class HardwareMeter:
    """The hardware meter; `last` is the newest reading. nvidia: shared with the reader of GPU memory."""

    def __init__(
        self,
        sysfs: Path = system_files.SYS,
        power_tool: str = "off",
        nvidia: NvidiaReader | None = None,
        clock: Clock = monotonic,
        read_system: Callable[[], DeviceValues] | None = None,
    ) -> None:
        self._sysfs = sysfs
        self._nvidia = nvidia
        self._clock = clock
        self._read_system = read_system or SystemLoad()
        program = find_tool(power_tool)
        self._tool = AppleTool(program) if program else None
        self._energy = EnergyMeter()
        self._digest = 0
        self._every_s = READ_EVERY_S
        self._held: tuple[float, HardwareReading] = (clock(), NO_HARDWARE)
        self._stop = threading.Event()

    @property
    def last(self) -> HardwareReading:
        """The newest reading, without blocking. Empty before the first reading, and when the thread hangs."""
        at, reading = self._held
        return reading if self._clock() - at <= STALE_S else NO_HARDWARE

    def start(self, metrics: HardwareMetrics) -> None:
        """Starts to read, and shows the figures among the metrics."""
        metrics.sources.append(lambda: hardware_samples(self.last))
        if self._tool is not None:
            self._tool.start()
        threading.Thread(target=self._keep, name="hardware meter", daemon=True).start()

    def close(self) -> None:
        """Ends the threads and the tool."""
        self._stop.set()
        if self._tool is not None:
            self._tool.close()

    def read(self) -> HardwareReading:
        """Blocking. Reads everything once."""
        raw = self._read_all()
        self._digest = self._digest or machine_digest()
        now = self._clock()
        reading = replace(self._energy.take(now, raw), machine_digest=self._digest)
        self._held = now, reading
        return reading

    def _keep(self) -> None:
        logged = False
        while True:
            try:
                self.read()
            except Exception:  # noqa: BLE001  an unexpected file must not end the readings for good
                if not logged:
                    logged = True
                    _log.exception("reading power and temperature failed; it will be retried")
            if self._stop.wait(self._every_s):
                return

    def _read_all(self) -> RawReading:
        sample = None if self._tool is None else self._tool.last
        raw = read_files(self._sysfs)
        nvidia = () if self._nvidia is None else self._nvidia.read()
        if nvidia:
            raw = replace(raw, accelerators=[*nvidia, *raw.accelerators])
        raw = replace(raw, machine=raw.machine.merged(self._read_system()))
        return raw if sample is None else with_sample(raw, sample)


def read_files(root: Path) -> RawReading:
    """Reads the files below /sys."""
    battery_w = system_files.read_battery_w(root)
    whole = None if battery_w is None else PartPower("machine", "battery", battery_w)
    hottest = system_files.read_temperature(root)
    machine = UNKNOWN if hottest is None else DeviceValues.of(hottest[1], temperature_c=hottest[0])
    zones = system_files.read_energy_zones(root)
    return RawReading(system_files.read_accelerators(root), zones, (), whole, machine)


def with_sample(raw: RawReading, sample: AppleSample) -> RawReading:
    """Adds a sample of macmon or mactop; its figures take precedence."""
    whole = next((part for part in sample.parts if part.name == "machine"), raw.whole)
    parts = [part for part in sample.parts if part.name not in ("machine", "gpu0")]
    return replace(
        raw,
        accelerators=[*sample.accelerators, *raw.accelerators],
        parts=[*raw.parts, *parts],
        whole=whole,
        machine=replace(sample.machine, power_w=None).merged(raw.machine),
    )


class SystemLoad:
    """The load of the processors since the last call, and the memory in use, as the system reports them."""

    def __init__(self) -> None:
        self._times: tuple[float, float] | None = None

    def __call__(self) -> DeviceValues:
        memory = psutil.virtual_memory()
        return DeviceValues.of(
            "system",
            utilization=self._utilization(),
            memory_used_bytes=memory.total - memory.available,
            memory_total_bytes=memory.total,
        )

    def _utilization(self) -> float | None:
        """None at first, because there is no earlier reading."""
        times = psutil.cpu_times()
        idle = times.idle + getattr(times, "iowait", 0.0)
        total = sum(times[:8])  # the fields after these are of guests, which Linux has counted already
        before, self._times = self._times, (total, idle)
        if before is None or total <= before[0]:
            return None
        return min(1.0, max(0.0, 1 - (idle - before[1]) / (total - before[0])))


def machine_digest() -> int:
    """Returns a number that all nodes on this machine share until it restarts; 0 if the system has no such id."""
    if sys.platform == "darwin":
        asked = subprocess.run(["sysctl", "-n", "kern.bootsessionuuid"], capture_output=True, timeout=3, check=False)
        boot = asked.stdout.decode(errors="replace").strip()
    else:
        boot = system_files.text(Path("/proc/sys/kernel/random/boot_id"))
    return int.from_bytes(hashlib.sha256(boot.encode()).digest()[:8], "big") if boot else 0
