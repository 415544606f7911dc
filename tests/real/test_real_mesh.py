"""A real model over two peers, asked over HTTP: its text, its type, its cache, its refusals, and a killed stage."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from exo_mesh.cli import exit_codes
from exo_mesh.errors import MeshError
from tests.real.real_model import PROMPTS, LlamaServer
from tests.support.peers import Peer, chat_body, mesh, text_of
from tests.support.processes import run
from tools.real_model import NAME

pytest.importorskip("xllamacpp")

pytestmark = pytest.mark.extended

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "minLength": 2, "maxLength": 12},
        "inhabitants": {"type": "integer", "minimum": 1000, "maximum": 9_999_999},
    },
    "required": ["city", "inhabitants"],
    "additionalProperties": False,
}
STORY = "Write a short poem about the sea."


@pytest.fixture(scope="module")
def peers(model_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Peer]]:
    """Two peers that hold half of the model each. Only the first has the file, and the second one is asked."""
    flags = ["--engine-option", "threads=1"]
    root = tmp_path_factory.mktemp("real-mesh")
    with mesh(root, [[*flags, "--models-dir", str(model_file.parent)], flags], engine="llamacpp") as made:
        made[1].place(model=NAME, min_peers=2)
        yield made


def ask(peer: Peer, question: str, **fields: Any) -> dict[str, Any]:
    return peer.chat(question, model=NAME, **fields)


def test_answers_are_those_of_llama_cpps_own_server(peers: list[Peer], llama_server: LlamaServer) -> None:
    for question in PROMPTS[4::45]:
        want = llama_server.answer(llama_server.prompt(question), 10)[1]
        assert text_of(ask(peers[1], question, max_tokens=10)) == want, question


def test_the_list_of_models_says_the_type_of_the_file(peers: list[Peer], tmp_path: Path) -> None:
    for peer in peers:
        (shown,) = [model for model in peer.api.get("/v1/models")["data"] if model["id"] == NAME]
        assert shown["quantization"] == "Q4_1"
        (shown,) = [model for model in peer.api.get("/api/tags")["models"] if model["name"] == NAME]
        assert (shown["details"]["format"], shown["details"]["quantization_level"]) == ("gguf", "Q4_1")
    listed = run(["list", "--api-url", peers[1].url], tmp_path)
    assert "Q4_1" in next(line for line in listed.stdout.splitlines() if line.startswith(NAME))


def test_a_second_request_computes_only_what_is_new(peers: list[Peer]) -> None:
    long = f"{STORY} {' and '.join(PROMPTS[:6])}"
    first, again = (ask(peers[1], long, max_tokens=6) for _ in range(2))
    assert text_of(again) == text_of(first)
    usage = again["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == usage["prompt_tokens"] - 1 > 63


def test_a_schema_is_kept(peers: list[Peer]) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "city", "schema": SCHEMA}}
    found = json.loads(text_of(ask(peers[1], "Describe Paris.", response_format=form, max_tokens=60)))
    assert set(found) == {"city", "inhabitants"} and 1000 <= found["inhabitants"] <= 9_999_999


def test_tools_are_refused_with_the_reason(peers: list[Peer]) -> None:
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
    with pytest.raises(MeshError, match="the model's chat template does not support tools"):
        ask(peers[1], "Look outside.", tools=[tool])


def test_a_killed_stage_changes_no_letter(model_file: Path, tmp_path: Path) -> None:
    """With NumPy, whose rows do not depend on each other: llama.cpp rounds what it computes again in another way."""
    flags = ["--models-dir", str(model_file.parent), "--engine-option", "mode=deterministic"]
    with mesh(tmp_path, [flags, flags], engine="numpy") as peers:
        peers[0].place(model=NAME, min_peers=2)
        want = text_of(ask(peers[1], STORY, max_tokens=12))
        victims, text = peers[0].runners()[:1], ""
        body = chat_body(STORY, model=NAME, max_tokens=12, stream=True)
        for event in peers[1].api.stream("/v1/chat/completions", body):
            text += "".join(choice["delta"].get("content") or "" for choice in event.get("choices", ()))
            if text and victims:
                os.kill(victims.pop().pid, signal.SIGKILL)
        assert text == want


@pytest.mark.slow
def test_the_demo_shows_the_file(model_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    asked = ["demo", "--once", "--api-port", "0", "--model", str(model_file), "--question", "Say hello."]
    shown = run(asked, tmp_path, timeout_s=110)
    assert (shown.returncode, shown.stderr) == (exit_codes.OK, "")
    assert f"{NAME} over 2 peers" in shown.stdout and "layers 15-29, llamacpp" in shown.stdout
    assert "tokens/s" in shown.stdout and list(tmp_path.glob("exo-mesh-demo-*")) == []
