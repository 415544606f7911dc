"""Reads the machine's devices from the system, and follows a GPU's memory. Blocking, except for
`DeviceMemory.__call__`."""

from __future__ import annotations

import contextlib
import os
import platform
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from exo_mesh.engine.contract import Compute
from exo_mesh.machine.accelerators import (
    AMD_FILES,
    NVIDIA_QUERY,
    Accelerator,
    AmdGpu,
    Machine,
    NvidiaGpu,
    accelerator_for,
    parse_amd,
    parse_cpu_name,
    parse_device_tree,
    parse_nvidia_smi,
    parse_wired_limit,
)
from exo_mesh.machine.memory import MemoryReader, MemoryReading, read_memory
from exo_mesh.machine.tool_output import ask

POLL_S = 2.0
STALE_READINGS = 5
"""After this many polls without an answer no memory counts as free."""

_DRM = Path("/sys/class/drm")
_DEVICE_TREE = Path("/proc/device-tree")


def ask_nvidia_smi() -> Sequence[NvidiaGpu]:
    """Lists NVIDIA's GPUs, by a process of nvidia-smi."""
    return parse_nvidia_smi(ask(["nvidia-smi", *NVIDIA_QUERY]))


def read_machine(
    drm: Path = _DRM,
    device_tree: Path = _DEVICE_TREE,
    read_nvidia: Callable[[], Sequence[NvidiaGpu]] = ask_nvidia_smi,
) -> Machine:
    """Reads everything about this machine, within a few seconds even if a driver hangs."""
    apple = sys.platform == "darwin" and platform.machine() == "arm64"
    return Machine(
        cpu=_cpu_name(device_tree),
        nvidia=() if sys.platform == "darwin" else visible(read_nvidia()),
        amd=read_amd(drm),
        board=parse_device_tree(_bytes_of(device_tree / "model"), _bytes_of(device_tree / "compatible")),
        apple=apple,
        wired_limit_bytes=parse_wired_limit(ask(["sysctl", "-n", "iogpu.wired_limit_mb"])) if apple else None,
    )


def visible(gpus: Sequence[NvidiaGpu], environ: Mapping[str, str] = os.environ) -> tuple[NvidiaGpu, ...]:
    """Filters GPUs by CUDA_VISIBLE_DEVICES, in its order, as an engine sees them; nvidia-smi always shows all GPUs."""
    words = environ.get("CUDA_VISIBLE_DEVICES", "").replace(" ", "").split(",")
    if not all(word.isdigit() for word in words):  # not set, or names that nvidia-smi does not show
        return tuple(gpus)
    by_index = {gpu.index: gpu for gpu in gpus}
    return tuple(by_index[int(word)] for word in words if int(word) in by_index)


def read_amd(drm: Path = _DRM) -> tuple[AmdGpu, ...]:
    """Lists AMD's GPUs, in the order of their cards."""
    found: list[AmdGpu] = []
    for device in sorted(drm.glob("card[0-9]*/device")):
        files = {name: _bytes_of(device / name).decode(errors="replace") for name in AMD_FILES}
        name = _bytes_of(device / "product_name").decode(errors="replace").strip()
        pci = _bytes_of(device / "device").decode(errors="replace").strip()
        gpu = parse_amd(name or f"AMD GPU {pci}".strip(), files, _bytes_of(device / "gpu_metrics")[:4])
        if gpu is not None:
            found.append(gpu)
    return tuple(found)


class DeviceMemory:
    """A MemoryReader for the device of the chosen engine. Before `follow` it reads the system's memory.

    A thread reads a GPU's memory every POLL_S, because its driver may take seconds to answer; a call returns the last
    reading. The system's memory is read in the call: it takes a few small files.
    """

    def __init__(
        self,
        read_system: MemoryReader = read_memory,
        read: Callable[[], Machine] = read_machine,
        poll_s: float = POLL_S,
    ) -> None:
        self._read_system = read_system
        self._read_machine = read
        self._poll_s = poll_s
        self._compute: Compute = "cpu"
        self._machine = Machine("")
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._missed = 0

    def __call__(self) -> MemoryReading:
        system = self._read_system()
        if self._missed >= STALE_READINGS:
            return MemoryReading(system.total_bytes, 0, why="the GPU's driver no longer answers")
        return accelerator_for(self._compute, self._machine, system).memory

    def follow(self, compute: Compute) -> Accelerator:
        """Blocking. Reads the memory of this kind of device from now on; returns the device."""
        self._machine = self._read_machine()
        self._compute = compute
        found = accelerator_for(compute, self._machine, self._read_system())
        if found.memory.headroom_bytes is not None and self._thread is None:  # its own memory needs polling
            self._thread = threading.Thread(target=self._poll, name="device memory", daemon=True)
            self._thread.start()
        return found

    def close(self) -> None:
        """Ends the thread, without waiting: a driver's call may take a few seconds."""
        self._stop.set()

    def _poll(self) -> None:
        while not self._stop.wait(self._poll_s):
            machine = self._read_machine()
            followed = {"cuda": machine.nvidia, "vulkan": machine.nvidia or machine.amd}
            if followed.get(self._compute, machine.amd):
                self._machine, self._missed = machine, 0
            else:
                self._missed += 1


def _cpu_name(device_tree: Path) -> str:
    if sys.platform == "darwin":
        return ask(["sysctl", "-n", "machdep.cpu.brand_string"]).strip() or platform.processor()
    name = parse_cpu_name(_bytes_of(Path("/proc/cpuinfo")).decode(errors="replace"))
    board = _bytes_of(device_tree / "model").split(b"\0")[0].decode(errors="replace")
    return name or board or platform.processor() or platform.machine()


def _bytes_of(file: Path) -> bytes:
    with contextlib.suppress(OSError):
        return file.read_bytes()
    return b""
