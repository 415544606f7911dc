"""Metrics of the stages on this node, from the heartbeats of their runners.

A runner counts from its own start, while the counters of a node must never fall. So each runner has a meter, which adds
the increase since the last heartbeat.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from exo_mesh.base.clock import Clock
from exo_mesh.base.telemetry.durations import LAP_BOUNDS_S, WAIT_BOUNDS_S, Durations
from exo_mesh.base.telemetry.families import Cell, Counters, Gauges, Histograms, Infos, MetricFamily
from exo_mesh.base.telemetry.stage_readings import StageShares
from exo_mesh.wire.proto.runner_pb2 import Durations as DurationsProto
from exo_mesh.wire.proto.runner_pb2 import Heartbeat

_DRIVER = ("model", "instance_id")
_STAGE = (*_DRIVER, "stage")
_RANK = (*_STAGE, "rank")
_HOP = (*_STAGE, "peer")


@dataclass(frozen=True, slots=True)
class StageSeat:
    """The place of a runner in a ring.

    layers: [start, stop). epoch: the counter of the ballot in force. next_peer: id of the peer with the next stage; ""
    in a ring of one stage, and for a rank that is not the leader.
    """

    model: str
    instance_id: str
    stage: int
    layers: tuple[int, int]
    engine: str = ""
    rank: int = 0
    epoch: int = 0
    next_peer: str = ""


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """The facts in the info metric of a model."""

    architecture: str
    dtype: str
    num_layers: int


class StageMetrics:
    """The stage metrics of a node. `follow` starts the count of one runner."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.meters: set[StageMeter] = set()
        self._init_driver()
        self._init_stage()
        self._init_hop_and_group()

    def _init_driver(self) -> None:
        # fmt: off
        self.queue_depth = Gauges("exo_mesh_queue_depth", "Requests that wait in the queue of a driver here.", _DRIVER)
        self.queue_wait = Histograms(
            "exo_mesh_queue_wait_seconds", "Time that requests waited in the queue of a driver here.",
            WAIT_BOUNDS_S, _DRIVER,
        )
        self.oldest_wait = Gauges(
            "exo_mesh_queue_oldest_wait_seconds", "Time that the oldest waiting request has waited.", _DRIVER
        )
        self.running = Gauges("exo_mesh_running_sequences", "Requests that run in a driver here.", _DRIVER)
        self.parked = Gauges("exo_mesh_requests_parked", "Running requests whose client does not read.", _DRIVER)
        self.tokens = Counters("exo_mesh_driver_tokens_total", "Tokens sampled by a driver here.", _DRIVER)
        self.lap = Histograms(
            "exo_mesh_lap_seconds", "Time of a frame through all stages of the ring.", LAP_BOUNDS_S, _DRIVER
        )
        self.lap_hop = Histograms(
            "exo_mesh_lap_hop_seconds",
            "Time of a hop: the part of a lap outside all stages, divided by the number of hops.",
            LAP_BOUNDS_S, _DRIVER,
        )
        self.laps_saved = Counters(
            "exo_mesh_laps_saved_total", "Tokens that needed no lap, because only one token was possible.", _DRIVER
        )
        self.kv_tokens = Gauges("exo_mesh_kv_tokens", "Positions of the KV pool, by state.", (*_DRIVER, "state"))
        self.evictions = Counters(
            "exo_mesh_evictions_total", "Running requests that were suspended for lack of KV blocks or memory.", _DRIVER
        )
        self.shared_tokens = Counters(
            "exo_mesh_prefill_shared_tokens_total", "Prompt tokens whose KV was copied instead of computed.", _DRIVER
        )
        self.prefix_lookups = Counters(
            "exo_mesh_prefix_lookups_total", "Prompts looked up in the prefix cache, by result.", (*_DRIVER, "result")
        )
        self.prefix_tokens = Counters(
            "exo_mesh_prefix_hit_tokens_total", "Prompt tokens that came from the prefix cache.", _DRIVER
        )
        self.prefix_evictions = Counters(
            "exo_mesh_prefix_evictions_total", "Sequences that the prefix cache had to give up.", _DRIVER
        )
        self.prefix_disk_lookups = Counters(
            "exo_mesh_prefix_disk_reads_total", "Prompts that began with a file on disk, by result.",
            (*_DRIVER, "result"),
        )
        # fmt: on

    def _init_stage(self) -> None:
        # fmt: off
        self.busy_ratio = Gauges(
            "exo_mesh_stage_busy_ratio", "Share of the last 10 s in which a stage here computed.", _STAGE
        )
        self.bubble = Gauges(
            "exo_mesh_stage_bubble_ratio",
            "Share of the last 10 s in which a stage here held sequences and waited for frames.", _STAGE,
        )
        self.busy = Counters(
            "exo_mesh_stage_busy_seconds_total", "Time a stage here has spent in its engine.", _STAGE
        )
        self.frames = Counters("exo_mesh_stage_frames_total", "Frames a stage here has received.", _STAGE)
        self.sequences = Gauges("exo_mesh_stage_sequences", "Sequences with KV in a stage here.", _STAGE)
        self.prefix_bytes = Gauges(
            "exo_mesh_prefix_bytes", "KV of ended requests that a stage here keeps for the prefix cache.", _STAGE
        )
        self.disk_bytes = Gauges(
            "exo_mesh_prefix_disk_bytes", "Files with KV of a stage here, for prompts after a restart.", _STAGE
        )
        self.disk_writes = Counters(
            "exo_mesh_prefix_disk_writes_total", "Files with KV that a stage here wanted to write, by result.",
            (*_STAGE, "result"),
        )
        self.memory = Gauges("exo_mesh_stage_memory_bytes", "Weights and KV of a stage here, by rank.", _RANK)
        self.layers = Gauges("exo_mesh_stage_layers", "Number of layers of a stage here.", _STAGE)
        self.first_layer = Gauges("exo_mesh_stage_first_layer", "First layer of a stage here.", _STAGE)
        self.epoch = Gauges("exo_mesh_plan_epoch", "Counter of the ballot of the plan in force.", _DRIVER)
        self.prefill_tokens = Counters(
            "exo_mesh_prefill_tokens_total", "Prompt tokens computed by a stage here.", _STAGE
        )
        self.prefill_seconds = Counters(
            "exo_mesh_prefill_seconds_total", "Time a stage here has spent on prompt tokens.", _STAGE
        )
        self.prefill_speed = Gauges(
            "exo_mesh_prefill_tokens_per_second", "Speed of prefill of a stage here over the last 10 s.", _STAGE
        )
        # fmt: on

    def _init_hop_and_group(self) -> None:
        # fmt: off
        self.hop = Histograms(
            "exo_mesh_hop_seconds", "Time from sending a frame to its arrival at the next peer.", LAP_BOUNDS_S, _HOP
        )
        self.hop_frames = Counters(
            "exo_mesh_hop_frames_total", "Frames sent to the next peer of the ring.", _HOP
        )
        self.hop_bytes = Counters("exo_mesh_hop_sent_bytes_total", "Bytes sent to the next peer of the ring.", _HOP)
        self.all_reduce = Gauges(
            "exo_mesh_group_all_reduce_seconds", "Time of one all-reduce of a tensor group, last measurement.", _RANK
        )
        self.step_all_reduce = Gauges(
            "exo_mesh_step_all_reduce_seconds", "Time of all all-reduces of one decode step.", _RANK
        )
        self.model_info = Infos(
            "exo_mesh_model_info", "A model with a stage on this node.",
            ("model", "architecture", "dtype", "layers"),
        )
        self.stage_info = Infos(
            "exo_mesh_stage_info", "A stage that runs here, and its engine.", (*_RANK, "engine")
        )
        # fmt: on

    def follow(self, facts: ModelFacts, name_of: Callable[[str], str] = lambda peer_id: peer_id[:8]) -> StageMeter:
        """Counts a runner that was started here; returns its meter. The caller must call the meter's `end`. name_of:
        returns the name of a peer id."""
        meter = StageMeter(self, facts, name_of)
        self.meters.add(meter)
        return meter

    @property
    def seats(self) -> list[StageSeat]:
        """The places of the runners on this node."""
        return [meter.seat for meter in self.meters if meter.seat is not None]


class StageMeter:
    """Counts one runner, from its heartbeats."""

    def __init__(self, metrics: StageMetrics, facts: ModelFacts, name_of: Callable[[str], str]) -> None:
        self.seat: StageSeat | None = None
        self._next_name = ""
        self._metrics = metrics
        self._facts = facts
        self._name_of = name_of
        self._shares = StageShares()
        self._counted: dict[str, float] = {}
        self._in_buckets: dict[str, tuple[list[int], float]] = {}

    def take(self, seat: StageSeat, beat: Heartbeat) -> None:
        """Takes a heartbeat. seat: differs from the one before if the ring continues under another plan."""
        if seat != self.seat:
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
        self._metrics.meters.discard(self)

    def _enter(self, seat: StageSeat) -> None:
        self.seat, metrics = seat, self._metrics
        self._next_name = self._name_of(seat.next_peer)
        stage = (seat.model, seat.instance_id, str(seat.stage))
        metrics.layers.labels(*stage).set(seat.layers[1] - seat.layers[0])
        metrics.first_layer.labels(*stage).set(seat.layers[0])
        metrics.epoch.labels(seat.model, seat.instance_id).set(seat.epoch)
        metrics.stage_info.labels(*stage, str(seat.rank), seat.engine)
        metrics.model_info.labels(seat.model, *self._model_facts)

    def _leave(self) -> None:
        """Removes the gauges of the current seat."""
        seat, self.seat, metrics = self.seat, None, self._metrics
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
        metrics.prefix_bytes.labels(*stage).set(beat.prefix.bytes)
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

    def _grow_buckets(self, family: MetricFamily[Durations], labels: tuple[str, ...], now: DurationsProto) -> None:
        durations = family.labels(*labels)
        if len(now.counts) != len(durations.counts):
            return  # an empty heartbeat, from before the runner's first one
        counts, sum_s = self._in_buckets.get(family.name, ([0] * len(now.counts), 0.0))
        self._in_buckets[family.name] = list(now.counts), now.sum_s
        for index, (count, before) in enumerate(zip(now.counts, counts, strict=True)):
            durations.counts[index] += max(0, count - before)
        durations.sum_s += max(0.0, now.sum_s - sum_s)
