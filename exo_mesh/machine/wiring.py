"""Builds the parts of a node that deal with this computer."""

from __future__ import annotations

from functools import partial

import msgspec

from exo_mesh.machine.accelerator_readings import DeviceMemory, read_machine
from exo_mesh.machine.disk import Disk
from exo_mesh.machine.memory import MemoryReader
from exo_mesh.machine.power.meter import HardwareMeter
from exo_mesh.machine.power.nvidia import NvidiaReader
from exo_mesh.machine.recent_memory import RecentMemory
from exo_mesh.settings.config import Settings


class MachineParts(msgspec.Struct, frozen=True):
    """The parts. disk: the volume of the node's home. system_memory: of the whole machine. memory: of the device that
    engines compute on, once that is known. nvidia: the driver of NVIDIA's GPUs. meter: power, temperature and load."""

    disk: Disk
    system_memory: MemoryReader
    memory: DeviceMemory
    nvidia: NvidiaReader
    meter: HardwareMeter

    @staticmethod
    def build(settings: Settings, read_memory: MemoryReader) -> MachineParts:
        read_memory = RecentMemory(read_memory)
        nvidia = NvidiaReader()
        memory = DeviceMemory(read_memory, partial(read_machine, read_nvidia=nvidia.gpus))
        meter = HardwareMeter(settings.sysfs, settings.power_tool, nvidia)
        return MachineParts(Disk(settings.home), read_memory, memory, nvidia, meter)

    def close(self) -> None:
        """Ends the threads and the tool, without waiting for a driver that does not answer."""
        self.meter.close()
        self.memory.close()
        self.nvidia.close()
