"""Traces that leave for a collector: their spans, both encodings, and what happens when the collector is in trouble."""

from __future__ import annotations

import asyncio
import ssl
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from exo_mesh.cli.client.child_node import free_port
from exo_mesh.domain.request import FrameTrace, SamplingParams, StageSpan
from exo_mesh.node.inspection.otlp import exporter as exporter_module
from exo_mesh.node.inspection.otlp.encoding import JSON, PROTOBUF, Origin, PeerName, encode
from exo_mesh.node.inspection.otlp.exporter import MAX_WAITING, CollectorTarget, TraceExporter
from exo_mesh.node.inspection.otlp.spans import MAX_SPANS, count_spans, spans_of
from exo_mesh.node.inspection.otlp.wiring import authority, checked
from exo_mesh.rings.serving.traces import RequestTrace, TraceStore
from exo_mesh.settings.config import ConfigError
from tests.security.test_api_tls import write_pair
from tests.support.nodes import a_request, until

support = pytest.importorskip("tests.support.collector", reason="opentelemetry-proto is missing: exo-mesh[otel]")

TRACE_ID, PARENT, OWN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7", "1112131415161718"
ORIGIN = Origin(
    PeerName("aaaaaaaa11", "studio", "1"),
    (PeerName("aaaaaaaa11", "studio", "1"), PeerName("bbbbbbbb22", "nas", "1")),
    attributes={"deployment.environment.name": "home"},
    address=("10.0.0.1", 52415),
)


def a_trace(request_id: str = "chatcmpl-1", laps: int = 3, outcome: str = "stop", legs: int = 1) -> RequestTrace:
    """Over two peers. The first lap is a prefill of 50 ms, the others take 10 ms."""
    request = replace(
        a_request(request_id),
        sampling=SamplingParams(temperature=0.5, top_k=7),
        trace_id=TRACE_ID,
        span_id=OWN,
        parent_span_id=PARENT,
        trace_state="vendor=1",
        names=(request_id, "req_7"),
    )
    trace = TraceStore(now=lambda: 1_800_000_000.0).open(request, "org/model", 3, entered_at=100.0)
    for number in range(legs):
        leg = trace.begin_leg("ring-1", ["aaaaaaaa", "bbbbbbbb"], 100.2 + number)
        stages = (StageSpan(0.0, 0.002), StageSpan(0.001, 0.005))
        leg.add([FrameTrace(0, True, 1, 3, 0.1, 0.05, stages)])
        leg.add([FrameTrace(step, False, 1, 1, 0.15 + step / 100, 0.01, stages) for step in range(1, laps)])
    trace.token(100.35)
    trace.end(outcome, 102.0)
    return trace


def test_the_spans_are_one_tree_below_the_callers_span() -> None:
    spans = spans_of(a_trace())
    by_id = {span.span_id: span for span in spans}
    assert len(by_id) == len(spans) == count_spans(a_trace())
    assert spans[0].parent_id == PARENT and spans[0].span_id == OWN, "the span that the reply has named"
    assert all(span.parent_id in by_id for span in spans[1:])
    parents = Counter((span.name, by_id[span.parent_id].name) for span in spans[1:])
    assert parents == {
        ("place", "chat org/model"): 1,
        ("queue", "chat org/model"): 1,
        ("ring", "chat org/model"): 1,
        ("prefill", "ring"): 1,
        ("decode", "ring"): 2,
        ("stage 0", "prefill"): 1,
        ("stage 1", "prefill"): 1,
        ("stage 0", "decode"): 2,
        ("stage 1", "decode"): 2,
    }
    for span in spans[1:]:
        above = by_id[span.parent_id]
        assert above.at_s - 1e-6 <= span.at_s <= span.until_s <= above.until_s + 1e-6, (span.name, above.name)


@pytest.mark.parametrize(("laps", "legs"), [(1, 1), (1000, 1), (400, 3), (200, 40)])
def test_a_long_answer_has_a_bounded_number_of_spans_and_all_of_its_sums(laps: int, legs: int) -> None:
    trace = a_trace(laps=laps, legs=legs)
    spans = spans_of(trace)
    assert len(spans) == count_spans(trace) <= MAX_SPANS + 10 * legs
    rings = [span for span in spans if span.name == "ring"]
    shown = Counter(span.name for span in spans)
    facts = rings[0].attributes
    assert facts["exo_mesh.laps.decode"] == laps - 1
    assert facts["exo_mesh.laps.not_shown"] == laps - (shown["prefill"] + shown["decode"]) / legs
    assert facts["exo_mesh.stages.compute_seconds"] == pytest.approx([0.002 * laps, 0.005 * laps])


@pytest.mark.parametrize("protocol", [JSON, PROTOBUF])
def test_the_official_schema_reads_both_encodings(protocol: str) -> None:
    message = support.decoded(encode([a_trace()], ORIGIN, protocol), is_json=protocol == JSON)
    found = {}
    for group in message.resource_spans:
        resource = support.attributes_of(group.resource)
        found[resource["exo_mesh.peer.name"]] = resource, list(group.scope_spans[0].spans)
    assert {name: len(spans) for name, (_, spans) in found.items()} == {"studio": 7, "nas": 6}
    resource, spans = found["studio"]
    assert resource["service.name"] == "exo-mesh" and resource["service.instance.id"] == "aaaaaaaa11"
    assert resource["deployment.environment.name"] == "home"
    root = spans[0]
    assert (root.trace_id.hex(), root.span_id.hex(), root.parent_span_id.hex()) == (TRACE_ID, OWN, PARENT)
    assert (root.name, root.kind, root.trace_state) == ("chat org/model", support.Span.SPAN_KIND_SERVER, "vendor=1")
    assert root.flags == 0x301 and spans[1].flags == 0x101, "its parent is another program's, theirs is ours"
    assert root.start_time_unix_nano == 1_800_000_000 * 10**9
    assert root.end_time_unix_nano - root.start_time_unix_nano == 2 * 10**9
    assert [event.name for event in root.events] == ["exo_mesh.first_token"]
    facts = support.attributes_of(root)
    expected: dict[str, Any] = {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "exo_mesh",
        "gen_ai.request.model": "org/model",
        "gen_ai.request.max_tokens": 12,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_k": 7,
        "gen_ai.response.id": "chatcmpl-1",
        "gen_ai.response.finish_reasons": ["stop"],
        "gen_ai.usage.input_tokens": 3,
        "gen_ai.usage.output_tokens": 1,
        "server.address": "10.0.0.1",
        "server.port": 52415,
    }
    assert facts.items() >= expected.items(), facts
    assert facts["gen_ai.response.time_to_first_chunk"] == pytest.approx(0.35)


def test_a_failed_request_says_so_and_a_cancelled_one_is_no_error() -> None:
    message = support.decoded(
        encode([a_trace(outcome="stage_lost"), a_trace("cmpl-2", outcome="cancelled")], ORIGIN, JSON), is_json=True
    )
    spans = [span for span in message.resource_spans[0].scope_spans[0].spans if span.kind == 2]
    assert [(span.name, span.status.code, span.status.message) for span in spans] == [
        ("chat org/model", support.Span().status.STATUS_CODE_ERROR, "stage_lost"),
        ("text_completion org/model", 0, ""),
    ]
    assert support.attributes_of(spans[0])["error.type"] == "stage_lost"


def adding_to(counted: Counter[str]) -> Callable[[str, int], None]:
    return lambda outcome, number: counted.update({outcome: number})


@asynccontextmanager
async def sending(target: CollectorTarget, counted: Counter[str]) -> AsyncIterator[TraceExporter]:
    """An exporter that runs; cancelled and closed at the end."""
    exporter = TraceExporter(target, lambda: ORIGIN, adding_to(counted), linger_s=0)
    task = asyncio.create_task(exporter.keep())
    try:
        yield exporter
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        await exporter.close(0.2)


@pytest.mark.parametrize("protocol", [JSON, PROTOBUF])
async def test_what_is_offered_arrives_with_the_headers(protocol: str) -> None:
    counted: Counter[str] = Counter()
    async with support.collector() as there:
        target = CollectorTarget(f"{there.url}/v1/traces", {"api-key": "s3cret"}, protocol)
        async with sending(target, counted) as exporter:
            exporter.offer(a_trace())
            exporter.offer(a_trace("chatcmpl-2"))
            await until(lambda: counted["sent"] == 26)
        assert there.headers[0]["api-key"] == "s3cret" and there.paths[0] == "/v1/traces"
        assert len(there.spans()) == 26
        assert "s3cret" not in repr(target) + str(exporter.describe())


async def test_a_busy_collector_gets_the_same_batch_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exporter_module, "FIRST_RETRY_S", 0.01)
    counted: Counter[str] = Counter()
    async with support.collector() as there:
        there.answers = [(503, {}), (429, {"Retry-After": "0"}), (502, {"Retry-After": "soon"})]
        async with sending(CollectorTarget(there.url), counted) as exporter:
            exporter.offer(a_trace())
            await until(lambda: counted["sent"])
        assert len(there.bodies) == 4 and len(set(there.bodies)) == 1
        assert counted == {"sent": 13} and exporter.describe()["error"] == ""


@pytest.mark.parametrize("status", [400, 401, 413, 500, 307])
async def test_a_batch_that_is_refused_is_counted_and_not_sent_again(status: int) -> None:
    counted: Counter[str] = Counter()
    async with support.collector() as there:
        there.answers = [(status, {"Location": "/elsewhere"})]
        async with sending(CollectorTarget(there.url), counted) as exporter:
            exporter.offer(a_trace())
            await until(lambda: counted["refused"])
            assert f"HTTP {status}" in exporter.describe()["error"]
            exporter.offer(a_trace())
            await until(lambda: counted["sent"])
        assert counted == {"refused": 13, "sent": 13} and len(there.bodies) == 2


@pytest.mark.parametrize("protocol", [JSON, PROTOBUF])
async def test_spans_that_are_refused_of_a_batch_are_counted(protocol: str) -> None:
    counted: Counter[str] = Counter()
    async with support.collector() as there:
        there.rejects = 4
        async with sending(CollectorTarget(there.url, protocol=protocol), counted) as exporter:
            exporter.offer(a_trace())
            await until(lambda: counted["refused"])
            assert counted == {"sent": 9, "refused": 4} and "too many" in exporter.describe()["error"]


async def test_with_a_dead_collector_the_queue_is_bounded_and_the_oldest_go() -> None:
    counted: Counter[str] = Counter()
    async with sending(CollectorTarget(f"http://127.0.0.1:{free_port()}/v1/traces"), counted) as exporter:
        for number in range(3 * MAX_WAITING):
            exporter.offer(a_trace(f"chatcmpl-{number}"))
        assert counted["queue_full"] == 13 * 2 * MAX_WAITING
        await until(lambda: exporter.describe()["error"])
        waiting = exporter.describe()["waiting"]
        assert waiting == 13 * MAX_WAITING
    assert counted["stopped"] == waiting, "what is left at the end is counted, too"


async def test_a_batch_that_cannot_be_sent_for_long_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exporter_module, "GIVE_UP_S", 0.1)
    monkeypatch.setattr(exporter_module, "FIRST_RETRY_S", 0.03)
    counted: Counter[str] = Counter()
    async with sending(CollectorTarget(f"http://127.0.0.1:{free_port()}"), counted) as exporter:
        exporter.offer(a_trace())
        await until(lambda: counted["unreachable"])
    assert counted == {"unreachable": 13}


async def test_what_waits_at_the_end_is_still_sent() -> None:
    counted: Counter[str] = Counter()
    async with support.collector() as there:
        exporter = TraceExporter(CollectorTarget(there.url), lambda: ORIGIN, adding_to(counted))
        exporter.offer(a_trace())
        await exporter.close()
        assert counted == {"sent": 13} == {"sent": len(there.spans())}


async def test_a_collector_with_a_certificate_of_the_operator(tmp_path: Path) -> None:
    certificate, key = write_pair(tmp_path / "tls", "localhost")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate, key)
    counted: Counter[str] = Counter()
    async with support.collector(context) as there:
        strict, trusting = CollectorTarget(there.url), CollectorTarget(there.url, tls=authority(certificate))
        async with sending(strict, Counter()) as exporter:
            exporter.offer(a_trace())
            await until(lambda: "CERTIFICATE_VERIFY_FAILED" in exporter.describe()["error"])
        async with sending(trusting, counted) as exporter:
            exporter.offer(a_trace())
            await until(lambda: counted["sent"])


def test_what_cannot_be_sent_or_trusted_is_said_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "no.pem").write_text("no certificate")
    for path in ("no.pem", "missing.pem"):
        with pytest.raises(ConfigError, match=f"--otlp-certificate .*{path}"):
            authority(tmp_path / path)
    for headers in ({"a b": "1"}, {"a": "1\n2"}, {"a": "\u20ac"}):
        with pytest.raises(ConfigError, match="--otlp-header"):
            checked(headers)
    assert checked({"Authorization": "Basic eA=="})
