"""Counts a runner of this node in the metrics, from its heartbeats.

A runner counts from its own start, while the counters of a node must never fall. So each runner has a meter, which adds
the increase since the last heartbeat.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from exo_mesh.base.telemetry.durations import DurationCounts, Durations
from exo_mesh.base.telemetry.families import Cell, MetricFamily
from exo_mesh.base.telemetry.stage_metrics import ModelFacts, StageMetrics, StageSeat
from exo_mesh.domain.runner.heartbeat import Heartbeat

WINDOW_BEATS = 21
"""Heartbeats that are kept: the last 10 s."""


@dataclass(slots=True)
class StageShares:
    """The shares of a stage's time over its last heartbeats."""

    _beats: deque[tuple[float, float, bool]] = field(default_factory=lambda: deque(maxlen=WINDOW_BEATS))
    _prefill: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=WINDOW_BEATS))

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
        self._counted: dict[str, float] = {}
        self._in_buckets: dict[str, tuple[list[int], float]] = {}

    def take(self, seat: StageSeat, beat: Heartbeat) -> None:
        """Takes a heartbeat. seat: differs from the seat before if the ring continues under another plan."""
        if seat != self._metrics.seat_of.get(self):
            self._leave()
            self._enter(seat)
        self._take_stage(seat, beat)
        if beat.kv_pool_tokens:  # only a driver reports the KV pool
            self._take_driver(seat, beat)
        if seat.next_peer:  # a ring of one stage has no hop
            self._take_hop(seat, beat)

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
        driver = (seat.model, seat.instance_id)
        stage, rank = (*driver, str(seat.stage)), (*driver, str(seat.stage), str(seat.rank))
        of_stage = (metrics.busy_ratio, metrics.bubble, metrics.sequences, metrics.prefill_speed)
        for gauges in (*of_stage, metrics.prefix_bytes, metrics.disk_bytes, metrics.layers, metrics.first_layer):
            gauges.remove(*stage)
        for gauges in (metrics.memory, metrics.all_reduce, metrics.step_all_reduce):
            gauges.remove(*rank)
        for gauges in (metrics.queue_depth, metrics.oldest_wait, metrics.running, metrics.parked, metrics.epoch):
            gauges.remove(*driver)
        for state in ("used", "kept", "free"):
            metrics.kv_tokens.remove(*driver, state)
        metrics.stage_info.remove(*rank, seat.engine)
        if all(other.model != seat.model for other in metrics.seats):  # no other stage of the model runs here
            metrics.model_info.remove(seat.model, *self._model_facts)

    @property
    def _model_facts(self) -> tuple[str, str, str]:
        return self._facts.architecture, self._facts.dtype, str(self._facts.num_layers)

    def _take_stage(self, seat: StageSeat, beat: Heartbeat) -> None:
        metrics, shares = self._metrics, self._shares
        stage = (seat.model, seat.instance_id, str(seat.stage))
        rank = (*stage, str(seat.rank))
        self._grow(metrics.frames, stage, beat.frames_in)
        self._grow(metrics.busy, stage, beat.busy_s)
        self._grow(metrics.prefill_tokens, stage, beat.prefill_tokens)
        self._grow(metrics.prefill_seconds, stage, beat.prefill_s)
        metrics.sequences.labels(*stage).set(beat.sequences)
        metrics.memory.labels(*rank).set(beat.memory_bytes)
        metrics.prefix_bytes.labels(*stage).set(beat.prefix.num_bytes)
        metrics.disk_bytes.labels(*stage).set(beat.prefix.disk_bytes)
        if beat.prefix.has_disk:
            self._grow(metrics.disk_writes, (*stage, "ok"), beat.prefix.disk_writes)
            self._grow(metrics.disk_writes, (*stage, "error"), beat.prefix.disk_errors)
        shares.take(metrics.clock(), beat)
        metrics.busy_ratio.labels(*stage).set(shares.busy)
        metrics.bubble.labels(*stage).set(shares.bubble)
        metrics.prefill_speed.labels(*stage).set(shares.prefill_tokens_per_s)
        if beat.all_reduce_s:
            metrics.all_reduce.labels(*rank).set(beat.all_reduce_s)
            metrics.step_all_reduce.labels(*rank).set(beat.all_reduce_s * beat.step_all_reduces)

    def _take_driver(self, seat: StageSeat, beat: Heartbeat) -> None:
        metrics, driver = self._metrics, (seat.model, seat.instance_id)
        metrics.queue_depth.labels(*driver).set(beat.queued)
        metrics.oldest_wait.labels(*driver).set(beat.oldest_wait_s)
        metrics.running.labels(*driver).set(beat.running)
        metrics.parked.labels(*driver).set(beat.parked)
        metrics.kv_tokens.labels(*driver, "used").set(beat.kv_tokens)
        kept = beat.prefix.kept_tokens
        metrics.kv_tokens.labels(*driver, "kept").set(kept)
        metrics.kv_tokens.labels(*driver, "free").set(max(0, beat.kv_pool_tokens - beat.kv_tokens - kept))
        self._grow(metrics.prefix_lookups, (*driver, "hit"), beat.prefix.hits)
        self._grow(metrics.prefix_lookups, (*driver, "miss"), beat.prefix.misses)
        self._grow(metrics.prefix_tokens, driver, beat.prefix.hit_tokens)
        self._grow(metrics.prefix_evictions, driver, beat.prefix.evictions)
        if beat.prefix.has_disk:
            self._grow(metrics.prefix_disk_lookups, (*driver, "hit"), beat.prefix.disk_hits)
            self._grow(metrics.prefix_disk_lookups, (*driver, "lost"), beat.prefix.disk_misses)
        self._grow(metrics.tokens, driver, beat.tokens)
        self._grow(metrics.evictions, driver, beat.evictions)
        self._grow(metrics.laps_saved, driver, beat.laps_saved)
        self._grow(metrics.shared_tokens, driver, beat.shared_tokens)
        self._grow_buckets(metrics.lap, driver, beat.laps_took)
        self._grow_buckets(metrics.lap_hop, driver, beat.hops_took)
        self._grow_buckets(metrics.queue_wait, driver, beat.queue_waits)

    def _take_hop(self, seat: StageSeat, beat: Heartbeat) -> None:
        metrics, hop = self._metrics, (seat.model, seat.instance_id, str(seat.stage), self._next_name)
        self._grow(metrics.hop_frames, hop, beat.frames_out)
        self._grow(metrics.hop_bytes, hop, beat.bytes_out)
        self._grow_buckets(metrics.hop, hop, beat.hop_took)

    def _grow(self, family: MetricFamily[Cell], labels: tuple[str, ...], now: float) -> None:
        """Adds the increase of a runner's counter since the last heartbeat."""
        before = self._counted.get(family.name, 0.0)
        self._counted[family.name] = now
        family.labels(*labels).value += max(0.0, now - before)

    def _grow_buckets(self, family: MetricFamily[Durations], labels: tuple[str, ...], now: DurationCounts) -> None:
        durations = family.labels(*labels)
        if len(now.counts) != len(durations.counts):
            return  # an empty heartbeat, from before the runner's first one
        counts, sum_s = self._in_buckets.get(family.name, ([0] * len(now.counts), 0.0))
        self._in_buckets[family.name] = list(now.counts), now.sum_s
        for index, (count, before) in enumerate(zip(now.counts, counts, strict=True)):
            durations.counts[index] += max(0, count - before)
        durations.sum_s += max(0.0, now.sum_s - sum_s)
