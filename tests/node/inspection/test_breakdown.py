"""The parts of a request's time add up to it, whatever the laps look like."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import astuple, replace

from exo_mesh.domain.request import FrameTrace, StageSpan
from exo_mesh.node.inspection.breakdown import HandlerTimes, RequestParts, parts_of
from exo_mesh.rings.serving.traces import RequestTrace, TraceStore
from tests.support.nodes import a_request

TIMES = HandlerTimes(began=99.0, asked=99.1, prepared=99.6, ended=120.0, template_s=0.2, tokenizer_s=0.1)


def a_trace() -> RequestTrace:
    return TraceStore().open(dataclasses.replace(a_request("r"), trace_id="t"), "m", 3, entered_at=100.0)


def lap(sent_s: float, lap_s: float, *stages: tuple[float, float], is_prefill: bool = False) -> FrameTrace:
    return FrameTrace(1, is_prefill, 1, 1, sent_s, lap_s, tuple(StageSpan(*stage) for stage in stages))


def total(parts: RequestParts) -> float:
    return float(sum(astuple(parts)))


def test_each_second_of_a_request_is_in_one_part() -> None:
    trace = a_trace()
    leg = trace.begin_leg("i", ["one", "two"], 101.0)
    leg.add([lap(0.5, 1.0, (0.1, 0.2), (0.0, 0.3), is_prefill=True), lap(1.6, 0.5, (0.0, 0.1), (0.1, 0.1))])
    trace.token(103.3)
    trace.end("stop", 103.5)
    parts = parts_of(trace, TIMES)
    assert (parts.place_s, parts.queue_s) == (1.0, 0.5)
    assert parts.prefill_s == pytest.approx(0.5) and parts.decode_s == pytest.approx(0.2)
    assert parts.wait_s == pytest.approx(0.2) and parts.hops_s == pytest.approx(0.4 + 0.2)
    assert parts.driver_s == pytest.approx(0.1 + 0.2), "between the laps, and from the last one to its token"
    assert parts.model_s == pytest.approx(0.2) and parts.http_s == pytest.approx(0.1 + 0.4 + 16.7)
    assert total(parts) == pytest.approx(TIMES.ended - TIMES.began)


def test_chunks_that_are_on_their_way_together_count_once() -> None:
    trace = a_trace()
    leg = trace.begin_leg("i", ["one", "two"], 100.0)
    leg.add([lap(0.0, 2.0, (0.0, 1.0), (0.0, 1.0), is_prefill=True)])
    leg.add([lap(1.0, 2.0, (0.0, 1.0), (0.0, 1.0), is_prefill=True)])
    trace.token(103.0)
    assert parts_of(trace, TIMES).prefill_s == pytest.approx(3.0)


def test_a_request_without_laps_and_one_of_two_rings_add_up_too() -> None:
    silent, moved = a_trace(), a_trace()
    silent.begin_leg("i", ["one"], 104.0)
    for began in (101.0, 105.0):
        moved.begin_leg("i", ["one"], began).add([lap(0.1, 1.0, (0.0, 0.9))])
    moved.token(110.0)
    for trace in (silent, moved):
        assert total(parts_of(trace, TIMES)) == pytest.approx(TIMES.ended - TIMES.began)
    assert parts_of(moved, TIMES).place_s == pytest.approx(1.0 + 2.9)


gaps = st.floats(-1.0, 1.0)
spans = st.tuples(st.floats(0, 0.2), st.floats(0, 0.2))


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(gaps, st.floats(0, 2.0), st.lists(spans, max_size=3), st.booleans()), max_size=8))
def test_parts_of_any_laps_add_up_and_none_is_negative(
    laps: list[tuple[float, float, list[tuple[float, float]], bool]],
) -> None:
    trace = a_trace()
    leg = trace.begin_leg("i", ["one"], 100.5)
    sent = end = 0.0
    for gap, lap_s, stages, is_prefill in laps:
        sent = max(sent, end + gap)
        end = max(end, sent + lap_s)  # frames do not overtake each other
        leg.add([lap(sent, end - sent, *stages, is_prefill=is_prefill)])
    trace.token(100.5 + end)
    parts = parts_of(trace, replace(TIMES, ended=200.0))
    assert total(parts) == pytest.approx(101.0)
    assert min(astuple(parts)) >= -1e-9
