"""NVIDIA's GPUs: through NVML (the driver's library) with nvidia-ml-py if it is installed, else through nvidia-smi.

NVML is opened once and answers within about a millisecond, but a broken driver may block its caller for ever. So one
thread makes all calls, and callers wait for it no longer than a deadline.
"""

from __future__ import annotations

import importlib
import logging
import shutil
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from exo_mesh.base.clock import Clock, monotonic
from exo_mesh.domain.power import AcceleratorReading, DeviceValues
from exo_mesh.machine.accelerators import NvidiaGpu
from exo_mesh.machine.power.system_files import celsius_or_none, share_or_none, watts_or_none
from exo_mesh.machine.tool_output import ask

DEADLINE_S = 3.0
"""How long a caller waits. A driver that has to wake its GPUs takes a second or two."""

FRESH_S = 1.0
"""Callers within this time get the same answer."""

SMI_EVERY_S = 15.0
"""Shortest time between two runs of nvidia-smi, because a run takes 30 to 100 ms of a core."""

REOPEN_S = 30.0
"""How long to wait before NVML is tried again after the driver was lost or had no GPUs."""

SMI_QUERY = (
    "--query-gpu=index,name,memory.total,memory.used,memory.free,utilization.gpu,power.draw,temperature.gpu,clocks.sm",
    "--format=csv,noheader,nounits",
)
"""Arguments of nvidia-smi whose output `parse_smi` reads."""

_DRIVER_FILES = (Path("/proc/driver/nvidia/version"), Path("/dev/nvidiactl"), Path("/dev/dxg"))
"""At least one of these exists if there is a driver; the last is WSL's."""

_MIB = 2**20
_log = logging.getLogger(__name__)


def has_driver() -> bool:
    """Whether this machine seems to have NVIDIA's driver, judged without calling it."""
    return shutil.which("nvidia-smi") is not None or any(file.exists() for file in _DRIVER_FILES)


def import_nvml() -> ModuleType | None:
    """Imports nvidia-ml-py, whose module is called pynvml; None if it is not installed."""
    try:
        return importlib.import_module("pynvml")
    except ImportError:
        return None


class NvmlSession:
    """NVML with the handles of its GPUs, opened when first needed. Never raises: a lost driver has no GPUs.

    nvml: the module pynvml, or an object with its functions.
    """

    def __init__(self, nvml: Any) -> None:
        self._nvml = nvml
        self._handles: list[tuple[int, str, Any]] = []
        self._is_open = False

    def read(self) -> list[AcceleratorReading]:
        """Reads all GPUs of the driver; none if it does not answer."""
        try:
            if not self._is_open:
                self._open()
            found = [self._read(index, name, handle) for index, name, handle in self._handles]
        except self._nvml.NVMLError as exc:
            _log.debug("NVML: %s", exc)
            found = []
        if any(reading.values.sources for reading in found):
            return found
        self.close()  # no GPU gave a value: the driver is gone
        return []

    def close(self) -> None:
        """Releases the driver; the next reading opens it again."""
        if self._is_open:
            self._is_open = False
            self._handles.clear()
            self._ask(self._nvml.nvmlShutdown)

    def _open(self) -> None:
        nvml = self._nvml
        nvml.nvmlInit()
        self._is_open = True
        for index in range(nvml.nvmlDeviceGetCount()):
            handle = self._ask(nvml.nvmlDeviceGetHandleByIndex, index)
            if handle is not None:
                self._handles.append((index, str(self._ask(nvml.nvmlDeviceGetName, handle) or "NVIDIA GPU"), handle))

    def _read(self, index: int, name: str, handle: Any) -> AcceleratorReading:
        nvml = self._nvml
        ask = partial(self._ask_device, handle)
        memory, load = ask(nvml.nvmlDeviceGetMemoryInfo), ask(nvml.nvmlDeviceGetUtilizationRates)
        milliwatts, millijoules = ask(nvml.nvmlDeviceGetPowerUsage), ask(nvml.nvmlDeviceGetTotalEnergyConsumption)
        megahertz = ask(nvml.nvmlDeviceGetClockInfo, nvml.NVML_CLOCK_SM)
        values = DeviceValues.of(
            "nvml",
            utilization=None if load is None else share_or_none(load.gpu),
            power_w=None if milliwatts is None else watts_or_none(milliwatts / 1000),
            temperature_c=celsius_or_none(ask(nvml.nvmlDeviceGetTemperature, nvml.NVML_TEMPERATURE_GPU)),
            memory_used_bytes=None if memory is None else memory.used,
            memory_total_bytes=None if memory is None else memory.total or None,
            clock_hz=None if megahertz is None else megahertz * 1e6,
            energy_j=None if millijoules is None else millijoules / 1000,
        )
        return AcceleratorReading(f"gpu{index}", "gpu", "nvidia", name, values)

    def _ask_device(self, handle: Any, call: Callable[..., Any], *args: Any) -> Any:
        return self._ask(call, handle, *args)

    def _ask(self, call: Callable[..., Any], *args: Any) -> Any:
        """Calls NVML; None for values that this GPU or this driver does not report."""
        try:
            return call(*args)
        except self._nvml.NVMLError:
            return None


class NvidiaReader:
    """The GPUs of NVIDIA's driver, for any thread. `read` takes at most DEADLINE_S, whatever the driver does."""

    def __init__(
        self,
        nvml: Callable[[], Any] = import_nvml,
        ask_smi: Callable[[], str] | None = None,
        is_there: Callable[[], bool] = has_driver,
        clock: Clock = monotonic,
        deadline_s: float = DEADLINE_S,
    ) -> None:
        self._import = nvml
        self._ask_smi = ask_smi or partial(ask, ["nvidia-smi", *SMI_QUERY])
        self._is_there = is_there
        self._clock = clock
        self._deadline_s = deadline_s
        self._changed = threading.Condition()
        self._wanted = self._closed = False
        self._thread: threading.Thread | None = None
        self._session: NvmlSession | None = None
        self._retry_at = float("-inf")
        self._smi: tuple[float, list[AcceleratorReading]] = (float("-inf"), [])
        self._number = 0
        self._last: tuple[AcceleratorReading, ...] = ()
        self._last_at = float("-inf")

    def read(self) -> tuple[AcceleratorReading, ...]:
        """Blocking, for at most DEADLINE_S. Empty if there is no GPU, or if the driver does not answer in time."""
        if self._thread is None and not self._is_there():
            return ()
        with self._changed:
            if self._closed:
                return ()
            if self._clock() - self._last_at < FRESH_S:
                return self._last
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="nvidia", daemon=True)
                self._thread.start()
            before, self._wanted = self._number, True
            self._changed.notify_all()
            answered = self._changed.wait_for(lambda: self._number > before or self._closed, self._deadline_s)
            return self._last if answered else ()

    def gpus(self) -> list[NvidiaGpu]:
        """Returns the GPUs as `exo_mesh.machine.accelerators` needs them; sizes are None without memory of its own."""
        return [_memory_of(reading) for reading in self.read()]

    def close(self) -> None:
        """Ends the thread, without waiting for a driver that does not answer."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._wanted or self._closed)
                if self._closed:
                    break
                self._wanted = False
            found = tuple(self._read_driver())
            with self._changed:
                self._number += 1
                self._last, self._last_at = found, self._clock()
                self._changed.notify_all()
        if self._session is not None:
            self._session.close()

    def _read_driver(self) -> Sequence[AcceleratorReading]:
        now = self._clock()
        if now >= self._retry_at:
            if self._session is None and (nvml := self._import()) is not None:
                self._session = NvmlSession(nvml)
            if self._session is not None and (found := self._session.read()):
                return found
            self._retry_at = now + REOPEN_S
        if now - self._smi[0] >= SMI_EVERY_S:
            self._smi = now, parse_smi(self._ask_smi())
        return self._smi[1]


def parse_smi(output: str) -> list[AcceleratorReading]:
    """Reads the GPUs from the output of nvidia-smi with SMI_QUERY; warnings are skipped, "[N/A]" is None."""
    found = []
    for line in output.splitlines():
        fields = [field.strip() for field in line.split(",")]
        if len(fields) < 9 or not fields[0].isdigit():
            continue
        name = ", ".join(fields[1:-7])  # a name may contain commas; the numbers are at the end
        total, used, free, busy, watts, celsius, megahertz = map(_number, fields[-7:])
        if used is None and total is not None and free is not None:
            used = total - free
        values = DeviceValues.of(
            "nvidia-smi",
            utilization=share_or_none(busy),
            power_w=watts_or_none(watts),
            temperature_c=celsius_or_none(celsius),
            memory_used_bytes=None if used is None else used * _MIB,
            memory_total_bytes=None if total is None else total * _MIB,
            clock_hz=None if megahertz is None else megahertz * 1e6,
        )
        found.append(AcceleratorReading(f"gpu{fields[0]}", "gpu", "nvidia", name, values))
    return found


def _memory_of(reading: AcceleratorReading) -> NvidiaGpu:
    total, used = reading.values.memory_total_bytes, reading.values.memory_used_bytes
    free = None if total is None or used is None else max(0, total - used)
    return NvidiaGpu(int(reading.id.removeprefix("gpu")), reading.name, total, free)


def _number(field: str) -> float | None:
    try:
        return float(field)
    except ValueError:
        return None
