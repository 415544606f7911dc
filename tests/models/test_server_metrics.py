"""Reports of model servers become the metric of the boards."""

from __future__ import annotations

from exo_mesh.base.telemetry.metrics import Metrics
from exo_mesh.domain.whole.served import ServerReport
from exo_mesh.models.server_metrics import shown_in


def up(metrics: Metrics, server: str) -> float | None:
    return metrics.registry.get_sample_value("exo_mesh_rkllm_server_up", {"server": server})


def test_each_look_replaces_what_the_one_before_found() -> None:
    metrics = Metrics()
    note = shown_in(metrics.rkllm)
    note("rkllm", [ServerReport("localhost:8080", True), ServerReport("", False, error="port=x is not a port")])
    note("openai", [ServerReport("localhost:8000", True)])
    assert (up(metrics, "localhost:8080"), up(metrics, ""), up(metrics, "localhost:8000")) == (1, None, None)
    note("rkllm", [ServerReport("localhost:8080", False, error="gone")])
    assert up(metrics, "localhost:8080") == 0
    note("rkllm", [])
    assert up(metrics, "localhost:8080") is None
