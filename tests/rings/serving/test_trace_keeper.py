"""Traces outlive a restart, and no longer than they should."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path

import pytest
from msgspec.structs import replace

from exo_mesh.domain.request import FrameTrace, StageSpan
from exo_mesh.errors import TransportError
from exo_mesh.machine.disk import Disk
from exo_mesh.node.inspection.trace_formats import (
    MAX_JSON_BYTES,
    chrome_trace,
    trace_from_json,
    trace_stats,
    trace_to_json,
)
from exo_mesh.node.inspection.trace_keeper import TraceKeeper
from exo_mesh.rings.serving.traces import MAX_TRACES, RequestTrace, TraceStore
from tests.support.nodes import a_request, until


def ended(store: TraceStore, number: int) -> RequestTrace:
    request = dataclasses.replace(a_request(f"r{number}"), trace_id=f"t{number}", key_id="k", names=(f"n{number}",))
    trace = store.open(request, "m", 3, entered_at=100.0)
    leg = trace.begin_leg("i", ["one", "two"], 100.5)
    stages = (StageSpan(0.0, 0.010), StageSpan(0.004, 0.020))
    leg.frames = [FrameTrace(step, step == 0, 1, 1, 0.25 + step, 0.040, stages) for step in range(3)]
    for now in (101.0, 101.25, 102.0):
        trace.token(now)
    store.end(trace, "stop", 103.0)
    return trace


async def test_files_follow_the_store_over_restarts_and_by_age(tmp_path: Path) -> None:
    now, disk = [1000.0], Disk(tmp_path)
    store = TraceStore(lambda: now[0])
    store.open(dataclasses.replace(a_request("live"), trace_id="live"), "m", 3, 0.0)
    for number in range(MAX_TRACES + 3):
        ended(store, number)
        now[0] += 1
    keeper = TraceKeeper(store, tmp_path / "traces", disk, None)
    while await keeper.sync():
        pass
    assert len(list((tmp_path / "traces").iterdir())) == MAX_TRACES, "a running one has no file"
    (tmp_path / "traces" / "broken.json").write_text("{")

    later = TraceStore(lambda: now[0])
    ended(later, 999)
    keeping = asyncio.create_task(TraceKeeper(later, tmp_path / "traces", disk, 10.0).keep())
    await until(lambda: len(list((tmp_path / "traces").iterdir())) == 11)
    assert [trace.trace_id for trace in later.all()][:2] == ["t999", f"t{MAX_TRACES + 2}"], "newest first"
    assert len(later.all()) == 11, "those of the last ten seconds, and the new one"
    later.delete({"t999"})
    await until(lambda: len(list((tmp_path / "traces").iterdir())) == 10)
    keeping.cancel()
    await asyncio.gather(keeping, return_exceptions=True)


def test_a_trace_is_the_same_after_its_way_between_peers() -> None:
    trace = ended(TraceStore(lambda: 5.0), 1)
    copy = trace_from_json(trace_to_json(trace))
    assert chrome_trace(copy) == chrome_trace(trace) and trace_stats(copy) == trace_stats(trace)
    assert copy.is_called("n1") and copy.key_id == "k"
    wrong_type = trace_to_json(trace).replace(b'"r1"', b"7")
    for bad in (b"[]", b"{", b'{"trace_id": 1}', b" " * (MAX_JSON_BYTES + 1), wrong_type):
        with pytest.raises(TransportError):
            trace_from_json(bad)
    evil = trace_from_json(trace_to_json(replace(trace, model="\x1b[2Jm" + "x" * 5000)))
    assert evil.model.isprintable() and len(evil.model) <= 1024, "what a peer sends is safe to print"
    many = replace(trace, legs=trace.legs * 100)
    with pytest.raises(TransportError, match="more than 64 legs"):
        trace_from_json(trace_to_json(many))


def test_the_sums_of_a_trace() -> None:
    stats = trace_stats(ended(TraceStore(lambda: 5.0), 1))
    assert (stats["place_s"], stats["queue_s"], stats["ttft_s"]) == (0.5, 0.25, 1.0)
    assert stats["token_gap_s"] == {"count": 2, "total": 1.0, "mean": 0.5, "p50": 0.25, "p95": 0.75, "max": 0.75}
    one, two = stats["stages"]
    assert (one["peer"], one["prefill_s"]["count"], one["decode_s"]["count"]) == ("one", 1, 2)
    assert two["decode_s"]["total"] == 0.04 and two["wait_s"]["mean"] == 0.004
    assert one["hop_s"]["mean"] == two["hop_s"]["mean"] == 0.003, "6 ms of a lap, over two hops"
    assert stats["lap_s"]["decode"]["p95"] == 0.04
