"""Turns a hardware reading into samples for exo_mesh/base/telemetry/hardware_metrics.py. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from exo_mesh.base.telemetry.hardware_metrics import Sample
from exo_mesh.domain.power import HardwareReading

_ACCELERATOR = {
    "utilization": "utilization_ratio",
    "power_w": "power_watts",
    "temperature_c": "temperature_celsius",
    "memory_used_bytes": "memory_used_bytes",
    "memory_total_bytes": "memory_size_bytes",
    "clock_hz": "clock_hertz",
    "energy_j": "energy_joules_total",
}
_MACHINE = {
    "utilization": "cpu_utilization_ratio",
    "power_w": "power_watts",
    "temperature_c": "temperature_celsius",
    "energy_j": "energy_joules_total",
}


def hardware_samples(reading: HardwareReading) -> Iterator[Sample]:
    """Yields one sample for each known value."""
    for name, metric in _MACHINE.items():
        if (value := getattr(reading.machine, name)) is not None:
            yield metric, (), value
    for part in reading.parts:
        if part.power_w is not None:
            yield "power_part_watts", (part.name, part.source), part.power_w
    for one in reading.accelerators:
        yield "accelerator_info", (one.id, one.kind, one.vendor, one.name), 1.0
        for name, metric in _ACCELERATOR.items():
            if (value := getattr(one.values, name)) is not None:
                yield f"accelerator_{metric}", (one.id,), value
