"""Computes from the system's figures what a machine computes on, and how much of its memory models may use. Pure.

`accelerator_readings.py` reads the figures, from drivers' files and command line tools only, without heavy libraries.

| device | models may use | source of the rule |
|---|---|---|
| CPU | what is available, minus a tenth of the total (at most 1 GiB) | `memory.py` |
| NVIDIA, AMD with memory of their own | what is free, at most 90 % of the total | driver and desktop use the rest |
| Apple silicon | what is available, at most `iogpu.wired_limit_mb` or 75 % of the total | what Metal wires by default |
| AMD sharing the system's memory (APU) | 90 % of its carve-out, and all but 16 GB of what it maps | `amd_reading` |
| NVIDIA sharing it (Jetson, GB10) | as CPU | its driver says `[N/A]` |
| Rockchip NPU | as CPU | the NPU has no memory of its own |
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec
from msgspec.structs import replace

from exo_mesh.domain.footprint import gigabytes
from exo_mesh.engine.contract import Compute
from exo_mesh.engine.rockchip import chip_of, npu_words
from exo_mesh.machine.memory import MemoryReading

VRAM_SHARE = 0.9
APPLE_SHARE = 0.75
APU_SYSTEM_BYTES = 16 * 10**9
"""The part of an APU's mapped memory that is left to the system."""

NVIDIA_QUERY = ("--query-gpu=index,name,memory.total,memory.used,memory.free", "--format=csv,noheader,nounits")
"""Arguments of nvidia-smi whose output `parse_nvidia_smi` reads."""

AMD_FILES = ("mem_info_vram_total", "mem_info_vram_used", "mem_info_gtt_total", "mem_info_gtt_used")
"""Files in /sys/class/drm/cardN/device; the kernel's documentation of amdgpu describes them."""

_MIB = 2**20
_APU_METRICS = (2, 3)
"""Revisions of amdgpu's gpu_metrics table that only APUs have; cards have revision 1."""


class NvidiaGpu(msgspec.Struct, frozen=True):
    """A line of nvidia-smi. Sizes are None if the GPU shares the system's memory, which its driver does not report."""

    index: int
    name: str
    total_bytes: int | None
    free_bytes: int | None


class AmdGpu(msgspec.Struct, frozen=True):
    """What amdgpu reports about a GPU. gtt: system memory that it may map. integrated: None if it is not reported."""

    name: str
    vram_total: int
    vram_used: int
    gtt_total: int
    gtt_used: int
    integrated: bool | None = None

    def is_apu(self, system_total: int) -> bool:
        """Whether the GPU shares the system's memory. If the driver does not say, only if the GPU may map all of it and
        more than its own memory: a card maps half of it, or as much as it has itself."""
        if self.integrated is not None:
            return self.integrated
        return self.gtt_total > self.vram_total and self.gtt_total >= system_total


class Board(msgspec.Struct, frozen=True):
    """A board from its device tree: the name, and the chip, such as "rk3588"."""

    name: str
    chip: str


class Machine(msgspec.Struct, frozen=True):
    """Everything that was read about a machine. wired_limit_bytes: of Apple's GPU, if somebody has set it."""

    cpu: str
    nvidia: Sequence[NvidiaGpu] = ()
    amd: Sequence[AmdGpu] = ()
    board: Board | None = None
    apple: bool = False
    wired_limit_bytes: int | None = None


class Accelerator(msgspec.Struct, frozen=True):
    """The device that an engine computes on: its kind (cpu, gpu, npu), its name, and its memory."""

    kind: str
    name: str
    memory: MemoryReading


def accelerator_for(compute: Compute, machine: Machine, system: MemoryReading) -> Accelerator:
    """Returns the device for an engine's `compute`, with its memory now; the CPU if there is no such device."""
    if compute in ("cuda", "vulkan") and machine.nvidia:
        return Accelerator("gpu", machine.nvidia[0].name, nvidia_reading(machine.nvidia, system))
    if compute in ("rocm", "vulkan") and machine.amd:
        gpu = max(machine.amd, key=lambda one: one.vram_total)
        return Accelerator("gpu", gpu.name, amd_reading(gpu, system))
    if compute == "metal" and machine.apple:
        return Accelerator("gpu", machine.cpu, apple_reading(system, machine.wired_limit_bytes))
    if compute == "npu" and machine.board is not None:
        why = f"the NPU of the {machine.board.chip} shares {system.why}"
        return Accelerator("npu", f"{machine.board.name}: {npu_words(machine.board.chip)}", replace(system, why=why))
    name = machine.board.name if machine.board is not None and not machine.cpu else machine.cpu
    return Accelerator("cpu", name, system)


def nvidia_reading(gpus: Sequence[NvidiaGpu], system: MemoryReading) -> MemoryReading:
    """Memory of the first GPU, which engines use."""
    gpu = gpus[0]
    if gpu.total_bytes is None or gpu.free_bytes is None:
        return replace(system, why=f"{gpu.name} shares {system.why}")
    which = f"GPU {gpu.index} of {len(gpus)}, " if len(gpus) > 1 else ""
    ceiling = int(VRAM_SHARE * gpu.total_bytes)
    why = f"{which}what is free, at most 90 % of {gigabytes(gpu.total_bytes)} (NVIDIA's driver)"
    return MemoryReading(gpu.total_bytes, gpu.free_bytes, ceiling, 0, why)


def amd_reading(gpu: AmdGpu, system: MemoryReading) -> MemoryReading:
    """Memory of a card; for an APU, its carve-out and the system memory that it maps."""
    free = max(0, gpu.vram_total - gpu.vram_used)
    own = int(VRAM_SHARE * gpu.vram_total)
    if not gpu.is_apu(system.total_bytes):
        why = f"what is free, at most 90 % of {gigabytes(gpu.vram_total)} (amdgpu)"
        return MemoryReading(gpu.vram_total, free, own, 0, why)
    mapped_total = max(0, min(gpu.gtt_total, system.total_bytes - APU_SYSTEM_BYTES))
    mapped = max(0, min(gpu.gtt_total - gpu.gtt_used, system.available_bytes - APU_SYSTEM_BYTES))
    why = (
        f"90 % of a carve-out of {gigabytes(gpu.vram_total)}, and of the {gigabytes(gpu.gtt_total)} that it maps what "
        f"is available minus {gigabytes(APU_SYSTEM_BYTES)} for the system (amdgpu)"
    )
    return MemoryReading(gpu.vram_total + mapped_total, min(free, own) + mapped, own + mapped_total, 0, why)


def apple_reading(system: MemoryReading, wired_limit_bytes: int | None) -> MemoryReading:
    """Unified memory: the available bytes, up to the limit that Metal may wire."""
    if wired_limit_bytes:
        return replace(system, ceiling_bytes=wired_limit_bytes, why="unified memory up to iogpu.wired_limit_mb")
    ceiling = int(APPLE_SHARE * system.total_bytes)
    return replace(system, ceiling_bytes=ceiling, why=f"at most 75 % of {gigabytes(system.total_bytes)} unified memory")


def parse_nvidia_smi(output: str) -> tuple[NvidiaGpu, ...]:
    """Reads the GPUs from the output of nvidia-smi with NVIDIA_QUERY, in its order, without warnings."""
    gpus: list[NvidiaGpu] = []
    for line in output.splitlines():
        fields = [field.strip() for field in line.split(",")]
        if len(fields) < 5 or not fields[0].isdigit():
            continue
        # a name may contain commas; the numbers are at the end
        index, name, (total, used, free) = int(fields[0]), ", ".join(fields[1:-3]), map(_mib, fields[-3:])
        if free is None and total is not None and used is not None:
            free = max(0, total - used)
        gpus.append(NvidiaGpu(index, name, total, free))
    return tuple(gpus)


def parse_amd(name: str, files: Mapping[str, str], gpu_metrics: bytes = b"") -> AmdGpu | None:
    """Reads a GPU from the contents of AMD_FILES, and the beginning of its gpu_metrics; None if no memory is given.

    gpu_metrics begins with its size (2 bytes), then its format revision (1 byte).
    """
    sizes = [files.get(file, "").strip() for file in AMD_FILES]
    if not sizes[0].isdigit() or int(sizes[0]) == 0:
        return None
    vram_total, vram_used, gtt_total, gtt_used = (int(size) if size.isdigit() else 0 for size in sizes)
    integrated = gpu_metrics[2] in _APU_METRICS if len(gpu_metrics) > 2 else None
    return AmdGpu(name, vram_total, vram_used, gtt_total, gtt_used, integrated)


def parse_device_tree(model: bytes, compatible: bytes) -> Board | None:
    """Reads a Rockchip board with an NPU from /proc/device-tree: strings that end with a zero byte; None for others."""
    chip = chip_of(compatible)
    if not chip:
        return None
    name = (model or compatible).split(b"\0")[0].decode(errors="replace")
    return Board(name, chip)


def parse_cpu_name(cpuinfo: str) -> str:
    """Returns the processor's name from /proc/cpuinfo; "" if it has none, as on most Arm machines."""
    for line in cpuinfo.splitlines():
        key, _, value = line.partition(":")
        if key.strip() in ("model name", "Model", "Hardware") and value.strip():
            return " ".join(value.split())
    return ""


def parse_wired_limit(output: str) -> int | None:
    """Returns the bytes that `sysctl -n iogpu.wired_limit_mb` prints; None for 0, which means the system's default."""
    text = output.strip()
    return int(text) * _MIB if text.isdigit() and int(text) else None


def devices(machine: Machine, system: MemoryReading, computes: Iterable[Compute]) -> list[Accelerator]:
    """Returns the devices for some `compute` words, each once, with the CPU always at the end."""
    found = {(one.kind, one.name): one for one in (accelerator_for(c, machine, system) for c in (*computes, "cpu"))}
    return list(found.values())


def _mib(field: str) -> int | None:
    return int(field) * _MIB if field.isdigit() else None
