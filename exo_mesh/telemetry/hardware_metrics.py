"""Power, temperature, load and energy for Prometheus. They are read when somebody asks, and cost nothing before.

docs/power.md has the table. What is unknown has no sample.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

_DEVICE = ("accelerator",)
_RING = ("model", "instance_id")


@dataclass(frozen=True, slots=True)
class MetricRow:
    """One metric. A counter's name ends in _total."""

    name: str
    text: str
    labels: tuple[str, ...] = ()


FAMILIES = (
    MetricRow("accelerator_info", "Accelerators of this machine.", ("accelerator", "kind", "vendor", "name")),
    MetricRow("accelerator_utilization_ratio", "How busy an accelerator is.", _DEVICE),
    MetricRow("accelerator_power_watts", "What an accelerator draws.", _DEVICE),
    MetricRow("accelerator_temperature_celsius", "How hot an accelerator is.", _DEVICE),
    MetricRow("accelerator_memory_used_bytes", "Memory of an accelerator in use, by anybody.", _DEVICE),
    MetricRow("accelerator_memory_size_bytes", "Memory of an accelerator.", _DEVICE),
    MetricRow("accelerator_clock_hertz", "Clock of an accelerator.", _DEVICE),
    MetricRow("accelerator_energy_joules_total", "Energy of an accelerator, by its driver's counter.", _DEVICE),
    MetricRow("power_watts", "What this machine draws, as far as it is measured."),
    MetricRow("power_part_watts", "What a part of this machine draws.", ("part", "source")),
    MetricRow("energy_joules_total", "What this machine has used since the node started, as far as it is measured."),
    MetricRow("temperature_celsius", "The hottest sensor of this machine."),
    MetricRow("cpu_utilization_ratio", "How busy the processors of this machine are."),
    MetricRow(
        "ring_energy_joules_total", "Energy of a ring driven here, by kind of token.", (*_RING, "kind")
    ),
    MetricRow("ring_energy_tokens_total", "Tokens that this energy was spent on.", (*_RING, "kind")),
    MetricRow("ring_energy_prompts_total", "Prompts among them.", _RING),
)

Sample = tuple[str, tuple[str, ...], float]
"""Name of a family, values of its labels, value."""


class HardwareMetrics(Collector):
    """`sources` are asked for samples at each scrape."""

    def __init__(self) -> None:
        self.sources: list[Callable[[], Iterable[Sample]]] = []

    def collect(self) -> Iterator[Metric]:
        made: dict[str, Metric] = {}
        for family in FAMILIES:
            is_counter = family.name.endswith("_total")
            make = CounterMetricFamily if is_counter else GaugeMetricFamily
            made[family.name] = make(f"exo_mesh_{family.name}", family.text, labels=family.labels)
        for source in self.sources:
            for name, labels, value in source():
                made[name].add_metric(labels, value)  # type: ignore[attr-defined]
        yield from made.values()
