"""The metric families of the stages on this node."""

from __future__ import annotations

from dataclasses import dataclass

from exo_mesh.base.clock import Clock
from exo_mesh.base.telemetry.durations import LAP_BOUNDS_S, WAIT_BOUNDS_S
from exo_mesh.base.telemetry.families import Counters, Gauges, Histograms, Infos

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
    """The stage metrics of a node. A StageMeter of the package hosting counts one runner in them."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.seat_of: dict[object, StageSeat] = {}
        """The place of each runner here, by its meter."""
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

    @property
    def seats(self) -> list[StageSeat]:
        """The places of the runners on this node."""
        return list(self.seat_of.values())
