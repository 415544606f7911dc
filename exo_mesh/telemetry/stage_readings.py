"""What the heartbeats of stages become for Prometheus besides plain gauges: shares of time, and histograms."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from exo_mesh.proto.runner_pb2 import Heartbeat
from exo_mesh.telemetry.durations import LAP_BOUNDS_S, WAIT_BOUNDS_S, cumulative

WINDOW_BEATS = 21
"""Shares are those of the last ten seconds."""


@dataclass(slots=True)
class StageShares:
    """Of one stage: how it spends its time, by its last heartbeats."""

    _beats: deque[tuple[float, float, bool]] = field(default_factory=lambda: deque(maxlen=WINDOW_BEATS))

    def take(self, now: float, busy_s: float, sequences: int) -> None:
        """A heartbeat came: seconds of computing since the start, and how many sequences the stage holds."""
        self._beats.append((now, busy_s, sequences > 0))

    @property
    def busy(self) -> float:
        """The share of the time in which it computed."""
        return _share(list(self._beats), only_at_work=False)

    @property
    def bubble(self) -> float:
        """The share of the time with sequences on it in which it did not compute: it waited for frames. 0 if idle."""
        beats = list(self._beats)
        worked = any(before[2] and after[2] for before, after in itertools.pairwise(beats))
        return 1 - _share(beats, only_at_work=True) if worked else 0.0


def _share(beats: list[tuple[float, float, bool]], *, only_at_work: bool) -> float:
    elapsed_s = busy_s = 0.0
    for before, after in itertools.pairwise(beats):
        if not only_at_work or (before[2] and after[2]):
            elapsed_s += after[0] - before[0]
            busy_s += after[1] - before[1]
    return min(1.0, max(0.0, busy_s / elapsed_s)) if elapsed_s > 0 else 0.0


class DriverHistograms(Collector):
    """Laps, hops and queue waits of the drivers here, as their last heartbeats told them."""

    def __init__(self) -> None:
        self._beats: dict[str, Heartbeat] = {}

    def take(self, instance: str, beat: Heartbeat) -> None:
        self._beats[instance] = beat

    def drop(self, instance: str) -> None:
        self._beats.pop(instance, None)

    def collect(self) -> Iterator[Metric]:
        def family(name: str, text: str) -> HistogramMetricFamily:
            return HistogramMetricFamily(f"exo_mesh_{name}", text, labels=("instance",))

        laps = family("lap_seconds", "Time round the ring.")
        hops = family("hop_seconds", "What a lap spends on the links, for each of its hops.")
        waits = family("queue_wait_seconds", "From the arrival of a request at the driver to its turn.")
        for instance, beat in list(self._beats.items()):
            told = ((laps, LAP_BOUNDS_S, beat.laps_took), (hops, LAP_BOUNDS_S, beat.hops_took),
                    (waits, WAIT_BOUNDS_S, beat.queue_waits))  # fmt: skip
            for metric, bounds_s, durations in told:
                metric.add_metric([instance], cumulative(bounds_s, durations.counts), durations.sum_s)
        yield from (laps, hops, waits)
