"""Apple silicon: figures from mactop or macmon, which need no root rights. They print a line of JSON per sample.

mactop is preferred: on some Macs macmon has stopped the GPU's driver under load (docs/reference/power.md). The tool is
a child of the node: it ends with the node, its lines are bounded, and if it fails the figures are unknown.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from exo_mesh.base.clock import Clock, monotonic
from exo_mesh.domain.power import AcceleratorReading, DeviceValues, PartPower
from exo_mesh.machine.power.system_files import celsius_or_none, share_or_none, watts_or_none

TOOLS = ("mactop", "macmon")
"""In the order in which they are searched."""

PLACES = ("/opt/homebrew/bin", "/usr/local/bin", "/opt/local/bin")
"""Directories of Homebrew and MacPorts programs; launchd's PATH has none of them."""

INTERVAL_MS = 2000
MAX_LINE_BYTES = 1 << 20
"""A sample has 1 to 30 KB; mactop's lists processes and volumes."""

STALE_S = 10.0
FIRST_RETRY_S, LAST_RETRY_S = 10.0, 600.0
"""A tool that ends is restarted after 10 s, then after twice as long each time."""

_log = logging.getLogger(__name__)


class AppleSample:
    """One sample. parts: cpu, memory, gpu0, and machine if there is a sensor for the whole machine."""

    __slots__ = ("accelerators", "machine", "parts")

    def __init__(
        self, machine: DeviceValues, accelerators: tuple[AcceleratorReading, ...], parts: tuple[PartPower, ...]
    ) -> None:
        self.machine = machine
        self.accelerators = accelerators
        self.parts = parts


def parse_line(tool: str, line: bytes) -> AppleSample | None:
    """Reads a line of either tool; None if it has no sample. mactop may print samples as items of a long array."""
    try:
        sample = json.loads(line.strip().strip(b"[],"))
    except ValueError:
        return None
    if not isinstance(sample, dict):
        return None
    return parse_mactop(sample) if tool == "mactop" else parse_macmon(sample)


def parse_mactop(sample: Mapping[str, Any]) -> AppleSample:
    """Reads a sample of `mactop --headless --format json`: watts, °C, percent, MHz, bytes. total_power is the whole
    machine's; system_power is what remains of it without the parts."""
    soc, memory, system = (_table(sample, name) for name in ("soc_metrics", "memory", "system_info"))
    gpu = DeviceValues.of(
        "mactop",
        utilization=share_or_none(_first({**sample, **soc}, "gpu_active", "gpu_usage")),
        power_w=_first(soc, "gpu_power"),
        temperature_c=celsius_or_none(_first(soc, "gpu_temp")),
        memory_used_bytes=_first(memory, "used"),
        memory_total_bytes=_first(memory, "total"),
        clock_hz=_times(_first(soc, "gpu_freq_mhz"), 1e6),
    )
    machine = DeviceValues.of(
        "mactop",
        utilization=share_or_none(_first(sample, "cpu_usage")),
        power_w=watts_or_none(_first(soc, "total_power")),
        temperature_c=celsius_or_none(_first(soc, "soc_temp", "cpu_temp")),
    )
    watts = {"cpu": _first(soc, "cpu_power"), "memory": _first(soc, "dram_power"), "npu0": _first(soc, "ane_power")}
    return _sample("mactop", machine, gpu, watts, str(system.get("name") or "Apple GPU"))


def parse_macmon(sample: Mapping[str, Any]) -> AppleSample:
    """Reads a sample of `macmon pipe`: watts, °C, bytes; shares are 0 to 1. Knows the fields of 0.4 and of 0.8."""
    temp, memory = _table(sample, "temp"), _table(sample, "memory")
    hertz, usage = _pair(sample.get("gpu_usage"))
    gpu = DeviceValues.of(
        "macmon",
        utilization=share_or_none(_times(_first({**sample, "usage": usage}, "gpu_active_ratio", "usage"), 100)),
        power_w=_first(sample, "gpu_power"),
        temperature_c=celsius_or_none(_first(temp, "gpu_temp_avg")),
        memory_used_bytes=_first(memory, "ram_usage"),
        memory_total_bytes=_first(memory, "ram_total"),
        clock_hz=_times(hertz, 1e6),
    )
    machine = DeviceValues.of(
        "macmon",
        utilization=share_or_none(_times(_first(sample, "cpu_usage_ratio", "cpu_usage_pct"), 100)),
        power_w=watts_or_none(_first(sample, "sys_power")),
        temperature_c=celsius_or_none(_first(temp, "cpu_temp_avg")),
    )
    names = {"cpu": "cpu_power", "memory": "ram_power", "npu0": "ane_power"}
    watts = {part: _first(sample, name) for part, name in names.items()}
    return _sample("macmon", machine, gpu, watts, "Apple GPU")


def _sample(
    tool: str, machine: DeviceValues, gpu: DeviceValues, watts: Mapping[str, float | None], name: str
) -> AppleSample:
    parts = [PartPower(part, tool, value) for part, value in watts.items() if value is not None]
    if gpu.power_w is not None:
        parts.append(PartPower("gpu0", tool, gpu.power_w))
    if machine.power_w is not None:
        parts.append(PartPower("machine", tool, machine.power_w))
    return AppleSample(machine, (AcceleratorReading("gpu0", "gpu", "apple", name, gpu),), tuple(parts))


def find_tool(wanted: str) -> str:
    """Returns the program for --power-tool: "auto" searches one on a Mac, "off" uses none, a path is used as it is."""
    if wanted == "off" or (wanted == "auto" and sys.platform != "darwin"):
        return ""
    if wanted != "auto":
        return wanted
    path = os.pathsep.join((os.environ.get("PATH", ""), *PLACES))
    return next((found for tool in TOOLS if (found := shutil.which(tool, path=path))), "")


def arguments_of(program: str) -> list[str]:
    """Returns the command line of a tool, by its name."""
    if "mactop" in Path(program).name:
        return [program, "--headless", "--format", "json", "--interval", str(INTERVAL_MS)]
    return [program, "pipe", "--interval", str(INTERVAL_MS)]


class AppleTool:
    """Keeps a tool running in a thread of its own. `last` is its newest sample, None if that is old."""

    def __init__(self, program: str, clock: Clock = monotonic, first_retry_s: float = FIRST_RETRY_S) -> None:
        self.program = program
        self._tool = "mactop" if "mactop" in Path(program).name else "macmon"
        self._clock = clock
        self._first_retry_s = first_retry_s
        self._last: tuple[float, AppleSample] | None = None
        self._child: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self._stop = threading.Event()

    @property
    def last(self) -> AppleSample | None:
        """The newest sample, if it is no older than STALE_S."""
        held = self._last
        return held[1] if held is not None and self._clock() - held[0] <= STALE_S else None

    def start(self) -> None:
        """Starts the tool, and restarts it when it ends."""
        threading.Thread(target=self._keep, name="power tool", daemon=True).start()

    def close(self) -> None:
        """Kills the tool, without waiting: it has nothing to clean up."""
        self._stop.set()
        with self._lock:
            if self._child is not None:
                self._child.kill()

    def _keep(self) -> None:
        wait_s = self._first_retry_s
        while not self._stop.is_set():
            if self._run_once():
                wait_s = self._first_retry_s
            _log.debug("%s has ended; restarting it in %g s", self.program, wait_s)
            if self._stop.wait(wait_s):
                return
            wait_s = min(LAST_RETRY_S, 2 * wait_s)

    def _run_once(self) -> bool:
        """Runs the tool until it ends; returns whether it gave a sample."""
        with self._lock:
            if self._stop.is_set():
                return False
            try:
                child = self._child = subprocess.Popen(
                    arguments_of(self.program),
                    stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                )  # fmt: skip
            except OSError as exc:
                _log.warning("%s cannot be started: %s", self.program, exc)
                return False
        said = False
        assert child.stdout is not None
        with contextlib.suppress(OSError, ValueError):
            while line := child.stdout.readline(MAX_LINE_BYTES):
                sample = parse_line(self._tool, line)
                if sample is not None:
                    said, self._last = True, (self._clock(), sample)
        child.kill()  # it may have closed its output and still run
        child.wait()
        return said


def _table(sample: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = sample.get(name)
    return value if isinstance(value, dict) else {}


def _first(table: Mapping[str, Any], *names: str) -> float | None:
    """Returns the first of these fields that is a finite number."""
    for name in names:
        value = table.get(name)
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value >= 0:
            return value
    return None


def _pair(value: object) -> tuple[float | None, float | None]:
    """Returns (MHz, share) of a pair as macmon writes it."""
    if isinstance(value, list) and len(value) == 2:
        table = {"mhz": value[0], "share": value[1]}
        return _first(table, "mhz"), _first(table, "share")
    return None, None


def _times(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor
