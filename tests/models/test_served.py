"""Model servers beside a node: what they serve is announced, placed on their peer, and remembered when they go."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from exo_mesh.domain.request import GenerateRequest, SamplingParams, TokenEvent
from exo_mesh.domain.whole.served import SERVED_DIGEST, ServedModel
from exo_mesh.domain.whole.text_pieces import TextInput, text_of
from exo_mesh.engine.registry import load_registry
from exo_mesh.errors import PendingPlacementError, UnknownModelError
from exo_mesh.models.cards.toml_card import read_card_text
from exo_mesh.models.served import UNKNOWN_CONTEXT, served_card
from exo_mesh.models.server_options import server_options, with_card
from exo_mesh.node.node import Node
from tests.support.nodes import Machine, make_node, until

SERVED = "parrot"


def server_settings(up: Path) -> dict[str, str]:
    return {"dummy-text.models": SERVED, "dummy-text.words": "8", "dummy-text.up_file": str(up)}


async def said(node: Node, question: str) -> str:
    body = b'{"messages": [{"role": "user", "content": "%s"}]}' % question.encode()
    asked = GenerateRequest(f"r-{question}", (), 50, SamplingParams(), text=TextInput(body))
    events = [event async for event in node.requests.generate(SERVED, asked) if isinstance(event, TokenEvent)]
    return text_of(event.piece for event in events if event.piece is not None)


async def test_a_guest_without_a_server_uses_and_misses_that_of_its_peer(tmp_path: Path) -> None:
    up = tmp_path / "up"
    up.touch()
    host = make_node(tmp_path / "a", "host", Machine(), server_options=server_settings(up))
    await host.start()
    address = f"127.0.0.1:{host.grpc_port}"
    guest = make_node(tmp_path / "b", "guest", Machine(), bootstrap_peers=(address,))
    await guest.start()
    try:
        await until(lambda: SERVED in [entry.name for entry in guest.models.all()])
        (entry,) = [one for one in guest.models.all() if one.name == SERVED]
        assert entry.served is not None and entry.peers == (host.node_id,)
        assert len((await said(guest, "hello")).split()) == 8
        (instance,) = guest.observation.state().view.instances
        assert [stage.engine for stage in instance.stages] == ["dummy-text"]
        assert [stage.peer for stage in instance.stages] == [host.node_id]
        up.unlink()
        await until(lambda: SERVED not in [entry.name for entry in guest.models.all()])
        with pytest.raises(PendingPlacementError, match="parrot is down"):
            await guest.models.find(SERVED, may_download=False)
        with pytest.raises(UnknownModelError):
            await guest.models.find("never-there", may_download=False)
    finally:
        await asyncio.gather(guest.stop(), host.stop())


def test_equal_models_of_two_boards_have_one_card_and_others_do_not() -> None:
    here = ServedModel("m", "rkllm", "127.0.0.1:8080", "m")
    there = ServedModel("m", "rkllm", "localhost:9090", "m", slots=4)
    assert served_card(here).digest == served_card(there).digest
    assert served_card(here).digest.startswith(SERVED_DIGEST)
    assert served_card(ServedModel("m", "openai", "127.0.0.1:8080", "m")).digest != served_card(here).digest
    assert served_card(here).context_length == UNKNOWN_CONTEXT


def test_options_reach_the_engine_that_they_name_and_no_other(tmp_path: Path) -> None:
    node = make_node(tmp_path, "n", Machine(), server_options={"dummy-text.words": "3", "other.words": "4"})
    options = server_options(node.settings, load_registry())
    assert options["dummy-text"] == {"words": "3"}


def test_the_card_of_a_model_gives_a_supervised_server_its_speculation(tmp_path: Path) -> None:
    text = 'id = "a/b"\n[runtime]\nserved_spec_type = "draft_simple"\nserved_spec_n_max = 8\n'
    card = read_card_text(text + 'served_spec_draft_repo = "a/draft"\nserved_spec_draft_file = "d.gguf"\n', "card")
    draft = tmp_path / "a" / "draft" / "d.gguf"
    draft.parent.mkdir(parents=True)
    draft.touch()
    own = {"binary": "llama-server", "models_dir": f"/nowhere,{tmp_path}"}
    flags = {"spec_type": "draft_simple", "spec_n_max": "8", "draft_model": str(draft)}
    assert with_card(own, card) == own | flags
    assert with_card({**own, "spec_type": "ngram"}, card)["spec_type"] == "ngram", "what the operator says wins"
    assert with_card({"servers": "http://s:1"}, card) == {"servers": "http://s:1"}, "another's server has its own flags"
    assert with_card(own, None) == own
