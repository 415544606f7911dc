"""Measured speeds of engines: which engine comes first, and what a ring of them is predicted to do."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from exo_mesh.domain.engine_speed import (
    ANSWER_TOKENS,
    FRAME_S,
    EngineSpeed,
    ForwardCost,
    fastest_first,
    predict,
    speed_of,
)

SPEED = EngineSpeed(ForwardCost(0.001, 0.002, 0.004), ForwardCost(0.001, 0.003, 0.005), ForwardCost(0, 0.01, 0), 64)


def test_a_forward_pass_costs_itself_its_layers_and_the_head_of_the_last_stage() -> None:
    assert SPEED.one.of(10, is_last=True) == pytest.approx(0.025)
    assert SPEED.one.of(10, is_last=False) == pytest.approx(0.021)
    assert SPEED.prompt_s(10, is_last=True) == pytest.approx(0.2), "128 tokens are two chunks of 64"
    assert SPEED.request_s(10) == pytest.approx(0.2 + ANSWER_TOKENS * 0.025)


def test_the_speed_per_gigabyte_is_of_one_sequence_or_of_eight_for_throughput() -> None:
    assert SPEED.s_per_gb(10, 500_000_000, "latency") == pytest.approx(0.05)
    assert SPEED.s_per_gb(10, 500_000_000, "throughput") == pytest.approx(0.072)


@pytest.mark.parametrize(
    ("took", "expected"),
    [
        ({"a": 1.0, "b": 0.5, "c": 0.2}, "cba"),
        ({"a": 1.0, "b": 0.9, "c": 2.0}, "abc"),  # 10 % are within the noise
        ({"a": None, "b": 2.0, "c": 1.0}, "cba"),  # what cannot be measured comes last
        ({"a": None, "b": None, "c": None}, "abc"),
        ({"a": 1.0, "b": 0.1}, "abc"),  # c was not measured
        ({}, "abc"),
    ],
)
def test_a_clearly_faster_engine_comes_before_a_preferred_one(took: dict[str, float | None], expected: str) -> None:
    assert "".join(fastest_first("abc", took)) == expected


def test_a_ring_is_predicted_from_its_stages_and_hops() -> None:
    alone = predict([(SPEED, 10)], 0.0)
    assert alone.tokens_per_s == pytest.approx(1 / (0.025 + FRAME_S))
    assert alone.ttft_s == pytest.approx(0.2 + 0.025 + FRAME_S), "the last token of a prompt is a step of its own"
    ring = predict([(SPEED, 6), (SPEED, 4)], 0.01)
    assert ring.tokens_per_s == pytest.approx(1 / (0.026 + 2 * FRAME_S + 0.01)), "the pass itself counts twice"
    assert ring.ttft_s == pytest.approx(0.2 + 0.013 + 2 * FRAME_S + 0.01), "that step follows the prompt stage by stage"


def test_figures_that_cannot_be_are_recognised() -> None:
    assert SPEED.is_valid
    for one in (ForwardCost(-1, 1, 1), ForwardCost(0, 0, 1), ForwardCost(0, float("nan"), 0), ForwardCost(0, 1e9, 0)):
        assert not replace(SPEED, one=one).is_valid
    assert not replace(SPEED, chunk_tokens=0).is_valid


def test_a_speed_is_found_by_the_beginning_of_the_digest() -> None:
    speeds = (("d" * 32, (("numpy", SPEED),)),)
    assert speed_of(speeds, "d" * 64, "numpy") is SPEED
    assert speed_of(speeds, "d" * 64, "torch") is speed_of(speeds, "e" * 64, "numpy") is None
