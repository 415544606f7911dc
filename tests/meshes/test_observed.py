"""Real nodes as an operator watches them: traces in a collector, lines in their logs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.support.nodes import until
from tests.support.peers import Peer, chat_body, mesh
from tests.support.processes import eventually

support = pytest.importorskip("tests.support.collector", reason="opentelemetry-proto is missing: exo-mesh[otel]")

TRACE_ID, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SECRET_QUESTION = "Count from 7 to 20."


def events(peer: Peer) -> list[dict[str, Any]]:
    return [json.loads(line) for line in peer.log.splitlines() if line.startswith("{")]


@pytest.mark.extended
async def test_a_request_over_two_nodes_is_one_trace_and_the_mesh_logs_as_it_is_told(tmp_path: Path) -> None:
    async with support.collector() as there:
        flags = ["--otlp-endpoint", there.url, "--otlp-header", "api-key=s3cret", "--engine-option", "cost_ms=1"]
        with mesh(tmp_path, [[*flags, "--log-file", "logs/node.jsonl"], flags], engine="dummy") as peers:
            entry, other = peers
            switch_levels(entry, other)
            entry.place(min_peers=2)
            headers = {"traceparent": f"00-{TRACE_ID}-{PARENT}-01", "tracestate": "vendor=1"}
            async with aiohttp.ClientSession() as http:
                body = chat_body(SECRET_QUESTION, max_tokens=8)
                async with http.post(f"{entry.url}/v1/chat/completions", json=body, headers=headers) as reply:
                    answer = await reply.json()
                    root_id = reply.headers["traceresponse"].split("-")[2]
            await until(there.spans)
            await until(lambda: entry.api.get("/v1/tracing")["export"]["sent"] == len(there.spans()))
            look_at_log(entry, tmp_path / "peer-0" / "logs" / "node.jsonl")
    spans = there.spans()
    assert {span.trace_id.hex() for _, span in spans} == {TRACE_ID}
    root = next(span for _, span in spans if span.span_id.hex() == root_id)
    assert (root.parent_span_id.hex(), root.trace_state) == (PARENT, "vendor=1")
    ids = {span.span_id for _, span in spans}
    assert all(span.parent_span_id in ids for _, span in spans if span is not root)
    of_peers = {resource["service.instance.id"] for resource, _ in spans}
    assert of_peers == {entry.id, other.id}, "each node's work is under its own name"
    stages = {span.name: resource["exo_mesh.peer.name"] for resource, span in spans if span.name.startswith("stage")}
    assert set(stages) == {"stage 0", "stage 1"} and set(stages.values()) == {"peer-0", "peer-1"}
    facts = support.attributes_of(root)
    assert facts["gen_ai.usage.output_tokens"] == answer["usage"]["completion_tokens"]
    assert facts["server.port"] == int(entry.url.rpartition(":")[2])
    sent, text = b"".join(there.bodies), answer["choices"][0]["message"]["content"]
    assert b"Count" not in sent and text.encode() not in sent, "no prompt and no answer"
    assert there.headers[0]["api-key"] == "s3cret" and "s3cret" not in entry.log


def switch_levels(one: Peer, other: Peer) -> None:
    """For the mesh, for one node, and back; at the end the first node logs at level debug."""

    def levels() -> list[str]:
        return [peer.api.get("/v1/logging")["level"] for peer in (one, other)]

    assert levels() == ["info", "info"]
    one.api.put("/config", {"log_level": "debug"})
    assert eventually(lambda: levels() == ["debug", "debug"], 5)
    other.api.put("/v1/logging", {"level": "error"})
    assert levels() == ["debug", "error"]
    other.api.put("/config", {"log_level": None})
    assert eventually(lambda: levels() == ["info", "error"], 5)
    one.api.put("/v1/logging", {"level": "debug"})


def look_at_log(entry: Peer, file: Path) -> None:
    """What the start and a traced request have left in it."""
    said = events(entry)
    ready = next(one for one in said if one.get("event") == "ready")
    assert ready["health_url"] == f"{entry.url}/health" and ready["page_url"] == f"{entry.url}/"
    messages = [one["message"] for one in said if "message" in one]
    started = next(line for line in messages if line.startswith("started in"))
    assert all(phase in started for phase in ("control port", "engines", "models", "discovery", "API"))
    assert f"ready: API {entry.url}/v1, page {entry.url}/, health {entry.url}/health" in messages
    traced = [one["message"] for one in said if one.get("trace_id") == TRACE_ID]
    assert any(line.startswith("POST /v1/chat/completions: 200") for line in traced), "its lines name the trace"
    in_file = [json.loads(line) for line in file.read_text().splitlines()]
    assert [one["message"] for one in in_file][:5] == messages[:5]
    assert {"info", "debug"} <= {one["level"] for one in in_file} and file.stat().st_mode & 0o077 == 0
