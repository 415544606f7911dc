"""Unmodified clients against a real llama-server that is a member of a mesh: through it they see what they see without.

See test_clients.py for what the clients need; llama-server comes from `pip install xllamacpp gguf`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from openai import OpenAI

pytest.importorskip("xllamacpp", reason="xllamacpp is not installed: pip install xllamacpp gguf")
pytest.importorskip("gguf", reason="gguf is not installed: pip install xllamacpp gguf")

from exo_mesh.cli.client.child_node import free_port
from tests.clients.test_clients import example
from tests.support.peers import Peer, mesh
from tests.support.processes import eventually
from tests.support.tiny_gguf import RealLlamaServer, write_tiny_gguf

pytestmark = pytest.mark.extended

SERVED = "tiny"
TOKENS = 40
QUESTION = "Count from 7 to 12."
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealLlamaServer]:
    running = RealLlamaServer(write_tiny_gguf(tmp_path_factory.mktemp("gguf") / f"{SERVED}.gguf"), free_port())
    running.start()
    yield running
    running.kill()


@pytest.fixture(scope="module")
def far(tmp_path_factory: pytest.TempPathFactory, server: RealLlamaServer) -> Iterator[Peer]:
    """A peer whose neighbour has the server."""
    limit = ["--max-generate-tokens", str(TOKENS)]
    flags = [["--openai-server", server.url], limit]
    with mesh(tmp_path_factory.mktemp("mesh"), flags, engine="dummy") as peers:
        for peer in peers:
            assert eventually(partial(lists, peer), 15), peer.child.log_tail(20)
        yield peers[1]


def lists(peer: Peer) -> bool:
    return any(one["id"] == SERVED for one in peer.api.get("/v1/models")["data"])


def ask(url: str, **fields: object) -> str:
    """What the official client gets."""
    client = OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0, timeout=60)
    model = next(one.id for one in client.models.list() if SERVED in one.id)
    messages = [{"role": "user", "content": QUESTION}]
    reply = client.chat.completions.create(
        model=model,
        messages=messages,
        temperature=0,
        max_tokens=TOKENS,
        **fields,  # type: ignore[call-overload]
    )
    return str(reply.choices[0].message.content)


def test_an_answer_is_the_same_through_the_mesh(far: Peer, server: RealLlamaServer) -> None:
    assert ask(far.url) == ask(server.url) != ""


@pytest.mark.parametrize("name", ["ask_openai.py", "ask_openai.mjs", "ask_litellm.py", "ask_curl.sh"])
def test_the_examples_of_clients_print_the_answer_of_the_server(
    name: str, far: Peer, server: RealLlamaServer, tmp_path: Path
) -> None:
    printed = example(name, far.url, tmp_path, SERVED)
    text = json.loads(printed)["choices"][0]["message"]["content"] if name == "ask_curl.sh" else printed
    assert text.strip() == ask(server.url).strip()


def test_a_schema_holds_even_for_random_weights(far: Peer) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA, "strict": True}}
    person = json.loads(ask(far.url, response_format=form))
    assert set(person) == {"name", "age"} and isinstance(person["age"], int)
