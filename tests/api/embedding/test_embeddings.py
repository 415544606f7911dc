"""/v1/embeddings and Ollama's routes: every form of input, what is refused and why, and what the mesh is asked for."""

from __future__ import annotations

import asyncio
import base64
import json
import struct
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import openai
import pytest

from exo_mesh.api.context import ApiOptions
from exo_mesh.api.embedding import vectors
from exo_mesh.domain.embedding import EMBEDDINGS, RERANK, EmbedSpec
from exo_mesh.domain.request import FinishReason, GenerateRequest, TokenEvent
from exo_mesh.errors import EngineError, OverloadError
from exo_mesh.rings.serving.journal import Journal
from tests.api.conftest import OPEN_ADMIN
from tests.api.scripted_mesh import ScriptedMesh, Served, served
from tests.text.text_models import write_text_model

WIDTH = 4


def vector_of(request: GenerateRequest) -> list[float]:
    """What the scripted mesh answers: small numbers that tell the text and the cut."""
    assert request.embed is not None
    values = [float(len(request.prompt_ids)), float(request.prompt_ids[0]), float(request.embed.second), -0.5]
    return values[: request.embed.dimensions or WIDTH]


async def script(request: GenerateRequest) -> AsyncGenerator[TokenEvent, None]:
    values = vector_of(request)
    yield TokenEvent(0, None, finish=FinishReason.STOP, vector=struct.pack(f"<{len(values)}f", *values))


@pytest.fixture
def mesh(mesh: ScriptedMesh) -> ScriptedMesh:
    mesh.script = script
    return mesh


async def post(api: Served, body: Any, path: str = "/v1/embeddings") -> tuple[int, dict[str, Any]]:
    async with api.http.post(path, json=body) as reply:
        return reply.status, await reply.json()


async def test_openais_client_reads_floats_base64_and_usage(api: Served) -> None:
    client = openai.AsyncOpenAI(base_url=f"{api.url}/v1", api_key="none")
    texts = ["one", "a longer second one"]
    by_default = await client.embeddings.create(model="exo-mesh-demo", input=texts)  # it asks for base64
    as_floats = await client.embeddings.create(model="exo-mesh-demo", input=texts, encoding_format="float")
    ids = [api.mesh.text.encode_text(text) for text in texts]
    want = [[float(len(one)), float(one[0]), 0.0, -0.5] for one in ids]
    assert [one.embedding for one in by_default.data] == [one.embedding for one in as_floats.data] == want
    assert [one.index for one in as_floats.data] == [0, 1]
    assert (as_floats.model, as_floats.object) == ("exo-mesh-demo", "list")
    assert as_floats.usage.prompt_tokens == as_floats.usage.total_tokens == sum(map(len, ids))
    await client.close()


@pytest.mark.parametrize(("bad", "status", "outcome"), [(None, 200, "stop"), (2, 500, "engine_error")])
@pytest.mark.parametrize(("path", "texts"), [("/v1/embeddings", "input"), ("/api/embed", "input")])
async def test_a_call_is_recorded_once_however_many_texts_it_has(
    api: Served, path: str, texts: str, bad: int | None, status: int, outcome: str
) -> None:
    journal = Journal()

    async def journaled(request: GenerateRequest) -> AsyncGenerator[TokenEvent, None]:
        entry = journal.open(request, "exo-mesh-demo", 1.0)
        ended = "cancelled"
        try:
            if request.request_id.endswith(f".{bad}"):
                ended = EngineError.code
                raise EngineError("it failed")
            async for event in script(request):
                ended = str(event.finish)
                yield event
        finally:
            journal.close(entry, ended, 3.0)

    api.mesh.script = journaled
    assert (await post(api, {"model": "exo-mesh-demo", texts: ["one", "two", "three", "four"]}, path))[0] == status
    (ended,) = journal.history.recent(9)
    assert (ended.outcome, ended.duration_s, len(journal)) == (outcome, 2.0, 0)
    assert {one.request_id.rpartition(".")[0] for one in api.mesh.requests} == {ended.request_id}
    if bad is None:
        assert ended.prompt_tokens == sum(len(one.prompt_ids) for one in api.mesh.requests)


async def test_base64_is_float32_little_endian(api: Served) -> None:
    _, made = await post(api, {"input": "Hello", "encoding_format": "base64"})
    raw = base64.b64decode(made["data"][0]["embedding"])
    assert list(struct.unpack("<4f", raw)) == vector_of(api.mesh.request)


@pytest.mark.parametrize(
    ("given", "prompts"),
    [
        ("Hello", 1),
        (["Hello"], 1),
        (["Hello", "you"], 2),
        ([7, 8, 9], [(7, 8, 9)]),
        ([[7, 8], [9]], [(7, 8), (9,)]),
        (["Hello", [7, 8]], 2),
    ],
)
async def test_input_may_be_texts_or_token_ids(api: Served, given: Any, prompts: Any) -> None:
    status, made = await post(api, {"input": given})
    asked = sorted(api.mesh.requests, key=lambda one: one.request_id)
    assert (status, len(made["data"])) == (200, prompts if isinstance(prompts, int) else len(prompts))
    if isinstance(prompts, list):
        assert [one.prompt_ids for one in asked] == prompts
    assert all(one.max_tokens == 0 and one.embed == EmbedSpec("mean") for one in asked)


async def test_dimensions_and_normalize_reach_the_mesh(api: Served) -> None:
    _, made = await post(api, {"input": "Hello", "dimensions": 2, "normalize": False})
    assert len(made["data"][0]["embedding"]) == 2
    assert api.mesh.request.embed == EmbedSpec("mean", normalise=False, dimensions=2)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": ["a", ""]}, "input"),
        ({"input": [[]]}, "input"),
        ({"input": [1, "a"]}, "input"),
        ({"input": [{"image": "x"}]}, "input"),
        ({"input": [True]}, "input"),
        ({"input": [10**30]}, "input"),
        ({"input": [[1], [-1]]}, "input[1]"),
        ({"input": ["a"] * 2049}, "input"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "dimensions": 5}, "dimensions"),
        ({"input": "a", "dimensions": 100_000}, "dimensions"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
        ({"input": "a", "prompt_name": "query"}, "prompt_name"),
        ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"input": "a", "add_special_tokens": False}, "add_special_tokens"),
        ({"input": "a", "unknown": 1}, "unknown"),
        ({"input": "a", "model": "nope"}, "model"),
    ],
)
async def test_bad_input_is_a_400_that_names_the_field(api: Served, body: dict[str, Any], param: str) -> None:
    status, made = await post(api, body)
    assert status == (404 if param == "model" else 400), made
    assert made["error"]["param"] == param


async def test_a_text_that_is_too_long_is_refused_with_the_arithmetic_or_cut_if_asked(api: Served) -> None:
    text = "a" * 300
    status, made = await post(api, {"input": ["b", text]})
    num_tokens, limit = len(api.mesh.text.encode_text(text)), api.mesh.limit
    assert (status, made["error"]["code"], made["error"]["param"]) == (400, "context_length_exceeded", "input[1]")
    assert (
        f"{num_tokens} tokens" in made["error"]["message"]
        and f"shorten it by {num_tokens - limit}" in made["error"]["message"]
    )
    assert (await post(api, {"input": text, "truncate": True}))[0] == 200
    assert len(api.mesh.request.prompt_ids) == limit
    assert (await post(api, {"input": text, "truncate_prompt_tokens": 10}))[0] == 200
    assert len(api.mesh.request.prompt_ids) == 10
    assert (await post(api, {"input": [[7] * 300], "truncate": True}))[0] == 200
    assert len(api.mesh.request.prompt_ids) == limit


async def test_a_model_says_what_it_can_do(api: Served) -> None:
    api.mesh.tasks = (EMBEDDINGS,)
    chat = {"messages": [{"role": "user", "content": "Hi"}]}
    for path, body in (("/v1/chat/completions", chat), ("/v1/completions", {"prompt": "x"}), ("/api/chat", chat)):
        status, made = await post(api, body, path)
        assert status == 400 and "exo-mesh-demo cannot generate text; it can make embeddings" in str(made["error"])
    assert (await post(api, {"input": "a"}))[0] == 200
    api.mesh.tasks = (RERANK,)
    status, made = await post(api, {"input": "a"})
    assert (status, made["error"]["param"]) == (400, "model")
    assert made["error"]["message"] == "exo-mesh-demo cannot make embeddings; it can rerank documents"
    async with api.http.get("/v1/models") as reply:
        assert (await reply.json())["data"][0]["tasks"] == ["rerank"]


async def test_many_texts_run_a_few_at_once(api: Served) -> None:
    running = most = 0

    async def slow(request: GenerateRequest) -> AsyncGenerator[TokenEvent, None]:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        running -= 1
        async for event in script(request):
            yield event

    api.mesh.script = slow
    texts = [[1 + i % 200] for i in range(200)]
    both = await asyncio.gather(post(api, {"input": texts}), post(api, {"input": texts[:20]}))
    for (status, made), given in zip(both, (texts, texts[:20]), strict=True):
        assert status == 200
        assert [one["embedding"][1] for one in made["data"]] == [float(one[0]) for one in given]
    assert most <= 16


async def test_too_many_calls_at_once_are_a_429(api: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vectors, "MAX_CALLS", 0)
    status, made = await post(api, {"input": "a"})
    assert (status, made["error"]["code"]) == (429, "overloaded")


async def test_an_error_of_one_text_is_the_error_of_the_call(api: Served) -> None:
    async def failing(request: GenerateRequest) -> AsyncGenerator[TokenEvent, None]:
        if request.prompt_ids == (2,):
            raise OverloadError("the ring is full")
        async for event in script(request):
            yield event

    api.mesh.script = failing
    status, made = await post(api, {"input": [[1], [2], [3]]})
    assert (status, made["error"]["message"]) == (429, "the ring is full")
    assert not api.mesh.running


async def test_a_client_that_leaves_ends_all_texts_of_its_call(api: Served) -> None:
    started = asyncio.Event()

    async def endless(request: GenerateRequest) -> AsyncGenerator[TokenEvent, None]:
        started.set()
        await asyncio.Event().wait()
        yield TokenEvent(0, None)

    api.mesh.script = endless
    call = asyncio.create_task(post(api, {"input": [[1], [2], [3]]}))
    await asyncio.wait_for(started.wait(), 10)
    call.cancel()
    async with asyncio.timeout(10):
        while api.mesh.running:
            await api.mesh.ended.wait()
            api.mesh.ended.clear()
    api.mesh.script = script
    assert (await post(api, {"input": "a"}))[0] == 200


async def test_ollama_embeds_texts_and_cuts_long_ones(api: Served) -> None:
    status, made = await post(api, {"model": "exo-mesh-demo", "input": ["a", "b" * 300]}, "/api/embed")
    assert status == 200 and len(made["embeddings"]) == 2 and len(made["embeddings"][0]) == WIDTH
    ids = len(api.mesh.text.encode_text("a"))
    assert made["prompt_eval_count"] == ids + api.mesh.limit
    assert made["total_duration"] >= made["load_duration"] >= 0
    status, made = await post(api, {"input": "b" * 300, "truncate": False}, "/ollama/api/embed")
    assert status == 400 and "tokens" in made["error"]
    for nothing in ({"input": []}, {"input": ""}, {"input": None}, {}):
        assert (await post(api, nothing, "/api/embed"))[1]["embeddings"] == []
    _, made = await post(api, {"input": "a", "dimensions": 2, "options": {"num_ctx": 64}}, "/api/embed")
    assert len(made["embeddings"][0]) == 2 and api.mesh.request.embed == EmbedSpec("mean", dimensions=2)


@pytest.mark.parametrize("dimensions", [-1, 2**31, 10**400])
async def test_ollamas_route_refuses_widths_that_no_model_has(api: Served, dimensions: int) -> None:
    status, made = await post(api, {"input": "a", "dimensions": dimensions}, "/api/embed")
    assert status == 400 and made["error"].startswith("dimensions is ")


async def test_ollamas_older_route_gives_the_vector_as_the_model_makes_it(api: Served) -> None:
    status, made = await post(api, {"model": "exo-mesh-demo", "prompt": "a", "keep_alive": "5m"}, "/api/embeddings")
    assert (status, made["embedding"]) == (200, vector_of(api.mesh.request))
    assert api.mesh.request.embed == EmbedSpec("mean", normalise=False)
    assert api.mesh.request.keep_alive_s == 300
    assert (await post(api, {"prompt": ""}, "/api/embeddings"))[1] == {"embedding": []}


async def test_the_use_of_a_text_puts_the_prompt_of_the_model_before_it(tmp_path: Path) -> None:
    prompts = {"prompts": {"query": "Query: ", "document": "Text: "}}
    mesh = ScriptedMesh(write_text_model(tmp_path / "m"), script=script)
    (mesh.directory / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    cases: list[tuple[dict[str, str], str]] = [
        ({}, "a"),
        ({"input_type": "search_query"}, "Query: a"),
        ({"input_type": "passage"}, "Text: a"),
        ({"input_type": "passage", "prompt_name": "query"}, "Query: a"),
        ({"input_type": ""}, "a"),
    ]
    async with served(mesh, ApiOptions(access=OPEN_ADMIN)) as api:
        for fields, wanted in cases:
            assert (await post(api, {"input": "a", **fields}))[0] == 200
            assert list(mesh.request.prompt_ids) == mesh.text.encode_text(wanted), fields
