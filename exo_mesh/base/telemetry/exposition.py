"""Shows metric families to Prometheus. Only this module and `nameless` use prometheus_client, which takes 10 ms to
import and is not needed before the first scrape."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Metric, ProcessCollector
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
)
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from exo_mesh.base.telemetry.durations import cumulative
from exo_mesh.base.telemetry.families import Counters, Gauges, Histograms, Infos, MetricFamily
from exo_mesh.base.telemetry.nameless import nameless

CONTENT_TYPE = CONTENT_TYPE_LATEST


def registry_of(families: Iterable[MetricFamily[Any]], refresh: Callable[[], None]) -> CollectorRegistry:
    """A registry of these families and of the process. refresh: called before each scrape collects the families."""
    registry = CollectorRegistry()
    registry.register(_Refresh(refresh))  # collected first, because it was registered first
    for family in families:
        registry.register(_Shown(family))
    ProcessCollector(registry=registry)
    return registry


def exposition(registry: CollectorRegistry, *, with_names: bool) -> bytes:
    """The metrics as text. with_names: also metrics that name peers, models and paths."""
    return generate_latest(registry if with_names else nameless(registry))


class _Refresh(Collector):
    def __init__(self, refresh: Callable[[], None]) -> None:
        self._refresh = refresh

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterable[Metric]:
        self._refresh()
        return ()


class _Shown(Collector):
    def __init__(self, family: MetricFamily[Any]) -> None:
        self._family = family

    def collect(self) -> Iterator[Metric]:
        yield metric_of(self._family)


def metric_of(family: MetricFamily[Any]) -> Metric:
    """The family with all its series, in the classes of prometheus_client."""
    name, text, labels = family.name, family.text, family.label_names
    if isinstance(family, Histograms):
        histogram = HistogramMetricFamily(name, text, labels=labels)
        for values, durations in family.series():
            histogram.add_metric(values, cumulative(family.bounds_s, durations.counts), durations.sum_s)
        return histogram
    metric: Metric
    if isinstance(family, Infos):
        metric = InfoMetricFamily(name.removesuffix("_info"), text)
    else:
        assert isinstance(family, Counters | Gauges), f"{name} has another type"
        kind = CounterMetricFamily if isinstance(family, Counters) else GaugeMetricFamily
        metric = kind(name, text, labels=labels)
    for values, cell in family.series():
        value = 1 if isinstance(family, Infos) else cell.value
        metric.add_sample(name, dict(zip(labels, values, strict=True)), value)
    return metric
