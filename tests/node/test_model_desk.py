"""What a node does about models for its peers."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from exo_mesh.errors import OverloadError
from exo_mesh.node.model_desk import MAX_ASKED
from exo_mesh.proto import control_pb2 as pb
from tests.support.nodes import Machine, make_node


async def test_a_flood_of_requests_of_peers_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    node = make_node(tmp_path / "node", "n", Machine())
    gate, looked_up = asyncio.Event(), []

    async def resolve(name: str, repo: str, revision: str, *, allows_code: bool) -> None:
        looked_up.append(name)
        await gate.wait()

    monkeypatch.setattr(node._models.downloads, "resolve", resolve)
    requests = [pb.IntroduceRequest(model=f"org/m{number}", repo="org/m") for number in range(MAX_ASKED + 8)]
    flood = [asyncio.ensure_future(node._desk.answer_introduce(request)) for request in requests]
    refused, _ = await asyncio.wait(flood, return_when=asyncio.FIRST_COMPLETED)
    assert len(refused) == 8 and len(looked_up) == MAX_ASKED
    assert all(isinstance(one.exception(), OverloadError) for one in refused)
    with pytest.raises(OverloadError, match="32 requests of peers to fetch models run here already"):
        await node._desk.answer_pull(pb.PullRequest(model="org/m"))
    gate.set()
    await asyncio.gather(*(set(flood) - refused))
    await node._desk.answer_introduce(requests[0])
