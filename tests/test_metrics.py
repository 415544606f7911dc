"""What a node shows to Prometheus: the documented names, and figures made of the heartbeats of its stages."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from exo_mesh.proto.runner_pb2 import Heartbeat
from exo_mesh.telemetry.durations import LAP_BOUNDS_S, Durations
from exo_mesh.telemetry.metrics import Metrics

DOCS = Path(__file__).resolve().parents[1] / "docs"


def test_the_documentation_has_every_metric_and_no_other() -> None:
    table = (DOCS / "operations.md").read_text()
    documented = set(re.findall(r"^\| `(exo_mesh_\w+)` \|", table, re.MULTILINE))
    shown = set()
    for family in Metrics().registry.collect():
        shown.add(f"{family.name}_total" if family.type == "counter" else family.name)
    assert documented == shown, "docs/operations.md: the table of metrics"


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
        self.busy_s = 0.0

    def beat(self, busy_s: float, sequences: int = 1, **fields: object) -> None:
        self.clock.now += 0.5
        self.busy_s += busy_s
        told = Heartbeat(busy_s=self.busy_s, sequences=sequences, kv_pool_tokens=100, **fields)  # type: ignore[arg-type]
        self.metrics.stage_beat("i", 3, told)

    def value(self, sample: str, **labels: str) -> float | None:
        found = self.metrics.registry.get_sample_value(f"exo_mesh_{sample}", {"instance": "i", **labels})
        return found


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


def test_laps_are_a_histogram_that_goes_when_the_stage_goes() -> None:
    node, laps = Node(), Durations(LAP_BOUNDS_S)
    for seconds in (0.0004, 0.0005, 0.003, 0.3, 60.0):
        laps.add(seconds)
    node.beat(0.1, laps_took={"counts": laps.counts, "sum_s": laps.sum_s})
    got = {bound: node.value("lap_seconds_bucket", le=bound) for bound in ("0.0005", "0.005", "0.5", "10.0", "+Inf")}
    assert got == {"0.0005": 2, "0.005": 3, "0.5": 4, "10.0": 4, "+Inf": 5}
    assert node.value("lap_seconds_sum") == pytest.approx(60.3039)
    assert node.value("queue_wait_seconds_count") == 0
    families = text_string_to_metric_families(generate_latest(node.metrics.registry).decode())
    assert {family.name: family.type for family in families}["exo_mesh_lap_seconds"] == "histogram"
    node.metrics.stage_gone("i", 3)
    assert node.value("lap_seconds_count") is None and node.value("stage_busy_ratio", stage="3") is None


def test_what_failed_is_counted_by_its_code_and_what_was_cancelled_is_not() -> None:
    metrics = Metrics()
    for outcome, failed in (("stop", False), ("cancelled", False), ("overloaded", True), ("overloaded", True)):
        metrics.requests_live.inc()
        metrics.request_ended(outcome, 5, failed=failed)
    value = metrics.registry.get_sample_value
    assert value("exo_mesh_requests_failed_total", {"code": "overloaded"}) == 2
    assert value("exo_mesh_requests_failed_total", {"code": "cancelled"}) is None
    assert (value("exo_mesh_requests_running"), value("exo_mesh_tokens_total", {"kind": "prompt"})) == (0, 20)


def test_downloads_are_shown_by_source_and_by_code() -> None:
    metrics = Metrics()
    metrics.set_downloads(2, {"hub": 5, "peers": 7}, {"fetch_failed": 1})
    value = metrics.registry.get_sample_value
    assert value("exo_mesh_downloads_running") == 2
    assert value("exo_mesh_download_received_bytes_total", {"source": "peers"}) == 7
    assert value("exo_mesh_downloads_failed_total", {"code": "fetch_failed"}) == 1
