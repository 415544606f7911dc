"""What is kept of a traced request, and how it is shown."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from exo_mesh.domain.request import FrameTrace, StageSpan
from exo_mesh.node.inspection.trace_formats import chrome_trace
from exo_mesh.rings.placing.spec import InstanceSpec
from exo_mesh.rings.serving.traces import FIRST_LAPS, LAST_LAPS, MAX_TOKENS, MAX_TRACES, TraceStore
from tests.support.nodes import MODEL, a_request, mesh, tokens, until


def test_the_store_is_bounded_and_finds_by_either_id() -> None:
    store = TraceStore(now=lambda: 5.0)
    for number in range(3 * MAX_TRACES):
        store.open(replace(a_request(f"r{number}"), trace_id=f"t{number}"), "m", 3, 0.0)
    assert len(store.all()) == MAX_TRACES
    newest = store.all()[0]
    assert newest is store.find(newest.trace_id) is store.find(newest.request_id)
    assert store.find("t0") is None
    for _ in range(2 * MAX_TOKENS):
        newest.token(1.0)
    assert len(newest.tokens_s) == MAX_TOKENS


def test_requests_that_share_a_trace_id_as_those_of_one_agent_do_are_all_kept() -> None:
    ended: list[str] = []
    store = TraceStore(on_end=lambda trace: ended.append(trace.request_id))
    for number in range(3):
        trace = store.open(replace(a_request(f"r{number}"), trace_id="t"), "m", 3, 0.0)
        store.end(trace, "stop", 1.0)
    assert [trace.request_id for trace in store.all()] == ["r2", "r1", "r0"] and ended == ["r0", "r1", "r2"]
    newest = store.find("t")
    assert newest is not None and newest.request_id == "r2"
    assert store.delete({"t"}) == 3


def test_the_first_and_the_last_laps_of_a_long_answer_are_kept() -> None:
    leg = TraceStore().open(replace(a_request("r"), trace_id="t"), "m", 3, 0.0).begin_leg("i", ["one"], 0.0)
    for step in range(0, 5000, 16):
        leg.add([FrameTrace(step + more, False, 1, 1, 0.0, 0.0, ()) for more in range(16)])
    steps = [frame.step for frame in leg.frames]
    assert len(steps) == FIRST_LAPS + LAST_LAPS
    assert (steps[0], steps[FIRST_LAPS - 1], steps[-1]) == (0, FIRST_LAPS - 1, 5007)


def test_a_lap_becomes_spans_that_add_up_to_it() -> None:
    trace = TraceStore().open(replace(a_request("r"), trace_id="t"), "m", 3, entered_at=100.0)
    leg = trace.begin_leg("i", ["one", "two"], 101.0)
    stages = (StageSpan(0.0, 0.010), StageSpan(0.004, 0.020))
    leg.add([FrameTrace(7, False, 2, 2, sent_s=0.5, lap_s=0.040, stages=stages)])
    trace.token(101.54)
    trace.end("stop", 102.0)
    shown = chrome_trace(trace)
    spans = {(e["tid"], e["cat"]): (e["ts"], e["dur"]) for e in shown["traceEvents"] if e["ph"] == "X"}
    # two hops of 3 ms are what is left of 40 ms after 10 + 4 + 20
    assert spans[1, "compute"] == (1_503_000.0, 10_000.0)
    assert spans[2, "wait"] == (1_516_000.0, 4_000.0)
    assert spans[2, "compute"] == (1_520_000.0, 20_000.0), "and it ends when the lap does"
    assert spans[0, "request"] == (0.0, 2_000_000.0)
    assert shown["otherData"]["outcome"] == "stop" and shown["otherData"]["output_tokens"] == 1


async def test_a_request_over_two_peers_can_be_seen_hop_by_hop(tmp_path: Path) -> None:
    async with mesh(tmp_path, 2, engine_options={"cost_ms": "1"}, open_admin=True) as nodes:
        await nodes[0].instances.create(InstanceSpec(MODEL, min_peers=2))
        await until(lambda: [one.state for one in nodes[1].observation.state().view.instances] == ["ready"])
        await tokens(nodes[1], a_request("plain"))
        await tokens(nodes[1], replace(a_request("traced"), trace_id="ab" * 16))
        assert [trace["request_id"] for trace in nodes[1].inspection.traces()] == ["traced"]
        assert nodes[0].inspection.traces() == []
        found = await nodes[0].inspection.trace("traced")
    assert found is not None, "any peer shows it"
    shown = chrome_trace(found)
    decodes = [e for e in shown["traceEvents"] if e["ph"] == "X" and e["name"].startswith("decode")]
    assert [e["tid"] for e in decodes] == [1, 2] * 11, "one stage, then the other; the first token came with the prompt"
    assert all(e["dur"] >= 1000 for e in decodes) and [e["ts"] for e in decodes] == sorted(e["ts"] for e in decodes)
    request = next(e for e in shown["traceEvents"] if e.get("cat") == "request")
    assert decodes[-1]["ts"] + decodes[-1]["dur"] <= request["dur"] * 1.001
