"""What operators ask of a mesh: traces and cancels at any peer, captures, and what runs on a runner."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import pytest

from exo_mesh.errors import CancelledRequestError, OverloadError
from exo_mesh.node.inspection.trace_formats import trace_stats
from exo_mesh.node.node import Node
from exo_mesh.rings.placing.spec import InstanceSpec
from tests.support.nodes import MODEL, SLOW, a_request, crash, instances, mesh, tokens, until


async def placed_over_both(nodes: list[Node]) -> str:
    """The id of an instance with a stage on each of two nodes."""
    instance = await nodes[0].instances.create(InstanceSpec(MODEL, min_peers=2))
    await until(lambda: [one.state for one in instances(nodes[1])] == ["ready"])
    return str(instance.id)


async def test_any_peer_shows_cancels_captures_and_deletes(tmp_path: Path) -> None:
    async with mesh(tmp_path, 2, engine_options=SLOW, open_admin=True) as nodes:
        name = await placed_over_both(nodes)
        telemetry = nodes[0].observation.state().telemetry
        assert all(telemetry[node.node_id].headroom_bytes > 0 for node in nodes), "/state has each peer's headroom"
        entry, other = nodes
        asked = replace(a_request("chatcmpl-1", 400), trace_id="ab" * 16, names=("chatcmpl-1", "header-1"))

        async def runs() -> asyncio.Task[list[int]]:
            running = asyncio.create_task(tokens(entry, asked))
            await until(lambda: any(one["output_tokens"] for one in entry._serving.journal.describe_live()))
            return running

        for wanted in (asked.trace_id, "chatcmpl-1", "header-1"):
            running = await runs()
            assert not await other.requests.cancel(wanted, key_id="somebody-else"), "it came with another key"
            assert await other.requests.cancel(wanted)
            with pytest.raises(CancelledRequestError):
                await running
        assert not await other.requests.cancel("header-1"), "nothing runs any more"
        found = await other.inspection.trace("header-1")
        assert found is not None and found.outcome == "cancelled"

        running = await runs()
        pid = instances(other)[0].stages[1].pid
        holder = instances(other)[0].stages[1].peer
        assert await other.inspection.cancel_runner(holder, "1") is None
        assert await other.inspection.cancel_runner(holder, str(pid), "another-request") == {
            "instance": name, "cancelled": 0, "unreachable": []}  # fmt: skip
        done = await other.inspection.cancel_runner(holder, str(pid))
        assert done == {"instance": name, "cancelled": 1, "unreachable": []}
        with pytest.raises(CancelledRequestError):
            await running
        assert instances(other)[0].stages[1].pid == pid, "the runner goes on"
        assert len(await tokens(entry, replace(asked, max_tokens=4))) == 4

        listed = await other.inspection.cluster_traces()
        assert [(row["trace_id"], row["peer"]) for row in listed["data"]] == [(asked.trace_id, entry.node_id)]
        assert (await other.inspection.cluster_traces("somebody-else"))["data"] == []
        assert await other.inspection.trace("header-1", "somebody-else") is None
        found = await other.inspection.trace("header-1", "")
        assert found is not None and found.outcome == "length"
        stats = trace_stats(found)
        assert [stage["decode_s"]["mean"] >= 0.01 for stage in stats["stages"]] == [True, True], "10 ms a frame"
        assert stats["output_tokens"] == 4 and stats["token_gap_s"]["p50"] >= 0.02
        assert await other.inspection.delete_traces(["unknown"]) == {"deleted": 0, "unreachable": []}
        assert (await other.inspection.delete_traces([asked.trace_id]))["deleted"] == 1
        assert await entry.inspection.trace("header-1") is None

        peer_id = entry.node_id
        taken, refused = await asyncio.gather(
            other.inspection.capture(peer_id), entry.inspection.capture(), return_exceptions=True
        )
        taken, refused = (refused, taken) if isinstance(taken, OverloadError) else (taken, refused)
        assert isinstance(taken, dict) and isinstance(refused, OverloadError), "one capture at a time"
        node, runner = taken["processes"]
        assert any("test_inspection" in frame for task in node["tasks"] for frame in task["stack"])
        assert any("run_process" in line for line in runner["stacks"]), "the main thread of the runner"
        assert runner["memory"]["maps"][0]["resident_bytes"] > 0 and runner["threads"][0]["name"]
        one = await other.inspection.capture(peer_id, name)
        assert one is not None and [process["kind"] for process in one["processes"]] == ["runner"]
        assert await other.inspection.capture(peer_id, "no-such-runner") is None
        assert "5, 6, 7" not in json.dumps([taken, one])


@pytest.mark.extended
async def test_a_peer_that_does_not_answer_is_named_and_the_others_are_shown(tmp_path: Path) -> None:
    async with mesh(tmp_path, 2) as nodes:
        await tokens(nodes[0], replace(a_request("r"), trace_id="cd" * 16))
        await crash(nodes[1])
        listed = await nodes[0].inspection.cluster_traces()
        assert [row["request_id"] for row in listed["data"]] == ["r"]
        assert [peer["id"] for peer in listed["unreachable"]] == [nodes[1].node_id]
        assert (await nodes[0].inspection.delete_traces(None))["deleted"] == 1
