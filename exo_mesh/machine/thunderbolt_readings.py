"""Reads Thunderbolt ports and RDMA with macOS's own tools."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping

from exo_mesh.domain.thunderbolt import ThunderboltReading

TOOL_S = 8.0
"""Time limit per tool. system_profiler takes about a second on a busy Mac."""

TOOLS: Mapping[str, tuple[str, ...]] = {
    "ibv_devices": ("ibv_devices",),
    "ibv_devinfo": ("ibv_devinfo",),
    "ibv_limits": ("ibv_devinfo", "-v"),
    "rdma_ctl": ("rdma_ctl", "status"),
    "thunderbolt": ("system_profiler", "SPThunderboltDataType", "-json"),
    "hardware_ports": ("networksetup", "-listallhardwareports"),
    "sw_vers": ("sw_vers",),
}
"""All of these commands only read."""


def read_thunderbolt() -> ThunderboltReading:
    """Blocking, for up to TOOL_S per tool. The text of a tool that is missing, fails or hangs is empty."""
    return ThunderboltReading(**{name: _words(command) for name, command in TOOLS.items()})


def has_thunderbolt_tools() -> bool:
    """Whether this machine has the tools."""
    return shutil.which(TOOLS["thunderbolt"][0]) is not None


def _words(command: tuple[str, ...]) -> str:
    path = shutil.which(command[0])
    if path is None:
        return ""
    try:
        done = subprocess.run(
            [path, *command[1:]], stdin=subprocess.DEVNULL, capture_output=True, timeout=TOOL_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.decode(errors="replace")
