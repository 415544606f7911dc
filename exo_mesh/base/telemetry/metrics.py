"""The Prometheus metrics of a node; docs/reference/metrics.md lists them.

The registry is passed as an argument, never global. Names begin with `exo_mesh_`, and labels never contain a request
id, a prompt or a token.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

from exo_mesh.base.clock import Clock, monotonic
from exo_mesh.base.telemetry.families import Counters, Gauges, Histograms, Infos, MetricFamily
from exo_mesh.base.telemetry.hardware_metrics import HardwareMetrics
from exo_mesh.base.telemetry.request_metrics import RequestMetrics
from exo_mesh.base.telemetry.rkllm_metrics import RkllmMetrics
from exo_mesh.base.telemetry.stage_metrics import StageMetrics

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

RECOVERY_BOUNDS_S = (0.1, 0.25, 0.5, 1, 2, 3, 5, 8, 15, 30, 60, 120, 300)

MAX_MODELS = 100
"""Most models that have series; beyond it, the least recently used ones are dropped."""

MODEL_KEPT_S = 3600.0
"""The series of a model are dropped if it is not placed and was not used for this long."""

SWEEP_EVERY_S = 10.0

ENDS = ("stopped", "lost", "crashed", "oom", "wedged", "stalled", "refused")
CAUSES = ("stage_lost", "hop_lost", "owner_lost", "request")
"""Values of the labels `end` and `cause`. Their counters start at 0 for every model in use, because increase() does not
count an event that creates its series."""


class Metrics:
    """All metric families of a node. requests, stages, hardware, rkllm: families of these
    subjects."""

    def __init__(self, clock: Clock = monotonic) -> None:
        self._clock = clock
        self.requests = RequestMetrics()
        self.stages = StageMetrics(clock)
        self.hardware = HardwareMetrics()
        self.rkllm = RkllmMetrics()
        self._init_runners_and_recoveries()
        self._init_models()
        self._init_node()
        parts = (self.requests, self.stages, self.hardware, self.rkllm, self)
        values = (value for part in parts for value in vars(part).values())
        self.families: list[MetricFamily[Any]] = [value for value in values if isinstance(value, MetricFamily)]
        self.families += dict.fromkeys(shown.family for shown in self.stages.shown)
        self._ran_here: set[str] = set()
        self._used_at: dict[str, float] = {}
        self._sweep_at = clock() + SWEEP_EVERY_S

    @cached_property
    def registry(self) -> CollectorRegistry:
        """All families, for Prometheus."""
        from exo_mesh.base.telemetry.exposition import registry_of  # slow; the first scrape needs it, not the start

        return registry_of(self.families, self.hardware.refresh)

    def _init_runners_and_recoveries(self) -> None:
        # fmt: off
        self.runner_starts = Counters("exo_mesh_runner_starts_total", "Runners started here.", ("model",))
        self.runner_restarts = Counters(
            "exo_mesh_runner_restarts_total",
            "Runners started here for an instance that already had a runner here.", ("model",),
        )
        self.runner_ends = Counters(
            "exo_mesh_runner_ends_total",
            "Runners here that have ended, by the kind of end: stopped, lost, crashed and so on.", ("model", "end"),
        )
        self.placements = Counters(
            "exo_mesh_placements_total", "Placements that this node tried, by outcome.", ("model", "outcome")
        )
        self.recoveries = Counters(
            "exo_mesh_recoveries_total",
            "Recoveries of rings that this node tried, by cause and outcome.", ("model", "cause", "outcome"),
        )
        self.recovery_detection = Histograms(
            "exo_mesh_recovery_detection_seconds", "Time from the first sign of a loss to its detection.",
            RECOVERY_BOUNDS_S,
        )
        self.recovery = Histograms(
            "exo_mesh_recovery_seconds", "Time from the detection of a loss to a ring that is ready.", RECOVERY_BOUNDS_S
        )
        self.recovery_loaded = Counters(
            "exo_mesh_recovery_loaded_bytes_total", "Bytes of weights that peers loaded for recoveries."
        )
        # fmt: on

    def _init_models(self) -> None:
        # fmt: off
        self.instances = Gauges(
            "exo_mesh_instances", "Instances in the view of the mesh, by state.", ("model", "state")
        )
        self.downloads_in_progress = Gauges(
            "exo_mesh_downloads_in_progress", "Downloads of models that run or wait here."
        )
        self.downloads = Counters(
            "exo_mesh_downloads_total", "Downloads here that have ended, by outcome.", ("outcome",)
        )
        self.download_failures = Counters(
            "exo_mesh_download_failures_total", "Downloads here that failed, by the code of the error.", ("type",)
        )
        self.download_bytes = Counters(
            "exo_mesh_download_bytes_total", "Bytes of models that this node received, by source.", ("source",)
        )
        self.download_files = Counters(
            "exo_mesh_download_files_total", "Files of models that were completed here."
        )
        # fmt: on

    def _init_node(self) -> None:
        # fmt: off
        self.build_info = Infos(
            "exo_mesh_build_info", "Versions of this node.", ("version", "protocol", "python")
        )
        self.node_info = Infos(
            "exo_mesh_node_info", "Name, id and namespace of this node.", ("node", "node_id", "namespace")
        )
        self.engine_info = Infos(
            "exo_mesh_engine_info", "An engine that can run here.", ("engine", "version", "compute", "device")
        )
        self.ready = Gauges("exo_mesh_node_ready", "1 if this node can serve requests.")
        self.draining = Gauges("exo_mesh_node_draining", "1 if this node is draining.")
        self.nodes = Gauges("exo_mesh_nodes_active", "Live nodes, this one included.")
        self.peer_rtt = Gauges("exo_mesh_peer_rtt_seconds", "Smoothed round trip of a control call.", ("peer",))
        self.health_reasons = Gauges(
            "exo_mesh_health_reasons", "Current health reasons of this node, by code.", ("code", "level")
        )
        self.memory = Gauges("exo_mesh_node_memory_bytes", "Memory of this machine, by kind.", ("kind",))
        self.memory_peak = Gauges(
            "exo_mesh_node_memory_peak_ratio", "Largest share of the memory in use in the last 90 s."
        )
        self.memory_level = Gauges(
            "exo_mesh_memory_pressure_level", "0: enough memory, 1: no new requests, 2: running requests are suspended."
        )
        self.usable_memory = Gauges("exo_mesh_usable_memory_bytes", "Memory that a new reservation could get here.")
        self.reserved_memory = Gauges("exo_mesh_reserved_memory_bytes", "Memory that plans have reserved here.")
        self.kept_responses = Gauges("exo_mesh_kept_responses", "Responses that this node keeps for later requests.")
        self.kept_response_bytes = Gauges("exo_mesh_kept_response_bytes", "Memory that these responses take.")
        self.disk_free = Gauges(
            "exo_mesh_disk_free_bytes", "Free space on the volume of a directory of this node.", ("volume",)
        )
        self.disk_refused = Counters(
            "exo_mesh_disk_writes_refused_total", "Files that were not written for lack of space or permission."
        )
        self.http_responses = Counters(
            "exo_mesh_http_responses_total", "Answers of the HTTP API.", ("method", "route", "code")
        )
        self.exported_spans = Counters(
            "exo_mesh_exported_spans_total", "Spans of traces for the collector, by outcome.", ("outcome",)
        )
        # fmt: on

    def set_round_trips(self, seconds: Mapping[str, float]) -> None:
        """Replaces the round trip times, in seconds by peer name."""
        self.peer_rtt.clear()
        for peer, rtt_s in seconds.items():
            self.peer_rtt.labels(peer).set(rtt_s)

    def set_reasons(self, reasons: Iterable[tuple[str, str]]) -> None:
        """Replaces the health reasons of this node: (code, level)."""
        self.health_reasons.clear()
        for code, level in reasons:
            self.health_reasons.labels(code, level).inc()

    def show_kept(self, count: int, num_bytes: int) -> None:
        """Sets the number of kept responses and their bytes."""
        self.kept_responses.set(count)
        self.kept_response_bytes.set(num_bytes)

    def placed(self, model: str, outcome: str) -> None:
        """Counts a placement that has ended. outcome: "ready", or the code of its error."""
        self._note_use(model)
        self.placements.labels(model, outcome).inc()

    def recovery_ended(self, model: str, cause: str, outcome: str) -> None:
        """Counts a recovery that has ended. outcome: "ready", or the code of its error."""
        self._note_use(model)
        self.recoveries.labels(model, cause, outcome).inc()

    def recovered(self, model: str, cause: str, *, trouble_s: float, took_s: float, loaded_bytes: int) -> None:
        """Counts a successful recovery, with its times in seconds and the loaded bytes."""
        self.recovery_ended(model, cause, "ready")
        self.recovery_detection.observe(trouble_s)
        self.recovery.observe(took_s)
        self.recovery_loaded.inc(loaded_bytes)

    def runner_started(self, model: str, instance_id: str) -> None:
        """Counts a runner that starts on this machine."""
        self._note_use(model)
        self.runner_starts.labels(model).inc()
        self.runner_restarts.labels(model).inc(float(instance_id in self._ran_here))
        self._ran_here.add(instance_id)

    def runner_ended(self, model: str, end: str) -> None:
        """Counts a runner that has ended on this machine."""
        self._note_use(model)
        self.runner_ends.labels(model, end).inc()

    def _note_use(self, model: str) -> None:
        self._begin([model])
        self._used_at[model] = self._clock()

    def _begin(self, models: Iterable[str]) -> None:
        """Creates the series of rare events at 0 for new models, so that increase() counts the first event."""
        for model in models:
            if model not in self._used_at:
                for end in ENDS:
                    self.runner_ends.labels(model, end)
                for cause in CAUSES:
                    self.recoveries.labels(model, cause, "ready")

    def tick(self, instances: Mapping[str, str], peers: Collection[str]) -> None:
        """Updates rates and drops old series; called about once a second. instances: model by id, of all instances in
        the mesh. peers: names of all live nodes."""
        now = self._clock()
        self.requests.tick(now)
        if now >= self._sweep_at:
            self._sweep_at = now + SWEEP_EVERY_S
            self._sweep(now, instances, peers)

    def _sweep(self, now: float, instances: Mapping[str, str], peers: Collection[str]) -> None:
        """Drops the series of instances, models and peers that are gone."""
        here = self.stages.seats
        instance_ids = {*instances, *(seat.instance_id for seat in here)}
        self._ran_here &= instance_ids
        in_use = {*instances.values(), *(seat.model for seat in here), *self.requests.live_models()}
        in_use_or_new = in_use | self.requests.take_new()
        self._begin(in_use_or_new)
        self._used_at.update(dict.fromkeys(in_use_or_new, now))
        recent = sorted(self._used_at, key=self._used_at.__getitem__, reverse=True)
        recent = [name for name in recent if now - self._used_at[name] < MODEL_KEPT_S][:MAX_MODELS]
        self._used_at = {name: self._used_at[name] for name in in_use.union(recent)}
        for family in self.families:
            family.keep("model", self._used_at)
            family.keep("instance_id", instance_ids)
            family.keep("peer", peers)
