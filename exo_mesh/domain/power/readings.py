"""Power, temperature and utilization of a machine and its accelerators. Pure values.

None means that the value could not be read; it is never written as 0. `sources` names the source of each value, by the
value's name: "nvml", "nvidia-smi", "amdgpu", "rapl", "macmon", … Several sources are joined by "+".
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from exo_mesh.domain.fields import Cut, NotSent

VALUES = (
    "utilization", "power_w", "temperature_c", "memory_used_bytes", "memory_total_bytes", "mapped_used_bytes",
    "mapped_total_bytes", "clock_hz", "energy_j",
)  # fmt: skip
"""Names of the values, in the order of their numbers in protos/exo_mesh/wire/proto/control.proto."""

DIGITS = {"utilization": 3, "power_w": 2, "temperature_c": 1, "clock_hz": 0, "energy_j": 1}
"""Decimals of the values that are not whole numbers; more decimals would be noise."""

MAX_ACCELERATORS = 32
_Word = Annotated[str, Cut(16)]


@dataclass(frozen=True, slots=True)
class DeviceValues:
    """The values of one device. utilization: 0 to 1. mapped: system memory that a GPU may map, besides its own (GTT).
    energy_j: a counter that only grows; its start depends on the source. sources: by name of the value."""

    utilization: float | None = None
    power_w: float | None = None
    temperature_c: float | None = None
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    mapped_used_bytes: int | None = None
    mapped_total_bytes: int | None = None
    clock_hz: float | None = None
    energy_j: float | None = None
    sources: Mapping[str, str] = field(default_factory=dict)

    @staticmethod
    def of(source: str, **values: float | None) -> DeviceValues:
        """Makes rounded values that all come from one source; a value of None has no source."""
        known = {name: _rounded(name, value) for name, value in values.items() if value is not None}
        return DeviceValues(**known, sources=dict.fromkeys(known, source))  # type: ignore[arg-type]

    def merged(self, other: DeviceValues) -> DeviceValues:
        """Returns these values, completed by the values of `other`."""
        missing = [name for name in VALUES if getattr(self, name) is None and getattr(other, name) is not None]
        if not missing:
            return self
        values = {name: getattr(other if name in missing else self, name) for name in VALUES}
        return DeviceValues(**values, sources={**other.sources, **self.sources})

    def describe(self) -> dict[str, Any]:
        """Returns the known values as JSON values; unknown values are absent."""
        known = {name: value for name in VALUES if (value := getattr(self, name)) is not None}
        return {**known, "sources": {name: self.sources[name] for name in known if name in self.sources}}


UNKNOWN = DeviceValues()


@dataclass(frozen=True, slots=True)
class AcceleratorReading:
    """One GPU or NPU. id: "gpu0", "npu0", unique on its machine. kind: gpu or npu. in_processor: it is part of the
    processor package, so the package's energy counter includes it; only its own node knows this."""

    id: _Word
    kind: _Word
    vendor: _Word
    name: Annotated[str, Cut(128)]
    values: DeviceValues = UNKNOWN
    in_processor: Annotated[bool, NotSent()] = False

    def describe(self) -> dict[str, Any]:
        return {"id": self.id, "kind": self.kind, "vendor": self.vendor, "name": self.name, **self.values.describe()}


@dataclass(frozen=True, slots=True)
class PartPower:
    """Power of one part of a machine, and its energy since the node started. name: "cpu", "memory", "machine" (all of
    it), or the id of an accelerator."""

    name: str
    source: str
    power_w: float | None = None
    energy_j: float | None = None


@dataclass(frozen=True, slots=True)
class HardwareReading:
    """The readings of one machine. machine: of the whole machine; its energy_j counts from the start of the node.
    machine_digest: equal for nodes on one machine, so that its energy is not counted twice; 0: unknown. parts: not sent
    to other peers."""

    machine: DeviceValues = UNKNOWN
    accelerators: Annotated[tuple[AcceleratorReading, ...], Cut(MAX_ACCELERATORS)] = ()
    machine_digest: int = 0
    parts: Annotated[tuple[PartPower, ...], NotSent()] = ()

    def describe(self) -> dict[str, Any]:
        """Returns the readings as JSON values, without the parts."""
        return {
            "machine": self.machine.describe(),
            "accelerators": [accelerator.describe() for accelerator in self.accelerators],
        }


NO_HARDWARE = HardwareReading()


def joined(sources: Iterable[str]) -> str:
    """Joins the sources, each once and in order: "rapl+nvml"."""
    return "+".join(dict.fromkeys(source for source in sources if source))


def _rounded(name: str, value: float) -> float:
    digits = DIGITS.get(name)
    return int(value) if digits is None else round(value, digits)
