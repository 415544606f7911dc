"""Replies have all fields that the types of OpenAI's own package require, and none that they do not know."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from openai.types import Completion, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from pydantic import BaseModel

from exo_mesh.api.context import ApiOptions
from tests.api.conftest import OPEN_ADMIN
from tests.api.openai.test_tools import CALL, TEMPLATE, TOOL, USER
from tests.api.scripted_mesh import ScriptedMesh, Served, served
from tests.text.text_models import write_text_model

OURS = {"reasoning_content", "reasoning"}
"""What OpenAI does not have: only there if the model has thought."""


@pytest.fixture
async def strict_api(tmp_path: Path) -> AsyncIterator[Served]:
    mesh = ScriptedMesh(write_text_model(tmp_path / "m", TEMPLATE), limit=4096)
    async with served(mesh, ApiOptions(access=OPEN_ADMIN)) as server:
        yield server


def unknown_fields(value: Any) -> set[str]:
    """Names of fields, anywhere in a parsed reply, that the package does not know."""
    if isinstance(value, BaseModel):
        found = set(value.model_extra or {})
        for name in type(value).model_fields:
            found |= unknown_fields(getattr(value, name))
        return found
    if isinstance(value, list):
        return set().union(*map(unknown_fields, value))
    return set()


def check(kind: type[BaseModel], body: Any, allowed: frozenset[str] = frozenset()) -> None:
    """The first token of a prompt has null for its log-probability, as with OpenAI, whose types do not say so."""
    for choice in body["choices"]:
        for name in ("token_logprobs", "top_logprobs"):
            found = (choice.get("logprobs") or {}).get(name) or [0]
            if found[0] is None:
                del found[0]
    assert unknown_fields(kind.model_validate(body, strict=True)) <= allowed, body


ANSWERS = {"text": "Hello", "call": CALL + CALL, "thought": f"<think>so</think>\n\nWell.\n{CALL}"}


@pytest.mark.parametrize("answer", ANSWERS)
@pytest.mark.parametrize(
    "fields",
    [{}, {"logprobs": True, "top_logprobs": 2}, {"n": 3}, {"service_tier": "auto"}, {"max_tokens": 2}],
)
async def test_chats(strict_api: Served, answer: str, fields: dict[str, Any]) -> None:
    strict_api.mesh.answer = ANSWERS[answer]
    allowed = frozenset(OURS if answer == "thought" else ())
    asked = {"messages": [USER], "tools": [TOOL], **fields}
    async with strict_api.http.post("/v1/chat/completions", json=asked) as reply:
        body = await reply.json()
    check(ChatCompletion, body, allowed)
    assert [choice["index"] for choice in body["choices"]] == list(range(fields.get("n", 1)))
    streamed = {**asked, "stream": True, "stream_options": {"include_usage": True}}
    async with strict_api.http.post("/v1/chat/completions", json=streamed) as reply:
        events = [line[6:] for line in (await reply.text()).splitlines() if line.startswith("data: ")]
    assert events.pop() == "[DONE]"
    for event in events:
        check(ChatCompletionChunk, json.loads(event), allowed)


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": "a"},
        {"prompt": ["a", "b"], "n": 2},
        {"prompt": [5, 6], "echo": True, "logprobs": 2},
        {"prompt": "a", "logprobs": 0},
        {"prompt": ["a b", [5]], "best_of": 3, "n": 2},
    ],
)
async def test_completions(strict_api: Served, fields: dict[str, Any]) -> None:
    async with strict_api.http.post("/v1/completions", json=fields) as reply:
        body = await reply.json()
    check(Completion, body)
    prompts = fields["prompt"]
    num_prompts = len(prompts) if isinstance(prompts, list) and not isinstance(prompts[0], int) else 1
    assert [choice["index"] for choice in body["choices"]] == list(range(num_prompts * fields.get("n", 1)))
    if "best_of" not in fields:
        async with strict_api.http.post("/v1/completions", json={**fields, "stream": True}) as reply:
            events = [line[6:] for line in (await reply.text()).splitlines() if line.startswith("data: ")]
        texts = [""] * len(body["choices"])
        for event in map(json.loads, events[:-1]):
            for choice in event["choices"]:
                texts[choice["index"]] += choice["text"]
                choice["finish_reason"] = choice["finish_reason"] or "stop"  # null in a stream, as with OpenAI
            check(Completion, event)
        assert texts == [choice["text"] for choice in body["choices"]]


async def test_echo_scores_the_prompt_and_adds_no_token_if_none_is_wanted(strict_api: Served) -> None:
    ids = strict_api.mesh.text.encode_text("Hello, world!")
    asked = {"prompt": ids, "echo": True, "logprobs": 1, "max_tokens": 0}
    async with strict_api.http.post("/v1/completions", json=asked) as reply:
        body = await reply.json()
    (choice,) = body["choices"]
    assert choice["text"] == "Hello, world!"
    assert len(choice["logprobs"]["tokens"]) == len(ids) == len(choice["logprobs"]["text_offset"])
    assert choice["logprobs"]["token_logprobs"][:3] == [None, -0.25, -0.5]
    assert choice["logprobs"]["top_logprobs"][0] is None
    assert body["usage"]["completion_tokens"] == 0


async def test_models(strict_api: Served) -> None:
    async with strict_api.http.get("/v1/models") as reply:
        for model in (await reply.json())["data"]:
            assert Model.model_validate(model).id == model["id"]


@pytest.mark.parametrize("stream", [False, True])
async def test_timings_come_only_if_they_are_asked_for(strict_api: Served, stream: bool) -> None:
    strict_api.mesh.cached = 3
    body = {"messages": [USER], "stream": stream, "timings": True}
    async with strict_api.http.post("/v1/chat/completions", json=body) as reply:
        text = await reply.text()
    lines = [line[6:] for line in text.splitlines() if line.startswith("data: {")] if stream else [text]
    timings = json.loads(lines[-1])["timings"]
    assert timings["cache_n"] == 3
    assert timings["prompt_n"] == len(strict_api.mesh.request.prompt_ids) - 3
    assert timings["predicted_n"] == len(strict_api.mesh.text.encode_text("Hello, world!"))
    assert timings.keys() >= {"prompt_ms", "predicted_ms", "predicted_per_second", "cache_n"}
