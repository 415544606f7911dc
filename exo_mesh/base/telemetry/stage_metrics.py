"""The metric families of the stages on this node, and the values of heartbeats that they show."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from operator import attrgetter
from typing import Any

import msgspec

from exo_mesh.base.clock import Clock
from exo_mesh.base.telemetry.durations import LAP_BOUNDS_S, WAIT_BOUNDS_S
from exo_mesh.base.telemetry.families import Counters, Gauges, Histograms, Infos, Labels, MetricFamily

DRIVER = ("model", "instance_id")
STAGE = (*DRIVER, "stage")
RANK = (*STAGE, "rank")
HOP = (*STAGE, "peer")


class StageSeat(msgspec.Struct, frozen=True):
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


class ModelFacts(msgspec.Struct, frozen=True):
    """The facts in the info metric of a model."""

    architecture: str
    dtype: str
    num_layers: int


class Shown(msgspec.Struct, frozen=True):
    """A value of the heartbeats of runners that a family shows. value, only_if: return it, and whether it is shown,
    from a heartbeat. scope: the labels of its runner. more: the values of the labels behind these."""

    family: MetricFamily[Any]
    value: Callable[[Any], Any]
    only_if: Callable[[Any], Any] | None
    scope: Labels
    more: Labels


_POSITIONS = ("1", "2", "3-4", "5-8", "9-16", "17-")
"""See DRAFT_POSITIONS in domain/runner/heartbeat.py."""


def _at(name: str, index: int, beat: Any) -> int:
    """An entry of a list in the heartbeat; 0 if the list is shorter."""
    values = getattr(beat, name)
    return int(values[index]) if index < len(values) else 0


class StageMetrics:
    """The stage metrics of a node. A StageMeter of the package hosting counts one runner in them."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.seat_of: dict[object, StageSeat] = {}
        """The place of each runner here, by its meter."""
        self.shown: list[Shown] = []
        self._init_driver()
        self._init_drafts()
        self._init_stage()
        self._init_hop_and_group()

    def _show(self, value: str, family: MetricFamily[Any], *more: str, only_if: str = "") -> None:
        """Lets a family show a value, by its name in the heartbeat. only_if: the value that must not be 0 or False."""
        scope = family.label_names[: len(family.label_names) - len(more)]
        self.shown.append(Shown(family, attrgetter(value), attrgetter(only_if) if only_if else None, scope, more))

    def _init_driver(self) -> None:
        # fmt: off
        self._show("queued", Gauges(
            "exo_mesh_queue_depth", "Requests that wait in the queue of a driver here.", DRIVER
        ))
        self._show("queue_waits", Histograms(
            "exo_mesh_queue_wait_seconds", "Time that requests waited in the queue of a driver here.",
            WAIT_BOUNDS_S, DRIVER,
        ))
        self._show("oldest_wait_s", Gauges(
            "exo_mesh_queue_oldest_wait_seconds", "Time that the oldest waiting request has waited.", DRIVER
        ))
        self._show("running", Gauges("exo_mesh_running_sequences", "Requests that run in a driver here.", DRIVER))
        self._show("parked", Gauges("exo_mesh_requests_parked", "Running requests whose client does not read.", DRIVER))
        self._show("tokens", Counters("exo_mesh_driver_tokens_total", "Tokens sampled by a driver here.", DRIVER))
        self._show("laps_took", Histograms(
            "exo_mesh_lap_seconds", "Time of a frame through all stages of the ring.", LAP_BOUNDS_S, DRIVER
        ))
        self._show("hops_took", Histograms(
            "exo_mesh_lap_hop_seconds",
            "Time of a hop: the part of a lap outside all stages, divided by the number of hops.",
            LAP_BOUNDS_S, DRIVER,
        ))
        self._show("laps_saved", Counters(
            "exo_mesh_laps_saved_total", "Tokens that needed no lap, because only one token was possible.", DRIVER
        ))
        kv_tokens = Gauges("exo_mesh_kv_tokens", "Positions of the KV pool, by state.", (*DRIVER, "state"))
        self._show("kv_tokens", kv_tokens, "used")
        self._show("prefix.kept_tokens", kv_tokens, "kept")
        self._show("kv_free_tokens", kv_tokens, "free")
        self._show("evictions", Counters(
            "exo_mesh_evictions_total", "Running requests that were suspended for lack of KV blocks or memory.", DRIVER
        ))
        self._show("shared_tokens", Counters(
            "exo_mesh_prefill_shared_tokens_total", "Prompt tokens whose KV was copied instead of computed.", DRIVER
        ))
        prefix_lookups = Counters(
            "exo_mesh_prefix_lookups_total", "Prompts looked up in the prefix cache, by result.", (*DRIVER, "result")
        )
        self._show("prefix.hits", prefix_lookups, "hit")
        self._show("prefix.misses", prefix_lookups, "miss")
        self._show("prefix.hit_tokens", Counters(
            "exo_mesh_prefix_hit_tokens_total", "Prompt tokens that came from the prefix cache.", DRIVER
        ))
        self._show("prefix.evictions", Counters(
            "exo_mesh_prefix_evictions_total", "Sequences that the prefix cache had to give up.", DRIVER
        ))
        prefix_disk_lookups = Counters(
            "exo_mesh_prefix_disk_reads_total", "Prompts that began with a file on disk, by result.",
            (*DRIVER, "result"),
        )
        self._show("prefix.disk_hits", prefix_disk_lookups, "hit", only_if="prefix.has_disk")
        self._show("prefix.disk_misses", prefix_disk_lookups, "lost", only_if="prefix.has_disk")
        # fmt: on

    def _init_drafts(self) -> None:
        drafts = Counters(
            "exo_mesh_draft_tokens_total",
            "Drafted tokens, by position in a run of drafts and by result.",
            (*DRIVER, "position", "result"),
        )
        for index, position in enumerate(_POSITIONS):
            for result in ("accepted", "rejected"):
                value = partial(_at, f"drafts_{result}", index)
                self.shown.append(Shown(drafts, value, None, DRIVER, (position, result)))

    def _init_stage(self) -> None:
        # fmt: off
        self.busy_ratio = Gauges(
            "exo_mesh_stage_busy_ratio", "Share of the last 10 s in which a stage here computed.", STAGE
        )
        self.bubble = Gauges(
            "exo_mesh_stage_bubble_ratio",
            "Share of the last 10 s in which a stage here held sequences and waited for frames.", STAGE,
        )
        self._show("busy_s", Counters(
            "exo_mesh_stage_busy_seconds_total", "Time a stage here has spent in its engine.", STAGE
        ))
        self._show("frames_in", Counters("exo_mesh_stage_frames_total", "Frames a stage here has received.", STAGE))
        self._show("sequences", Gauges("exo_mesh_stage_sequences", "Sequences with KV in a stage here.", STAGE))
        self._show("prefix.num_bytes", Gauges(
            "exo_mesh_prefix_bytes", "KV of ended requests that a stage here keeps for the prefix cache.", STAGE
        ))
        self._show("prefix.disk_bytes", Gauges(
            "exo_mesh_prefix_disk_bytes", "Files with KV of a stage here, for prompts after a restart.", STAGE
        ))
        disk_writes = Counters(
            "exo_mesh_prefix_disk_writes_total", "Files with KV that a stage here wanted to write, by result.",
            (*STAGE, "result"),
        )
        self._show("prefix.disk_writes", disk_writes, "ok", only_if="prefix.has_disk")
        self._show("prefix.disk_errors", disk_writes, "error", only_if="prefix.has_disk")
        self._show("memory_bytes", Gauges(
            "exo_mesh_stage_memory_bytes", "Weights and KV of a stage here, by rank.", RANK
        ))
        self.layers = Gauges("exo_mesh_stage_layers", "Number of layers of a stage here.", STAGE)
        self.first_layer = Gauges("exo_mesh_stage_first_layer", "First layer of a stage here.", STAGE)
        self.epoch = Gauges("exo_mesh_plan_epoch", "Counter of the ballot of the plan in force.", DRIVER)
        self._show("prefill_tokens", Counters(
            "exo_mesh_prefill_tokens_total", "Prompt tokens computed by a stage here.", STAGE
        ))
        self._show("prefill_s", Counters(
            "exo_mesh_prefill_seconds_total", "Time a stage here has spent on prompt tokens.", STAGE
        ))
        self.prefill_speed = Gauges(
            "exo_mesh_prefill_tokens_per_second", "Speed of prefill of a stage here over the last 10 s.", STAGE
        )
        # fmt: on

    def _init_hop_and_group(self) -> None:
        # fmt: off
        self._show("hop_took", Histograms(
            "exo_mesh_hop_seconds", "Time from sending a frame to its arrival at the next peer.", LAP_BOUNDS_S, HOP
        ))
        self._show("frames_out", Counters(
            "exo_mesh_hop_frames_total", "Frames sent to the next peer of the ring.", HOP
        ))
        self._show("bytes_out", Counters(
            "exo_mesh_hop_sent_bytes_total", "Bytes sent to the next peer of the ring.", HOP
        ))
        self._show("all_reduce_s", Gauges(
            "exo_mesh_group_all_reduce_seconds", "Time of one all-reduce of a tensor group, last measurement.", RANK
        ), only_if="all_reduce_s")
        self._show("step_all_reduce_s", Gauges(
            "exo_mesh_step_all_reduce_seconds", "Time of all all-reduces of one decode step.", RANK
        ), only_if="all_reduce_s")
        self.model_info = Infos(
            "exo_mesh_model_info", "A model with a stage on this node.",
            ("model", "architecture", "dtype", "layers"),
        )
        self.stage_info = Infos(
            "exo_mesh_stage_info", "A stage that runs here, and its engine.", (*RANK, "engine")
        )
        # fmt: on

    @property
    def seats(self) -> list[StageSeat]:
        """The places of the runners on this node."""
        return list(self.seat_of.values())
