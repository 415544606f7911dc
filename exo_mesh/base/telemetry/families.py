"""Counters, gauges and histograms whose series can be dropped by the value of a label.

The classes of prometheus_client cannot do that, take a lock for each call, and add a `_created` series to every
counter. Use everything here from the event loop only. `exposition` shows them to Prometheus.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Generic, TypeVar

from exo_mesh.base.telemetry.durations import Durations

Labels = tuple[str, ...]


class Cell:
    """The value of one series."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.0

    def inc(self, amount: float = 1.0) -> None:
        self.value += amount

    def dec(self, amount: float = 1.0) -> None:
        self.value -= amount

    def set(self, value: float) -> None:
        self.value = value


S = TypeVar("S", Cell, Durations)


class MetricFamily(Generic[S]):
    """All series of one metric, by label values. A family without labels has its one series from the start."""

    def __init__(self, name: str, text: str, labels: Sequence[str], new: Callable[[], S]) -> None:
        self.name, self.text, self.label_names = name, text, tuple(labels)
        self._new: Callable[[], S] = new
        self._series: dict[Labels, S] = {}
        if not labels:
            self.labels()

    def labels(self, *values: str) -> S:
        """The series with these label values; a new one starts at 0."""
        found = self._series.get(values)
        if found is None:
            assert len(values) == len(self.label_names), f"{self.name} has the labels {self.label_names}"
            found = self._series[values] = self._new()
        return found

    def series(self) -> list[tuple[Labels, S]]:
        """All series with their label values."""
        return list(self._series.items())

    def remove(self, *values: str) -> None:
        """Removes one series, if it exists."""
        self._series.pop(values, None)

    def keep(self, label: str, wanted: Collection[str]) -> None:
        """Removes every series whose `label` has none of these values. A family without the label stays unchanged."""
        if label in self.label_names:
            at = self.label_names.index(label)
            self._series = {values: one for values, one in self._series.items() if values[at] in wanted}

    def clear(self) -> None:
        """Removes all series."""
        self._series.clear()


class Gauges(MetricFamily[Cell]):
    """A family of values that rise and fall."""

    def __init__(self, name: str, text: str, labels: Sequence[str] = ()) -> None:
        super().__init__(name, text, labels, Cell)

    def set(self, value: float) -> None:
        """Sets the value of a family without labels."""
        self.labels().set(value)


class Counters(MetricFamily[Cell]):
    """A family of values that only rise; its name ends in `_total`."""

    def __init__(self, name: str, text: str, labels: Sequence[str] = ()) -> None:
        assert name.endswith("_total"), f"{name} is a counter"
        super().__init__(name, text, labels, Cell)

    def inc(self, amount: float = 1.0) -> None:
        """Increments the value of a family without labels."""
        self.labels().inc(amount)


class Histograms(MetricFamily[Durations]):
    """A family of histograms of durations in seconds."""

    def __init__(self, name: str, text: str, bounds_s: Sequence[float], labels: Sequence[str] = ()) -> None:
        self.bounds_s = tuple(float(bound) for bound in bounds_s)
        super().__init__(name, text, labels, lambda: Durations(self.bounds_s))

    def observe(self, seconds: float) -> None:
        """Adds a duration to a family without labels."""
        self.labels().add(seconds)


class Infos(MetricFamily[Cell]):
    """A family that shows facts as labels; the value is always 1. Its name ends in `_info`."""

    def __init__(self, name: str, text: str, labels: Sequence[str]) -> None:
        assert name.endswith("_info"), f"{name} is an info metric"
        super().__init__(name, text, labels, Cell)
