"""Checks the sources of power and temperature readings for `exo-mesh doctor`, and suggests better ones."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import msgspec

from exo_mesh.cli.doctor.checks import Finding, Severity
from exo_mesh.machine.power import apple, nvidia, system_files


class PowerSources(msgspec.Struct, frozen=True):
    """The sources of this machine. counters: readable energy counters; locked: counters that only root may read. tool:
    the program used on a Mac, "" for none."""

    sensors: bool = False
    counters: int = 0
    locked: Sequence[Path] = ()
    accelerators: Sequence[str] = ()
    nvidia_driver: bool = False
    nvidia_library: bool = False
    is_mac: bool = False
    tool: str = ""


def read_power_sources(sysfs: Path, power_tool: str) -> PowerSources:
    """Looks for files, drivers and programs, without starting any."""
    return PowerSources(
        sensors=system_files.read_temperature(sysfs) is not None,
        counters=len(system_files.read_energy_zones(sysfs)),
        locked=system_files.locked_energy_zones(sysfs),
        accelerators=[f"{one.vendor} {one.kind}" for one in system_files.read_accelerators(sysfs)],
        nvidia_driver=nvidia.has_driver(),
        nvidia_library=find_spec("pynvml") is not None,
        is_mac=sys.platform == "darwin",
        tool=apple.find_tool(power_tool),
    )


def check_power(sources: PowerSources) -> list[Finding]:
    """Reports the sources. All findings are ok, because a node works without them."""
    found = list(sources.accelerators)
    found += ["processor energy"] if sources.counters else []
    found += ["temperature"] if sources.sensors else []
    found += ["NVIDIA by NVML" if sources.nvidia_library else "NVIDIA by nvidia-smi"] if sources.nvidia_driver else []
    found += [sources.tool] if sources.tool else []
    findings = [Finding("power", Severity.OK, f"readings: {', '.join(found) or 'none; see docs/reference/power.md'}")]
    if sources.locked:
        text = f"only root may read {sources.locked[0]}, so the energy of the processor is unknown"
        findings.append(Finding("power", Severity.OK, text, "docs/reference/power.md says how to let the node read it"))
    if sources.nvidia_driver and not sources.nvidia_library:
        text = "nvidia-ml-py is not installed: the node runs nvidia-smi every 15 s instead, which has no energy counter"
        findings.append(Finding("power", Severity.OK, text, "pip install 'exo-mesh[nvidia]'"))
    if sources.is_mac and not sources.tool:
        findings.append(
            Finding("power", Severity.OK, "power and temperature of this Mac are unknown", "brew install mactop")
        )
    return findings
