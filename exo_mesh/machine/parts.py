"""The parts of a node that know this computer."""

from __future__ import annotations

from dataclasses import dataclass

from exo_mesh.machine.accelerator_readings import DeviceMemory
from exo_mesh.machine.disk import Disk
from exo_mesh.machine.memory import MemoryReader
from exo_mesh.machine.sensors import Sensors
from exo_mesh.settings.config import Settings


@dataclass(frozen=True, slots=True)
class MachineParts:
    """disk: the volume of the node's home. system_memory: of the whole machine. memory: of the device that engines
    compute on, once that is known. sensors: temperature and power."""

    disk: Disk
    system_memory: MemoryReader
    memory: DeviceMemory
    sensors: Sensors

    @staticmethod
    def at(settings: Settings, read_memory: MemoryReader) -> MachineParts:
        return MachineParts(Disk(settings.home), read_memory, DeviceMemory(read_memory), Sensors())
