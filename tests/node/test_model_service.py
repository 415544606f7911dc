"""What a node does about models for its peers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from exo_mesh.api.listed import status_of
from exo_mesh.errors import FetchError, NotFetchedError, OverloadError, UnknownModelError
from exo_mesh.models.calls import INTRODUCE, PULL
from exo_mesh.models.fetches_for_peers import MAX_ASKED
from exo_mesh.node.node import Node
from exo_mesh.wire.peer_call import AnyRow
from exo_mesh.wire.proto import control_pb2 as pb
from tests.support.checkpoints import TinyModel, write_checkpoint
from tests.support.hub import LoopbackHub, Refusal
from tests.support.nodes import Machine, make_node, until


def answer_to(node: Node, row: AnyRow) -> Callable[[Any], Any]:
    """How the node answers a call of a peer."""
    answer = next(one for one in node._parts.answers if one.row is row)
    return lambda request: answer.function(request, "ipv4:10.0.0.2:40000")  # type: ignore[call-arg]


async def test_a_flood_of_requests_of_peers_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    node = make_node(tmp_path / "node", "n", Machine(), open_admin=True)
    gate, looked_up = asyncio.Event(), []

    async def resolve(name: str, repo: str, revision: str, *, allows_code: bool) -> None:
        looked_up.append(name)
        await gate.wait()

    monkeypatch.setattr(node._models.downloads, "resolve", resolve)
    introduce, pull = answer_to(node, INTRODUCE), answer_to(node, PULL)
    requests = [pb.IntroduceRequest(model=f"org/m{number}", repo="org/m") for number in range(MAX_ASKED + 8)]
    flood = [asyncio.ensure_future(introduce(request)) for request in requests]
    refused, _ = await asyncio.wait(flood, return_when=asyncio.FIRST_COMPLETED)
    assert len(refused) == 8 and len(looked_up) == MAX_ASKED
    assert all(isinstance(one.exception(), OverloadError) for one in refused)
    with pytest.raises(OverloadError, match="32 requests of peers to fetch models run here already"):
        await pull(pb.PullRequest(model="org/m"))
    gate.set()
    await asyncio.gather(*(set(flood) - refused))
    await introduce(requests[0])


async def test_a_model_of_the_hub_is_partial_until_its_files_are_here_and_gone_after_its_deletion(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its id has no organisation, as those of the hub's oldest models."""
    write_checkpoint(tmp_path / "tiny", TinyModel(layers=2))
    with LoopbackHub() as hub:
        hub.add("gpt2", tmp_path / "tiny")
        for name, value in {**hub.environment, "HF_HOME": str(tmp_path / "hf")}.items():
            monkeypatch.setenv(name, value)
        node = make_node(tmp_path / "node", "n", Machine())
        await node.start()
        try:
            await node.models.add_card("gpt2")
            assert status_of(await node.models.named("gpt2")) == "partial"
            await node.models.start_download("gpt2", whole=True)
            await until(lambda: "gpt2" in node._models.catalogue.local_names, 20)
            assert status_of(await node.models.named("gpt2")) == "downloaded"
            assert await node.models.delete("gpt2")
            with pytest.raises(UnknownModelError, match="no peer has the files of gpt2"):
                await node.models.named("gpt2")
            assert await node.models.delete_card("gpt2") and not node.models.is_reading()
            with pytest.raises(UnknownModelError, match=r'model "gpt-3"; .*at the hub: there is no model'):
                await node.models.find("gpt-3", may_download=True)
            meant = r"no peer has the files of HuggingFaceTB/SmolLM2-\S+; at the hub: "
            with pytest.raises(UnknownModelError, match=meant + "there is no model"):
                await node.models.find("smollm2", may_download=True)
            hub.faults.refusals = [Refusal(403, 100)]
            with pytest.raises(FetchError, match=meant) as away:
                await node.models.find("smollm2", may_download=True)
            cause = away.value.__cause__
            assert isinstance(cause, FetchError)
            assert (away.value.remedy, away.value.is_final) == (cause.remedy, cause.is_final)
            with pytest.raises(UnknownModelError) as refused:
                await node.models.find("gpt-3", may_download=False)
            assert not isinstance(refused.value, NotFetchedError), "it is a mistake, and no lack of rights"
        finally:
            await node.stop()
