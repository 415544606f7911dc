"""What a node shows to Prometheus: the documented names, and figures made of the heartbeats of its stages."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from exo_mesh.base.telemetry.durations import LAP_BOUNDS_S, Durations
from exo_mesh.base.telemetry.exposition import metric_of
from exo_mesh.base.telemetry.families import Infos, MetricFamily
from exo_mesh.base.telemetry.metrics import ENDS, MAX_MODELS, MODEL_KEPT_S, SWEEP_EVERY_S, Metrics
from exo_mesh.base.telemetry.stage_metrics import ModelFacts, StageSeat
from exo_mesh.domain.runner.heartbeat import Heartbeat
from exo_mesh.domain.runner.prefix_figures import PrefixFigures
from exo_mesh.rings.hosting.runner_exit import End
from exo_mesh.rings.hosting.stage_meter import StageMeter

DOCS = Path(__file__).resolve().parents[3] / "docs"
SEAT = StageSeat("m", "i", 3, (12, 16), "dummy", epoch=2, next_peer="peer-b")
FACTS = ModelFacts("llama", "bfloat16", 16)


def families() -> list[MetricFamily]:  # type: ignore[type-arg]
    return Metrics().families


def kind_of(family: MetricFamily) -> str:  # type: ignore[type-arg]
    return "info" if isinstance(family, Infos) else metric_of(family).type


def test_the_documentation_has_every_metric_and_no_other() -> None:
    row = r"^\| `(exo_mesh_\w+)` \| (\w+) \|(.*?)\| (.*?) \|"
    rows = re.findall(row, (DOCS / "reference" / "metrics.md").read_text(), re.MULTILINE)
    documented = {name: (kind, tuple(re.findall(r"`(\w+)`", labels))) for name, kind, labels, _ in rows}
    shown = {family.name: (kind_of(family), family.label_names) for family in families()}
    assert documented == shown, "docs/reference/metrics.md: the tables of metrics"
    registered = {family.name for family in Metrics().registry.collect() if family.name.startswith("exo_mesh_")}
    assert registered == {re.sub("_(total|info)$", "", name) for name in shown}
    for name, _, _, unit in rows:
        for suffix, word in (("_seconds", "seconds"), ("_bytes", "bytes"), ("_ratio", "ratio")):
            assert (name.removesuffix("_total").endswith(suffix)) == (unit == word), f"{name} is measured in {unit}"


def test_names_follow_the_conventions_of_prometheus() -> None:
    for family in families():
        kind = kind_of(family)
        assert family.name.endswith("_total") == (kind == "counter"), family.name
        assert family.name.endswith("_info") == (kind == "info"), family.name
        assert not {"instance", "job", "node"} & {*family.label_names} or kind == "info", f"{family.name}: a target's"


class Clock:
    """Moves by hand."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


class Node:
    """Metrics of a node with one stage, which is a driver; `beat` is half a second later."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.metrics = Metrics(self.clock)
        self.meter = StageMeter(self.metrics.stages, FACTS)
        self.busy_s = 0.0

    def beat(self, busy_s: float, sequences: int = 1, seat: StageSeat = SEAT, **fields: object) -> None:
        self.clock.now += 0.5
        self.busy_s += busy_s
        beat = Heartbeat(busy_s=self.busy_s, sequences=sequences, kv_pool_tokens=100, **fields)  # type: ignore[arg-type]
        self.meter.take(seat, beat)

    def restart(self) -> None:
        self.meter.end()
        self.meter, self.busy_s = StageMeter(self.metrics.stages, FACTS), 0.0

    def value(self, sample: str, **labels: str) -> float | None:
        labels = {"model": "m", "instance_id": "i", **labels}
        return self.metrics.registry.get_sample_value(f"exo_mesh_{sample}", labels)

    def sweep(self, instances: dict[str, str], peers: tuple[str, ...] = ()) -> None:
        self.clock.now += SWEEP_EVERY_S
        self.metrics.tick(instances, peers)


def test_shares_are_those_of_the_last_ten_seconds() -> None:
    node = Node()
    for _ in range(40):
        node.beat(0.5)
    assert (node.value("stage_busy_ratio", stage="3"), node.value("stage_bubble_ratio", stage="3")) == (1.0, 0.0)
    for _ in range(20):
        node.beat(0.2)
    assert node.value("stage_busy_ratio", stage="3") == pytest.approx(0.4)
    assert node.value("stage_bubble_ratio", stage="3") == pytest.approx(0.6)


def test_a_stage_that_holds_nothing_has_no_bubble() -> None:
    node = Node()
    for _ in range(10):
        node.beat(0.4)
    for _ in range(10):
        node.beat(0.0, sequences=0)
    assert node.value("stage_busy_ratio", stage="3") == pytest.approx(9 * 0.4 / (19 * 0.5))
    assert node.value("stage_bubble_ratio", stage="3") == pytest.approx(0.2), "of the time at work"
    for _ in range(21):
        node.beat(0.0, sequences=0)
    assert node.value("stage_bubble_ratio", stage="3") == 0.0


def test_a_counter_by_result_counts_each_result_for_itself() -> None:
    node = Node()
    for _ in range(3):
        figures = PrefixFigures(
            hits=5, misses=3, has_disk=True, disk_writes=4, disk_errors=1, disk_hits=2, disk_misses=1
        )
        node.beat(0.1, prefix=figures)
    assert [node.value("prefix_lookups_total", result=result) for result in ("hit", "miss")] == [5.0, 3.0]
    assert [node.value("prefix_disk_reads_total", result=result) for result in ("hit", "lost")] == [2.0, 1.0]
    writes = [node.value("prefix_disk_writes_total", stage="3", result=result) for result in ("ok", "error")]
    assert writes == [4.0, 1.0]


def test_laps_are_a_histogram() -> None:
    node, laps = Node(), Durations(LAP_BOUNDS_S)
    for seconds in (0.0004, 0.0005, 0.003, 0.3, 60.0):
        laps.add(seconds)
    node.beat(0.1, laps_took=laps.snapshot())
    got = {bound: node.value("lap_seconds_bucket", le=bound) for bound in ("0.0005", "0.005", "0.5", "10.0", "+Inf")}
    assert got == {"0.0005": 2, "0.005": 3, "0.5": 4, "10.0": 4, "+Inf": 5}
    assert node.value("lap_seconds_sum") == pytest.approx(60.3039)
    assert node.value("queue_wait_seconds_count") == 0
    parsed = text_string_to_metric_families(generate_latest(node.metrics.registry).decode())
    assert {family.name: family.type for family in parsed}["exo_mesh_lap_seconds"] == "histogram"


def test_counters_go_on_rising_over_a_restart_of_the_runner_and_gauges_go_with_it() -> None:
    node, laps = Node(), Durations(LAP_BOUNDS_S)
    laps.add(0.1)
    laps_took = laps.snapshot()
    node.beat(0.1, frames_in=7, frames_out=6, bytes_out=1000, tokens=5, laps_took=laps_took)
    node.beat(0.1, frames_in=10, frames_out=9, bytes_out=1500, tokens=8, laps_took=laps_took)
    node.restart()
    assert node.value("stage_memory_bytes", stage="3", rank="0") is None
    assert node.value("stage_frames_total", stage="3") == 10
    node.beat(0.2, frames_in=4, frames_out=3, bytes_out=300, tokens=2, laps_took=laps_took)
    assert (node.value("stage_frames_total", stage="3"), node.value("driver_tokens_total")) == (14, 10)
    assert node.value("stage_busy_seconds_total", stage="3") == pytest.approx(0.4)
    assert node.value("lap_seconds_count") == 2
    assert node.value("hop_sent_bytes_total", stage="3", peer="peer-b") == 1800


def test_a_runner_that_goes_on_by_another_plan_is_not_counted_twice() -> None:
    node = Node()
    node.beat(0.1, frames_in=7)
    moved = StageSeat("m", "i", 1, (12, 16), "dummy", epoch=3)
    node.beat(0.1, frames_in=9, seat=moved)
    counted = node.value("stage_frames_total", stage="3"), node.value("stage_frames_total", stage="1")
    assert (counted, node.value("plan_epoch")) == ((7, 2), 3)
    assert (node.value("stage_layers", stage="3"), node.value("stage_layers", stage="1")) == (None, 4)


def test_the_speed_of_prefill_is_tokens_by_the_time_spent_on_them() -> None:
    node = Node()
    for tokens, seconds in ((100, 1.0), (100, 1.0), (400, 2.5)):
        node.beat(0.1, prefill_tokens=tokens, prefill_s=seconds)
    assert node.value("prefill_tokens_per_second", stage="3") == pytest.approx(200)
    assert node.value("prefill_tokens_total", stage="3") == 400


def test_a_rank_shows_its_memory_and_the_all_reduces_of_a_step() -> None:
    node = Node()
    rank = StageSeat("m", "i", 0, (0, 16), "mlx", rank=1)
    node.beat(0.1, seat=rank, memory_bytes=5, all_reduce_s=0.001, step_all_reduces=32)
    assert node.value("stage_memory_bytes", stage="0", rank="1") == 5
    assert node.value("step_all_reduce_seconds", stage="0", rank="1") == pytest.approx(0.032)


def test_instances_models_and_peers_that_are_gone_disappear() -> None:
    node = Node()
    node.beat(0.1, frames_in=7)
    node.metrics.set_round_trips({"b": 0.1})
    node.meter.end()
    node.sweep({"i": "m"})
    assert node.value("stage_frames_total", stage="3") == 7, "the mesh still has the instance"
    node.metrics.runner_ended("m", "crashed")
    node.sweep({})
    ended = {"model": "m", "end": "crashed"}
    read = node.metrics.registry.get_sample_value
    assert node.value("stage_frames_total", stage="3") is None
    assert read("exo_mesh_runner_ends_total", ended) == 1, "the model was in use a moment ago"
    assert read("exo_mesh_peer_rtt_seconds", {"peer": "b"}) is None
    node.clock.now += MODEL_KEPT_S
    node.sweep({})
    assert read("exo_mesh_runner_ends_total", ended) is None


def test_a_flood_of_models_leaves_a_bounded_number_of_series() -> None:
    node = Node()
    open_request = node.metrics.requests.enter("old")
    for number in range(3 * MAX_MODELS):
        node.metrics.requests.enter(f"m{number}").ended("stop", 1, 0.1, is_error=False)
    node.sweep({})
    shown = {model for (model,), _ in node.metrics.requests.latency.series()}
    assert len(shown) <= MAX_MODELS + 1
    open_request.ended("stop", 1, 0.1, is_error=False)
    assert node.metrics.registry.get_sample_value("exo_mesh_requests_in_progress", {"model": "old"}) == 0


def test_requests_and_tokens_are_counted_by_model_and_by_how_they_ended() -> None:
    metrics = Metrics()
    for outcome, failed in (("stop", False), ("cancelled", False), ("overloaded", True), ("overloaded", True)):
        meter = metrics.requests.enter("m")
        meter.first_token(0.2)
        meter.next_token(0.01)
        meter.ended(outcome, 5, 0.4, is_error=failed)

    def value(sample: str, **labels: str) -> float | None:
        return metrics.registry.get_sample_value(f"exo_mesh_{sample}", {"model": "m", **labels})

    ends = {status: value("requests_total", status=status) for status in ("stop", "length", "cancelled", "error")}
    assert ends == {"stop": 1, "length": 0, "cancelled": 1, "error": 2}
    assert (value("errors_total", type="overloaded"), value("errors_total", type="cancelled")) == (2, None)
    assert (value("requests_in_progress"), value("prompt_tokens_total"), value("tokens_generated_total")) == (0, 20, 8)
    assert (value("request_latency_seconds_count"), value("first_token_latency_seconds_count")) == (4, 4)
    assert value("inter_token_latency_seconds_bucket", le="0.01") == 4


def test_tokens_per_second_are_those_of_the_last_ten_seconds() -> None:
    clock = Clock()
    metrics = Metrics(clock)
    meter = metrics.requests.enter("m")
    for second in range(30):
        for _ in range(4 if second < 15 else 2):
            meter.next_token(0.1)
        clock.now += 1
        metrics.tick({}, ())
    rate = {"model": "m"}
    assert metrics.registry.get_sample_value("exo_mesh_tokens_per_second", rate) == pytest.approx(2)
    for _ in range(11):
        clock.now += 1
        metrics.tick({}, ())
    assert metrics.registry.get_sample_value("exo_mesh_tokens_per_second", rate) == 0


def test_rare_events_of_a_model_begin_at_zero_so_that_the_first_counts() -> None:
    assert {*ENDS} == {end.value for end in End}
    metrics = Metrics()
    metrics.placed("m", "ready")
    value = metrics.registry.get_sample_value
    assert value("exo_mesh_runner_ends_total", {"model": "m", "end": "crashed"}) == 0
    loss = {"model": "m", "cause": "stage_lost", "outcome": "ready"}
    assert value("exo_mesh_recoveries_total", loss) == 0
    metrics.recovered("m", "stage_lost", trouble_s=1, took_s=2, loaded_bytes=3)
    assert value("exo_mesh_recoveries_total", loss) == 1
