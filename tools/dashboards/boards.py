"""The elements of a dashboard as plain values: boards have rows, rows have panels, panels have queries. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

FILTERS = 'job=~"$job", instance=~"$instance"'
"""Every query contains both, so that the variables at the top of a board filter every panel."""

Kind = Literal["timeseries", "stat", "table", "state-timeline"]
Threshold = tuple[float | None, str]
"""(lower bound, colour); the first bound is None."""


@dataclass(frozen=True, slots=True)
class Query:
    """A PromQL expression and the name of its lines. legend: a template such as `{{instance}}`."""

    expr: str
    legend: str


@dataclass(frozen=True, slots=True)
class Panel:
    """A chart of one or more queries.

    unit: an identifier of Grafana, such as `s` or `bytes`. width: of 24 columns. events: counts per interval of the
    chart, drawn as bars.
    """

    title: str
    description: str
    unit: str
    queries: tuple[Query, ...]
    kind: Kind = "timeseries"
    width: int = 8
    height: int = 8
    maximum: float | None = None
    thresholds: tuple[Threshold, ...] = ()
    stacked: bool = False
    events: bool = False


@dataclass(frozen=True, slots=True)
class Row:
    """Panels below one heading."""

    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True, slots=True)
class Variable:
    """A selection at the top of a board, besides data source, job and instance: the values of a label of a metric."""

    name: str
    label: str
    metric: str


@dataclass(frozen=True, slots=True)
class Board:
    """A dashboard. name: of its file; with the prefix `exo-mesh-` its id in addresses."""

    name: str
    title: str
    description: str
    rows: tuple[Row, ...]
    variables: tuple[Variable, ...] = ()

    def panels(self) -> Iterator[Panel]:
        for row in self.rows:
            yield from row.panels


def series(metric: str, *matchers: str) -> str:
    """Returns a metric of the selected nodes. matchers: further ones, such as `model=~"$model"`."""
    return f"{metric}{{{', '.join((FILTERS, *matchers))}}}"


def rate(metric: str, *matchers: str) -> str:
    """Returns the growth per second of a counter of the selected nodes."""
    return f"rate({series(metric, *matchers)}[$__rate_interval])"


def events(metric: str, *matchers: str) -> str:
    """Returns the growth of a counter per interval of the chart, for rare events."""
    return f"increase({series(metric, *matchers)}[$__rate_interval])"


def total(expr: str, *by: str) -> str:
    """Returns the sum of an expression per value of the labels `by`."""
    return f"sum by ({', '.join(by)}) ({expr})" if by else f"sum({expr})"


def quantile(share: float, histogram: str, *matchers: str, by: tuple[str, ...] = ()) -> str:
    """Returns a quantile of a histogram over the selected nodes. histogram: its name without `_bucket`."""
    return f"histogram_quantile({share:g}, {total(rate(histogram + '_bucket', *matchers), 'le', *by)})"


def mean(histogram: str, *matchers: str, by: tuple[str, ...] = ()) -> str:
    """Returns the mean of a histogram's observations."""
    return f"{total(rate(histogram + '_sum', *matchers), *by)} / {total(rate(histogram + '_count', *matchers), *by)}"


def quantiles(histogram: str, *matchers: str) -> tuple[Query, ...]:
    """Returns the median, the 95th and the 99th percentile of a histogram."""
    return tuple(Query(quantile(share, histogram, *matchers), f"p{share * 100:g}") for share in (0.5, 0.95, 0.99))
