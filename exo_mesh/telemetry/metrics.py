"""The Prometheus metrics of a node. The registry is handed around; nothing here is global.

Names begin with `exo_mesh_`, end in a unit, and never carry a request id, a prompt or a token.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from exo_mesh.clock import Clock, monotonic
from exo_mesh.proto.runner_pb2 import Heartbeat
from exo_mesh.telemetry.stage_readings import DriverHistograms, StageShares

TTFT_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
RECOVERY_BUCKETS_S = (0.1, 0.25, 0.5, 1, 2, 3, 5, 8, 15, 30, 60, 120, 300)
ITL_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)

_STAGE = ("instance", "stage")


class Metrics:
    """All collectors of one node, in `registry`."""

    def __init__(self, clock: Clock = monotonic) -> None:
        self.registry = CollectorRegistry()

        def gauge(name: str, text: str, labels: tuple[str, ...] = ()) -> Gauge:
            return Gauge(f"exo_mesh_{name}", text, labels, registry=self.registry)

        def counter(name: str, text: str, labels: tuple[str, ...] = ()) -> Counter:
            return Counter(f"exo_mesh_{name}", text, labels, registry=self.registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"exo_mesh_{name}", text, buckets=buckets, registry=self.registry)

        self.peers = gauge("peers", "Live peers, this one included.")
        self.peer_rtt = gauge("peer_rtt_seconds", "Smoothed round trip of a control call.", ("peer",))
        self.usable_memory = gauge("usable_memory_bytes", "What a new reservation could get here.")
        self.reserved_memory = gauge("reserved_memory_bytes", "What plans hold here.")
        self.requests = counter("requests_total", "Requests that entered here, by how they ended.", ("outcome",))
        self.requests_live = gauge("requests_running", "Requests that entered here and have not ended.")
        self.tokens = counter("tokens_total", "Tokens of requests that entered here.", ("kind",))
        self.ttft = histogram("ttft_seconds", "From a request's entry to its first token.", TTFT_BUCKETS_S)
        self.itl = histogram("itl_seconds", "Between two tokens of a request.", ITL_BUCKETS_S)
        self.placements = counter("placements_total", "Placements this node tried, by how they ended.", ("outcome",))
        self.exported_spans = counter(
            "exported_spans_total", "Spans of traces for the collector, by what became of them.", ("outcome",)
        )
        self.resumes = counter("requests_resumed_total", "Times a request went on after its ring was lost.")
        self.recoveries = counter(
            "recoveries_total",
            "Rings that this node tried to go on with after a loss, by how that ended.",
            ("outcome",),
        )
        self.recovery_detection = histogram(
            "recovery_detection_seconds", "From the first sign of a loss to the verdict.", RECOVERY_BUCKETS_S
        )
        self.recovery = histogram("recovery_seconds", "From the verdict to a ring that is ready.", RECOVERY_BUCKETS_S)
        self.recovery_loaded = counter("recovery_loaded_bytes_total", "Weights that recoveries made peers read.")
        self.redials = counter("driver_redials_total", "Times a broken stream from a driver was opened again.")
        self.stage_starts = counter("stage_starts_total", "Runners started here.", ("instance",))
        self.stage_restarts = counter("stage_restarts_total", "Runners started here after the first.", ("instance",))
        self.stage_ends = counter(
            "stage_ends_total", "Runners here that have ended, by how: stopped, lost, crashed, …", ("instance", "end")
        )
        self.stage_frames = gauge("stage_frames_total", "Frames a stage here has received.", _STAGE)
        self.stage_bytes_out = gauge("stage_sent_bytes_total", "Bytes a stage here has sent on.", _STAGE)
        self.stage_memory = gauge("stage_memory_bytes", "Weights and KV of a stage here.", _STAGE)
        self.stage_busy = gauge("stage_busy_seconds_total", "Time a stage here has spent in its engine.", _STAGE)
        self.stage_sequences = gauge("stage_sequences", "Sequences with KV in a stage here.", _STAGE)
        self.all_reduce = gauge("group_all_reduce_seconds", "All-reduce of a few bytes in a group led here.", _STAGE)
        self.queue_depth = gauge("queue_depth", "Requests waiting in a driver here.", ("instance",))
        self.running = gauge("running_sequences", "Requests running in a driver here.", ("instance",))
        self.parked = gauge("requests_parked", "Requests in a driver here whose reader does not read.", ("instance",))
        self.kv_tokens = gauge("kv_tokens", "Positions of the KV pool, by state.", ("instance", "state"))
        self.evictions = gauge("evictions_total", "Running requests that had to wait again.", ("instance",))
        self.laps_saved = gauge(
            "laps_saved_total", "Tokens that came without a lap of their own, since no other could.", ("instance",)
        )
        self.shared_tokens = gauge("prefill_shared_tokens_total", "Prompt tokens copied, not computed.", ("instance",))
        self.oldest_wait = gauge("queue_oldest_wait_seconds", "Of the requests that wait in a driver.", ("instance",))
        self.memory = gauge("node_memory_bytes", "Memory of this machine, by kind.", ("kind",))
        self.memory_peak = gauge("node_memory_peak_ratio", "Most of the memory in use in the last minute and a half.")
        self.memory_level = gauge("memory_pressure_level", "0 there is room, 1 nobody new, 2 fewer than now.")
        self.disk_free = gauge("disk_free_bytes", "Free on the volume of a directory of this node.", ("volume",))
        self.disk_refused = gauge("disk_writes_refused_total", "Files left unwritten for want of room or permission.")
        self.health_reasons = gauge("health_reasons", "What is wrong with this node now, by code.", ("code", "level"))
        self.stage_busy_ratio = gauge("stage_busy_ratio", "Share of the last 10 s in its engine.", _STAGE)
        self.stage_bubble = gauge("stage_bubble_ratio", "Same, waiting for frames with sequences on it.", _STAGE)
        self.failed = counter("requests_failed_total", "Requests that entered here and ended in an error.", ("code",))
        self.downloads = gauge("downloads_running", "Downloads of models that run or wait here.")
        self.downloads_failed = gauge("downloads_failed_total", "Downloads here that failed, by code.", ("code",))
        self.download_bytes = gauge("download_received_bytes_total", "Of models, by source.", ("source",))
        self._histograms = DriverHistograms()
        self.registry.register(self._histograms)
        self._shares: dict[tuple[str, str], StageShares] = {}
        self._clock = clock
        self._started: set[str] = set()

    def set_round_trips(self, seconds: Mapping[str, float]) -> None:
        """Replace the round trips to the peers, by peer name."""
        self.peer_rtt.clear()
        for peer, rtt_s in seconds.items():
            self.peer_rtt.labels(peer).set(rtt_s)

    def recovered(self, trouble_s: float, took_s: float, loaded_bytes: int) -> None:
        """A ring goes on after a loss."""
        self.recoveries.labels("ready").inc()
        self.recovery_detection.observe(trouble_s)
        self.recovery.observe(took_s)
        self.recovery_loaded.inc(loaded_bytes)

    def set_downloads(self, running: int, received_bytes: Mapping[str, int], failed: Mapping[str, int]) -> None:
        """What the downloads here have come to. received_bytes: by source. failed: by code."""
        self.downloads.set(running)
        for source, count in received_bytes.items():
            self.download_bytes.labels(source).set(count)
        for code, count in failed.items():
            self.downloads_failed.labels(code).set(count)

    def set_reasons(self, reasons: Iterable[tuple[str, str]]) -> None:
        """Replace what is wrong with this node: (code, level)."""
        self.health_reasons.clear()
        for code, level in reasons:
            self.health_reasons.labels(code, level).inc()

    def request_ended(self, outcome: str, num_prompt: int, *, failed: bool) -> None:
        """A request that entered here has ended: how generation stopped, or the code of its error."""
        self.requests_live.dec()
        self.requests.labels(outcome).inc()
        self.tokens.labels("prompt").inc(num_prompt)
        if failed:
            self.failed.labels(outcome).inc()

    def runner_started(self, instance: str) -> None:
        """A runner of an instance starts on this machine."""
        self.stage_starts.labels(instance).inc()
        if instance in self._started:
            self.stage_restarts.labels(instance).inc()
        self._started.add(instance)

    def group_formed(self, instance: str, stage: int, all_reduce_s: float) -> None:
        """A stage here is ready. all_reduce_s: 0 if it leads no tensor group."""
        if all_reduce_s:
            self.all_reduce.labels(instance, str(stage)).set(all_reduce_s)

    def stage_beat(self, instance: str, stage: int, beat: Heartbeat) -> None:
        """Take over the counters that a runner keeps for itself."""
        labels = (instance, str(stage))
        self.stage_frames.labels(*labels).set(beat.frames_in)
        self.stage_bytes_out.labels(*labels).set(beat.bytes_out)
        self.stage_memory.labels(*labels).set(beat.memory_bytes)
        self.stage_busy.labels(*labels).set(beat.busy_s)
        self.stage_sequences.labels(*labels).set(beat.sequences)
        self.queue_depth.labels(instance).set(beat.queued)
        self.running.labels(instance).set(beat.running)
        if beat.kv_pool_tokens:
            self.parked.labels(instance).set(beat.parked)
            self.evictions.labels(instance).set(beat.evictions)
            self.laps_saved.labels(instance).set(beat.laps_saved)
            self.shared_tokens.labels(instance).set(beat.shared_tokens)
            self.oldest_wait.labels(instance).set(beat.oldest_wait_s)
            self.kv_tokens.labels(instance, "used").set(beat.kv_tokens)
            self.kv_tokens.labels(instance, "free").set(max(0, beat.kv_pool_tokens - beat.kv_tokens))
            self._histograms.take(instance, beat)
        shares = self._shares.setdefault(labels, StageShares())
        shares.take(self._clock(), beat.busy_s, beat.sequences)
        self.stage_busy_ratio.labels(*labels).set(shares.busy)
        self.stage_bubble.labels(*labels).set(shares.bubble)

    def stage_gone(self, instance: str, stage: int) -> None:
        """A stage here has ended: its readings end, too."""
        of_stage = (self.stage_frames, self.stage_bytes_out, self.stage_memory, self.stage_busy, self.stage_sequences)
        for gauge in (*of_stage, self.stage_busy_ratio, self.stage_bubble, self.all_reduce):
            _drop(gauge, instance, str(stage))
        self._shares.pop((instance, str(stage)), None)
        self._histograms.drop(instance)
        of_driver = (self.queue_depth, self.running, self.parked, self.evictions, self.laps_saved, self.shared_tokens)
        for gauge in (*of_driver, self.oldest_wait):
            _drop(gauge, instance)
        for state in ("used", "free"):
            _drop(self.kv_tokens, instance, state)


def _drop(gauge: Gauge, *labels: str) -> None:
    with contextlib.suppress(KeyError):  # older releases of the client complain about labels that were never set
        gauge.remove(*labels)
