"""What a node shows of its RKLLM boards."""

from __future__ import annotations

from exo_mesh.base.telemetry.metrics import Metrics


def value(metrics: Metrics, sample: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(f"exo_mesh_rkllm_{sample}", labels)


def test_a_server_is_up_or_down_as_the_last_look_found_it() -> None:
    metrics = Metrics()
    assert value(metrics, "server_up", server="localhost:8080") is None
    metrics.rkllm.note_servers("rkllm", {"localhost:8080": True, "board.lan:8080": False})
    assert [value(metrics, "server_up", server=f"{host}:8080") for host in ("localhost", "board.lan")] == [1, 0]
    metrics.rkllm.note_servers("rkllm", {"localhost:8080": False})
    assert [value(metrics, "server_up", server=f"{host}:8080") for host in ("localhost", "board.lan")] == [0, None]


def test_answers_and_loads_are_counted() -> None:
    metrics = Metrics()
    metrics.rkllm.note_answers("rkllm", 1, 4.0)
    metrics.rkllm.note_answers("rkllm", 0, 0.0)
    metrics.rkllm.note_answers("rkllm", 1, 40.0)
    metrics.rkllm.note_load("rkllm", 15.0)
    assert value(metrics, "inference_duration_seconds_count") == 2
    assert value(metrics, "inference_duration_seconds_sum") == 44
    assert value(metrics, "inference_duration_seconds_bucket", le="5.0") == 1
    assert value(metrics, "model_load_duration_seconds_bucket", le="20.0") == 1
    assert value(metrics, "model_load_duration_seconds_bucket", le="10.0") == 0


def test_the_figures_of_other_engines_are_not_those_of_boards() -> None:
    metrics = Metrics()
    metrics.rkllm.note_servers("rkllm", {"localhost:8080": True})
    metrics.rkllm.note_servers("openai", {})
    metrics.rkllm.note_answers("openai", 1, 1.0)
    metrics.rkllm.note_load("openai", 1.0)
    assert value(metrics, "server_up", server="localhost:8080") == 1
    assert value(metrics, "inference_duration_seconds_count") == 0
    assert value(metrics, "model_load_duration_seconds_count") == 0
