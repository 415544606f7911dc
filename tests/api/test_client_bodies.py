"""Bodies as real clients write them, field by field, with the zero values that their languages send."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from exo_mesh.api.context import ApiOptions
from exo_mesh.api.ollama.lenient import decode_ollama_body
from exo_mesh.api.ollama.schema import OllamaPullBody
from exo_mesh.errors import InputError
from tests.api.conftest import OPEN_ADMIN
from tests.api.openai.test_tools import CALL, TEMPLATE
from tests.api.scripted_mesh import ScriptedMesh, Served, served
from tests.text.text_models import write_text_model

MODEL = "exo-mesh-demo"

# Go writes a field without omitempty even if nothing was set: null for maps and slices, "" for strings.
GO_CHAT: dict[str, Any] = {
    "model": MODEL,
    "messages": [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": ""},
        {"role": "user", "content": "?"},
    ],
    "options": None,
}
GO_TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Looks at the sky",
        "parameters": {
            "type": "object",
            "required": ["city"],
            "properties": {"city": {"type": "string", "description": ""}},
        },
    },
}
GO_GENERATE = {
    "model": MODEL,
    "prompt": "Hi",
    "suffix": "",
    "system": "",
    "template": "",
    "options": None,
}
GO_ALL_OPTIONS = {
    "num_ctx": 4096,
    "num_batch": 512,
    "num_gpu": -1,
    "main_gpu": 0,
    "use_mmap": None,
    "num_thread": 0,
    "num_keep": 4,
    "seed": -1,
    "num_predict": -1,
    "top_k": 40,
    "top_p": 0.9,
    "min_p": 0,
    "typical_p": 1,
    "repeat_last_n": 64,
    "temperature": 0.8,
    "repeat_penalty": 1.1,
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "stop": None,
}

OLLAMA: list[tuple[str, str, dict[str, Any], int]] = [
    ("POST", "/api/chat", {**GO_CHAT, "stream": False}, 200),
    ("POST", "/api/chat", {**GO_CHAT, "stream": False, "tools": [GO_TOOL], "options": GO_ALL_OPTIONS}, 200),
    ("POST", "/api/chat", {**GO_CHAT, "stream": False, "format": "", "keep_alive": "5m0s", "tools": None}, 200),
    ("POST", "/api/chat", {"model": MODEL, "messages": None, "options": None}, 200),
    ("POST", "/api/generate", {**GO_GENERATE, "stream": False}, 200),
    ("POST", "/api/generate", {**GO_GENERATE, "stream": False, "context": None, "images": None, "raw": False}, 200),
    ("POST", "/api/generate", {**GO_GENERATE, "prompt": ""}, 200),
    (
        "POST",
        "/api/show",
        {"model": MODEL, "system": "", "template": "", "verbose": False, "options": None, "name": ""},
        200,
    ),
    ("DELETE", "/api/delete", {"model": MODEL, "name": ""}, 200),
    (
        "POST",
        "/api/push",
        {"model": MODEL, "insecure": False, "username": "", "password": "", "stream": False, "name": ""},
        501,
    ),
    ("POST", "/api/create", {"model": "mine", "stream": None, "quantize": "", "from": MODEL, "files": None}, 501),
    ("POST", "/api/copy", {"source": MODEL, "destination": "copy"}, 501),
]

AUTOGEN: dict[str, Any] = {
    "model": MODEL,
    "messages": [
        {"role": "system", "content": "Be brief.", "name": None},
        {"role": "user", "content": "Hi", "function_call": None, "tool_calls": None},
        {"role": "assistant", "content": "", "name": "", "function_call": None, "tool_calls": []},
        {"role": "user", "content": [{"type": "text", "text": "And?"}]},
    ],
    "cache_seed": None,
    "functions": [],
    "function_call": "",
    "tools": [],
    "response_format": None,
    "stream": False,
}
OBSIDIAN: dict[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "Hi"}],
    "stream": False,
    "temperature": 0.7,
    "max_tokens": 1000.0,
    "n": 1.0,
    "stop": "",
    "suffix": "",
    "user": "",
    "logit_bias": {},
    "top_p": 1,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "echo": False,
}
OPENCODE: dict[str, Any] = {
    "model": MODEL,
    "max_tokens": 32000,
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Weather?"}]},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city":"Rome"}'}}
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": ""},
    ],
    "tools": [GO_TOOL],
    "tool_choice": "auto",
    "stream": True,
    "stream_options": {"include_usage": True},
}
OPENAI_SDK: dict[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "Hi"}],
    "audio": None,
    "web_search_options": None,
    "moderation": None,
    "prediction": None,
    "modalities": None,
    "store": False,
}
INSTRUCTOR_JSON: dict[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "Hi"}],
    "response_format": {"type": "json_object", "schema": {"type": "object", "properties": {"a": {"type": "integer"}}}},
}
OPENAI_AGENTS: dict[str, Any] = {
    "model": MODEL,
    "instructions": None,
    "input": [{"role": "user", "content": "Hi"}],
    "include": [],
    "tools": [],
    "tool_choice": "",
    "parallel_tool_calls": None,
    "previous_response_id": "",
    "conversation": None,
    "prompt": None,
    "background": False,
    "moderation": None,
    "stream": False,
    "text": {},
    "reasoning": {},
    "store": None,
    "metadata": None,
    "max_output_tokens": 50.0,
}


@pytest.fixture(scope="module")
def able_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text_model(tmp_path_factory.mktemp("able-model"), TEMPLATE)


@pytest.fixture
async def able(able_model: Path) -> AsyncIterator[Served]:
    options = ApiOptions(keep_alive_s=0.05, progress_s=0.01, access=OPEN_ADMIN)
    async with served(ScriptedMesh(able_model, limit=4096), options) as server:
        yield server


async def post(api: Served, path: str, body: dict[str, Any], method: str = "POST") -> tuple[int, str]:
    async with api.http.request(method, path, json=body) as reply:
        return reply.status, await reply.text()


@pytest.mark.parametrize(("method", "path", "body", "status"), OLLAMA)
async def test_what_ollamas_client_for_go_sends_is_taken(
    able: Served, method: str, path: str, body: dict[str, Any], status: int
) -> None:
    found, text = await post(able, path, body, method)
    assert found == status, text


def test_a_pull_of_ollamas_client_for_go_is_read() -> None:
    pulled = {"model": MODEL, "insecure": False, "username": "", "password": "", "stream": None, "name": ""}
    body = decode_ollama_body(json.dumps(pulled).encode(), OllamaPullBody)
    assert (body.model, body.stream) == (MODEL, None)
    with pytest.raises(InputError, match="username"):
        decode_ollama_body(json.dumps({**pulled, "username": "me"}).encode(), OllamaPullBody)


@pytest.mark.parametrize("body", [AUTOGEN, OBSIDIAN, OPENCODE, OPENAI_SDK, INSTRUCTOR_JSON])
async def test_what_clients_of_chats_send_is_taken(able: Served, body: dict[str, Any]) -> None:
    status, text = await post(able, "/v1/chat/completions", body)
    assert status == 200, text


async def test_what_openai_agents_sends_is_taken(able: Served) -> None:
    status, text = await post(able, "/v1/responses", OPENAI_AGENTS)
    assert status == 200, text
    assert json.loads(text)["previous_response_id"] is None
    assert able.mesh.request.max_tokens == 50


async def test_the_tool_runner_of_anthropic_continues_its_thread(able: Served) -> None:
    able.mesh.answer = CALL
    first = {
        "model": MODEL,
        "max_tokens": 200,
        "messages": [{"role": "user", "content": "Weather?"}],
        "tools": [
            {"name": "get_weather", "description": "Looks", "input_schema": {"type": "object", "properties": {}}}
        ],
        "thread": {"type": "create"},
    }
    status, text = await post(able, "/v1/messages?beta=true", first)
    reply = json.loads(text)
    assert status == 200, text
    able.mesh.answer = "Sunny."
    result = {"type": "tool_result", "tool_use_id": reply["content"][-1]["id"], "content": "sun"}
    following = {
        "model": MODEL,
        "max_tokens": 200,
        "messages": [{"role": "user", "content": [result]}],
        "thread": {"type": "continue", "previous_message_id": reply["id"]},
    }
    status, text = await post(able, "/v1/messages?beta=true", following)
    assert status == 200 and json.loads(text)["content"] == [{"type": "text", "text": "Sunny."}]
    prompt = able.mesh.text.tokenizer.decode(list(able.mesh.request.prompt_ids), skip_special_tokens=False)
    assert "Weather?" in prompt and "get_weather" in prompt and "sun" in prompt
