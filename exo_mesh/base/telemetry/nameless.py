"""Filters the metrics to those without names of peers, models and paths, for callers that may not see names."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
from prometheus_client import CollectorRegistry, Metric

NAMELESS_LABELS = frozenset(
    {"outcome", "code", "kind", "level", "le", "type", "source", "method", "route", "accelerator", "part"}
)
"""Labels whose values are fixed words or numbers. A label that is not listed counts as a name."""


class _Nameless(msgspec.Struct, frozen=True):
    registry: CollectorRegistry

    def collect(self) -> Iterator[Metric]:
        for metric in self.registry.collect():
            if all(sample.labels.keys() <= NAMELESS_LABELS for sample in metric.samples):
                yield metric


def nameless(registry: CollectorRegistry) -> CollectorRegistry:
    """A registry that collects only the metrics without names."""
    shown = CollectorRegistry()
    shown.register(_Nameless(registry))
    return shown
