"""Prometheus metrics of power, temperature, load and energy: docs/reference/metrics.md.

Unknown values have no series.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from exo_mesh.base.telemetry.families import Counters, Gauges, Infos

_DEVICE = ("accelerator",)
_RING = ("model", "instance_id")

Sample = tuple[str, tuple[str, ...], float]
"""(attribute of HardwareMetrics, label values, value)."""


class HardwareMetrics:
    """The hardware metrics of a node. Each scrape calls `refresh`, which reads all values from `sources`."""

    def __init__(self) -> None:
        # fmt: off
        self.accelerator_info = Infos(
            "exo_mesh_accelerator_info", "A GPU or NPU of this machine.", ("accelerator", "kind", "vendor", "name")
        )
        self.accelerator_utilization_ratio = Gauges(
            "exo_mesh_accelerator_utilization_ratio", "How busy an accelerator is.", _DEVICE
        )
        self.accelerator_power_watts = Gauges(
            "exo_mesh_accelerator_power_watts", "Power that an accelerator draws.", _DEVICE
        )
        self.accelerator_temperature_celsius = Gauges(
            "exo_mesh_accelerator_temperature_celsius", "Temperature of an accelerator.", _DEVICE
        )
        self.accelerator_memory_used_bytes = Gauges(
            "exo_mesh_accelerator_memory_used_bytes", "Memory of an accelerator in use, by all programs.", _DEVICE
        )
        self.accelerator_memory_size_bytes = Gauges(
            "exo_mesh_accelerator_memory_size_bytes", "Memory of an accelerator.", _DEVICE
        )
        self.accelerator_clock_hertz = Gauges(
            "exo_mesh_accelerator_clock_hertz", "Clock of an accelerator.", _DEVICE
        )
        self.accelerator_energy_joules_total = Counters(
            "exo_mesh_accelerator_energy_joules_total", "Energy of an accelerator, by its driver's counter.", _DEVICE
        )
        self.power_watts = Gauges("exo_mesh_power_watts", "Power that this machine draws, as far as it is measured.")
        self.power_part_watts = Gauges(
            "exo_mesh_power_part_watts", "Power that a part of this machine draws.", ("part", "source")
        )
        self.energy_joules_total = Counters(
            "exo_mesh_energy_joules_total", "Energy that this machine used since the node started, as far as measured."
        )
        self.temperature_celsius = Gauges("exo_mesh_temperature_celsius", "The hottest sensor of this machine.")
        self.cpu_utilization_ratio = Gauges(
            "exo_mesh_cpu_utilization_ratio", "How busy the processors of this machine are."
        )
        self.ring_energy_joules_total = Counters(
            "exo_mesh_ring_energy_joules_total", "Energy of a ring driven here, by kind of token.", (*_RING, "kind")
        )
        self.ring_energy_tokens_total = Counters(
            "exo_mesh_ring_energy_tokens_total", "Tokens that the energy of a ring was used for.", (*_RING, "kind")
        )
        self.ring_energy_prompts_total = Counters(
            "exo_mesh_ring_energy_prompts_total", "Prompts that the energy of a ring was used for.", _RING
        )
        # fmt: on
        self._families = list(vars(self).values())
        self.sources: list[Callable[[], Iterable[Sample]]] = []
        self.refresh()

    def refresh(self) -> None:
        """Replaces the series of all families with the current values of the sources."""
        for family in self._families:
            family.clear()
        for source in self.sources:
            for name, labels, value in source():
                getattr(self, name).labels(*labels).set(value)
