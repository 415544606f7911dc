"""Counts a runner of this node in the metrics, from its heartbeats.

A runner counts from its own start, while the counters of a node must never fall. So each runner has a meter, which adds
the increase since the last heartbeat.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec

from exo_mesh.base.telemetry.durations import DurationCounts, Durations
from exo_mesh.base.telemetry.families import Gauges, Histograms, Labels
from exo_mesh.base.telemetry.stage_metrics import DRIVER, HOP, RANK, STAGE, ModelFacts, Shown, StageMetrics, StageSeat
from exo_mesh.domain.runner.heartbeat import Heartbeat

WINDOW_BEATS = 21
"""Heartbeats that are kept: the last 10 s."""


class StageShares(msgspec.Struct):
    """The shares of a stage's time over its last heartbeats."""

    _beats: deque[tuple[float, float, bool]] = msgspec.field(default_factory=lambda: deque(maxlen=WINDOW_BEATS))
    _prefill: deque[tuple[int, float]] = msgspec.field(default_factory=lambda: deque(maxlen=WINDOW_BEATS))

    def take(self, now: float, beat: Heartbeat) -> None:
        """Takes a heartbeat. now: monotonic seconds."""
        self._beats.append((now, beat.busy_s, beat.sequences > 0))
        self._prefill.append((beat.prefill_tokens, beat.prefill_s))

    @property
    def busy(self) -> float:
        """The share of time in which the stage computed."""
        return _share(list(self._beats), only_at_work=False)

    @property
    def bubble(self) -> float:
        """The share of the time with sequences in which the stage waited for frames; 0 if it had no sequences."""
        beats = list(self._beats)
        worked = any(before[2] and after[2] for before, after in itertools.pairwise(beats))
        return 1 - _share(beats, only_at_work=True) if worked else 0.0

    @property
    def prefill_tokens_per_s(self) -> float:
        """Prompt tokens per second of the time spent on them; 0 if there were none."""
        (tokens, seconds), (now_tokens, now_seconds) = self._prefill[0], self._prefill[-1]
        return (now_tokens - tokens) / (now_seconds - seconds) if now_seconds > seconds else 0.0


def _share(beats: list[tuple[float, float, bool]], *, only_at_work: bool) -> float:
    elapsed_s = busy_s = 0.0
    for before, after in itertools.pairwise(beats):
        if not only_at_work or (before[2] and after[2]):
            elapsed_s += after[0] - before[0]
            busy_s += after[1] - before[1]
    return min(1.0, max(0.0, busy_s / elapsed_s)) if elapsed_s > 0 else 0.0


class StageMeter:
    """Counts one runner, from its heartbeats. The caller must call `end`."""

    def __init__(
        self, metrics: StageMetrics, facts: ModelFacts, name_of: Callable[[str], str] = lambda peer_id: peer_id[:8]
    ) -> None:
        """name_of: returns the name of a peer id."""
        self._next_name = ""
        self._metrics = metrics
        self._facts = facts
        self._name_of = name_of
        self._shares = StageShares()
        self._counted: dict[Labels, float] = {}
        self._in_buckets: dict[Labels, tuple[list[int], float]] = {}

    def take(self, seat: StageSeat, beat: Heartbeat) -> None:
        """Takes a heartbeat. seat: differs from the seat before if the ring continues under another plan."""
        if seat != self._metrics.seat_of.get(self):
            self._leave()
            self._enter(seat)
        self._take_shares(seat, beat)
        labels = self._labels(seat)
        if not beat.kv_pool_tokens:  # only a driver reports the KV pool
            del labels[DRIVER]
        if not seat.next_peer:  # a ring of one stage has no hop
            del labels[HOP]
        for shown in self._metrics.shown:
            if shown.scope in labels and (shown.only_if is None or shown.only_if(beat)):
                self._show(shown, labels[shown.scope] + shown.more, shown.value(beat))

    def end(self) -> None:
        """Removes the gauges of a runner that has ended; its counters stay as long as the mesh has the instance."""
        self._leave()

    def _enter(self, seat: StageSeat) -> None:
        metrics = self._metrics
        metrics.seat_of[self] = seat
        self._next_name = self._name_of(seat.next_peer)
        stage = (seat.model, seat.instance_id, str(seat.stage))
        metrics.layers.labels(*stage).set(seat.layers[1] - seat.layers[0])
        metrics.first_layer.labels(*stage).set(seat.layers[0])
        metrics.epoch.labels(seat.model, seat.instance_id).set(seat.epoch)
        metrics.stage_info.labels(*stage, str(seat.rank), seat.engine)
        metrics.model_info.labels(seat.model, *self._model_facts)

    def _leave(self) -> None:
        """Removes the gauges of the current seat."""
        metrics = self._metrics
        seat = metrics.seat_of.pop(self, None)
        if seat is None:
            return
        labels = self._labels(seat)
        for shown in metrics.shown:
            if isinstance(shown.family, Gauges):
                shown.family.remove(*labels[shown.scope], *shown.more)
        of_stage = (metrics.busy_ratio, metrics.bubble, metrics.prefill_speed, metrics.layers, metrics.first_layer)
        for gauges in of_stage:
            gauges.remove(*labels[STAGE])
        metrics.epoch.remove(*labels[DRIVER])
        metrics.stage_info.remove(*labels[RANK], seat.engine)
        if all(other.model != seat.model for other in metrics.seats):  # no other stage of the model runs here
            metrics.model_info.remove(seat.model, *self._model_facts)

    @property
    def _model_facts(self) -> tuple[str, str, str]:
        return self._facts.architecture, self._facts.dtype, str(self._facts.num_layers)

    def _labels(self, seat: StageSeat) -> dict[Labels, Labels]:
        """The values of each set of labels."""
        driver = (seat.model, seat.instance_id)
        stage = (*driver, str(seat.stage))
        return {DRIVER: driver, STAGE: stage, RANK: (*stage, str(seat.rank)), HOP: (*stage, self._next_name)}

    def _take_shares(self, seat: StageSeat, beat: Heartbeat) -> None:
        metrics, shares, stage = self._metrics, self._shares, self._labels(seat)[STAGE]
        shares.take(metrics.clock(), beat)
        metrics.busy_ratio.labels(*stage).set(shares.busy)
        metrics.bubble.labels(*stage).set(shares.bubble)
        metrics.prefill_speed.labels(*stage).set(shares.prefill_tokens_per_s)

    def _show(self, shown: Shown, labels: Labels, now: Any) -> None:
        """Sets a gauge; adds to a counter or a histogram by how much the runner's has grown since the last
        heartbeat."""
        family, key = shown.family, (shown.family.name, *shown.more)
        if isinstance(family, Gauges):
            family.labels(*labels).set(now)
        elif isinstance(family, Histograms):
            self._grow_buckets(family.labels(*labels), key, now)
        else:
            family.labels(*labels).value += max(0.0, now - self._counted.get(key, 0.0))
            self._counted[key] = now

    def _grow_buckets(self, durations: Durations, key: Labels, now: DurationCounts) -> None:
        if len(now.counts) != len(durations.counts):
            return  # an empty heartbeat, from before the runner's first one
        counts, sum_s = self._in_buckets.get(key, ([0] * len(now.counts), 0.0))
        self._in_buckets[key] = list(now.counts), now.sum_s
        for index, (count, before) in enumerate(zip(now.counts, counts, strict=True)):
            durations.counts[index] += max(0, count - before)
        durations.sum_s += max(0.0, now.sum_s - sum_s)
