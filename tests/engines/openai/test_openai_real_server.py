"""A real llama-server (xllamacpp's) with a tiny random model: the suite of every whole-model engine, and more."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path

import pytest

pytest.importorskip("xllamacpp", reason="xllamacpp is not installed: pip install xllamacpp gguf")
pytest.importorskip("gguf", reason="gguf is not installed: pip install xllamacpp gguf")

from exo_mesh_openai import provider
from exo_mesh_openai.engine import OpenAiEngine

from exo_mesh.cli.client.child_node import free_port
from exo_mesh.domain.request import FinishReason, SamplingParams
from exo_mesh.domain.whole.text_pieces import TextPiece
from exo_mesh.engine.conformance_whole import *  # noqa: F403
from exo_mesh.engine.conformance_whole import WholeSubject
from exo_mesh.engine.whole import WholeLoadRequest
from exo_mesh.errors import ContextLengthError, InputError
from tests.support.openai_engine import chat, collect, joined
from tests.support.stub_llama_server import ROOT
from tests.support.tiny_gguf import CONTEXT, THINKING_TEMPLATE, RealLlamaServer, write_tiny_gguf

pytestmark = pytest.mark.extended


@pytest.fixture(scope="module")
def model_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gguf(tmp_path_factory.mktemp("models") / "tiny.gguf")


@pytest.fixture(scope="module")
def whole_subject(model_file: Path) -> Iterator[WholeSubject]:
    server = RealLlamaServer(model_file, free_port())
    yield WholeSubject("exo_mesh_openai:provider", server, {"servers": server.url}, long_answer=8000)
    server.kill()


@contextlib.asynccontextmanager
async def loaded(options: Mapping[str, str]) -> AsyncIterator[OpenAiEngine]:
    """The engine with the first model of the options."""
    (report,) = await provider.look(options)
    engine = OpenAiEngine()
    await engine.load(WholeLoadRequest(report.models[0], options), lambda done, total: None)
    try:
        yield engine
    finally:
        await engine.close()


@pytest.fixture
async def engine(running_subject: WholeSubject) -> AsyncIterator[OpenAiEngine]:
    async with loaded(running_subject.options) as engine:
        yield engine


async def test_a_look_finds_context_and_slots(running_subject: WholeSubject) -> None:
    (report,) = await provider.look(running_subject.options)
    (model,) = report.models
    assert (model.context_limit, model.slots) == (CONTEXT, 2)


async def test_a_schema_is_kept_by_the_server(engine: OpenAiEngine) -> None:
    schema = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}},
        "required": ["ok"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    pieces, end = await collect(engine, chat(max_tokens=200, response_format=form))
    assert end.reason is FinishReason.STOP
    assert isinstance(json.loads(joined(pieces))["ok"], bool)


async def test_a_prompt_beyond_the_context_is_refused(engine: OpenAiEngine) -> None:
    with pytest.raises(ContextLengthError):
        await collect(engine, chat("x" * 3 * CONTEXT))


async def test_nonsense_in_messages_is_refused(engine: OpenAiEngine) -> None:
    from msgspec.structs import replace

    with pytest.raises(InputError):
        await collect(engine, replace(chat(), body={"messages": [{"role": 7}]}))


async def test_a_seed_repeats_a_drawn_answer(engine: OpenAiEngine) -> None:
    drawn = SamplingParams(temperature=1.0, top_k=20, min_p=0.01, repetition_penalty=1.1, seed=5)
    first, second = [joined((await collect(engine, chat(max_tokens=30, sampling=drawn)))[0]) for _ in range(2)]
    assert first == second


async def test_token_counts_come_with_the_end(engine: OpenAiEngine) -> None:
    _, end = await collect(engine, chat(max_tokens=9))
    assert end.usage.output_tokens == 9 and end.usage.prompt_tokens


@pytest.fixture(scope="module")
def thinking_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealLlamaServer]:
    file = write_tiny_gguf(tmp_path_factory.mktemp("thinking") / "thinking.gguf", THINKING_TEMPLATE)
    server = RealLlamaServer(file, free_port())
    server.start()
    yield server
    server.kill()


async def test_a_begun_thought_is_continued_and_stays_a_thought(thinking_server: RealLlamaServer) -> None:
    async with loaded({"servers": thinking_server.url}) as engine:
        whole, _ = await collect(engine, chat(max_tokens=20))
        assert {piece.kind for piece in whole} == {"reasoning"}
        rest, _ = await collect(engine, chat(max_tokens=20, begun=whole[:8]))
    assert joined(whole, "reasoning") == joined([*whole[:8], *rest], "reasoning")


async def test_a_text_after_a_complete_thought_is_continued_as_text(thinking_server: RealLlamaServer) -> None:
    begun = [TextPiece("reasoning", "They say hello."), TextPiece("text", "Hello")]
    async with loaded({"servers": thinking_server.url}) as engine:
        rest, end = await collect(engine, chat(max_tokens=32, begun=begun))
    # each letter is a token
    assert {piece.kind for piece in rest} == {"text"} and len(joined(rest)) == 32 - len("They say hello.Hello")
    assert end.usage.output_tokens == 32


async def test_a_supervised_server_loads_the_file(model_file: Path, tmp_path: Path) -> None:
    binary = tmp_path / "llama-server"
    binary.write_text(
        f"#!{sys.executable}\nimport sys\nsys.path.insert(0, {str(ROOT)!r})\nsys.argv.insert(1, 'serve')\n"
        "from tests.support.tiny_gguf import main\nmain()\n"
    )
    binary.chmod(0o755)
    options = {"binary": str(binary), "model": str(model_file), "slots": "2"}
    async with loaded(options) as engine:
        pieces, _ = await collect(engine, chat(max_tokens=20))
        assert joined(pieces) and engine.slots == 2
