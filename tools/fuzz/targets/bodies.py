"""Mutated bodies of all dialects: tools, schemas, grammars, prompts, and fields of the wrong kind.

Every body is JSON, so that most pass the decoder. Any 5xx except 503 (the ring is full), or no answer within 30 s,
counts as harm.
"""

from __future__ import annotations

import asyncio
import copy
import json
import random
from collections import Counter
from typing import Any

from tools.fuzz.calls import many, post
from tools.fuzz.mutate import TEXTS
from tools.fuzz.rig import MODEL, Rig

COUNT, NUM_NODES, CLOSED = 20_000, 1, False
FLAGS = ("--discovery", "none", "--max-queued", "4096")
ANSWER_S = 30.0
MAX_LISTED = 20

_SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 9}, "days": {"type": "integer", "minimum": 1, "maximum": 5}},
    "required": ["city"],
    "additionalProperties": False,
}
_TOOL = {"type": "function", "function": {"name": "get_weather", "description": "d", "parameters": _SCHEMA}}
_USER = {"role": "user", "content": "Count from 7 to 9."}
_CALL = {"id": "c", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Rome"}'}}
_TURNS = [
    {"role": "system", "content": [{"type": "text", "text": "Be brief"}]},
    _USER,
    {"role": "assistant", "content": None, "tool_calls": [_CALL]},
    {"role": "tool", "tool_call_id": "c", "content": "sunny"},
]
_FORMAT = {"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": _SCHEMA}}
CHATS: tuple[dict[str, Any], ...] = (
    {"messages": [_USER]},
    {"messages": [_USER], "tools": [_TOOL], "tool_choice": "auto", "parallel_tool_calls": False},
    {"messages": [_USER], "tools": [_TOOL], "tool_choice": {"type": "function", "function": {"name": "get_weather"}}},
    {"messages": _TURNS, "tools": [_TOOL]},
    {"messages": [_USER], "response_format": _FORMAT},
    {"messages": [_USER], "response_format": {"type": "json_object"}, "n": 2},
    {"messages": [_USER], "grammar": {"type": "regex", "value": "[a-z]{1,9}"}},
    {"messages": [_USER], "guided_choice": ["yes", "no"]},
    {"messages": [_USER], "structured_outputs": {"grammar": 'start: "a" | "b"'}},
    {"messages": [_USER], "logprobs": True, "top_logprobs": 2, "stop": ["9"], "logit_bias": {"5": 1}, "seed": 1},
    {"messages": [_USER], "enable_thinking": True, "reasoning_effort": "low", "thinking_budget": 2},
    {"messages": [_USER], "chat_template_kwargs": {"a": 1}, "min_tokens": 1, "stop_token_ids": [3]},
    {"messages": [_USER, {"role": "assistant", "content": "7"}], "continue_final_message": True},
)
COMPLETIONS: tuple[dict[str, Any], ...] = (
    {"prompt": "7, 8,"},
    {"prompt": ["7", "8"], "n": 2, "best_of": 3, "logprobs": 1},
    {"prompt": [[5, 6], [7]], "echo": True, "logprobs": 1, "max_tokens": 0},
    {"prompt": [5, 6, 7], "prompt_logprobs": 1, "guided_regex": "a+"},
)
_MARK = {"cache_control": {"type": "ephemeral"}}
_CUSTOM = {"name": "get_weather", "description": "d", "input_schema": _SCHEMA, **_MARK}
_BLOCKS = [{"type": "text", "text": "Count from 7 to 9.", **_MARK}]
_USE = {"type": "tool_use", "id": "c", "name": "get_weather", "input": {"city": "Rome"}}
_RESULT = {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": "sunny"}], "is_error": True}
_PAPER = {"type": "document", "title": "t", "source": {"type": "text", "media_type": "text/plain", "data": "7"}}
_ROUND = [
    _USER,
    {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm", "signature": "s"}, _USE]},
    {"role": "user", "content": [_RESULT, *_BLOCKS]},
]
MESSAGES: tuple[dict[str, Any], ...] = (
    {"messages": [_USER], "stop_sequences": ["9"], "temperature": 0.5, "top_p": 0.9, "top_k": 4},
    {"messages": [{"role": "user", "content": [*_BLOCKS, _PAPER]}], "system": _BLOCKS, "metadata": {"user_id": "u"}},
    {"messages": _ROUND, "tools": [_CUSTOM], "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
    {"messages": [_USER], "tools": [_CUSTOM], "tool_choice": {"type": "tool", "name": "get_weather"}},
    {"messages": [_USER], "thinking": {"type": "enabled", "budget_tokens": 2}, "output_config": {"effort": "low"}},
    {"messages": [_USER], "output_config": {"format": {"type": "json_schema", "schema": _SCHEMA}}},
    {"messages": _ROUND, "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}},
    {"messages": [_USER, {"role": "system", "content": "Be brief"}, {"role": "assistant", "content": "7"}]},
)
_SHORT = {"num_predict": 4, "temperature": 0.5, "stop": ["9"], "seed": 1, "num_ctx": 256, "repeat_last_n": -1}
_OLLAMA_CALL = {"function": {"name": "get_weather", "arguments": {"city": "Rome"}}}
_OLLAMA_TURNS = [
    _USER,
    {"role": "assistant", "content": "", "thinking": "hm", "tool_calls": [_OLLAMA_CALL]},
    {"role": "tool", "content": "sunny", "tool_name": "get_weather"},
]
OLLAMA_CHATS: tuple[dict[str, Any], ...] = (
    {"messages": [_USER], "options": _SHORT, "keep_alive": "5m"},
    {"messages": _OLLAMA_TURNS, "options": _SHORT, "tools": [_TOOL], "think": True},
    {"messages": [_USER], "options": _SHORT, "format": _SCHEMA, "logprobs": True, "top_logprobs": 2},
    {"messages": [_USER, {"role": "assistant", "content": "7"}], "options": _SHORT, "format": "json", "think": "low"},
    {"messages": [], "keep_alive": -1},
)
OLLAMA_PROMPTS: tuple[dict[str, Any], ...] = (
    {"prompt": "Count from 7 to 9.", "system": "Be brief", "options": _SHORT, "context": [], "template": ""},
    {"prompt": "7, 8,", "raw": True, "options": {**_SHORT, "mirostat": 0, "num_gpu": 9}, "suffix": ""},
    {"prompt": "", "keep_alive": "1h"},
)
_VALUES: tuple[Any, ...] = (
    *TEXTS, None, True, False, 0, -1, 1, 2, 17, 2**31, 2**63, 10**30, 0.5, -1e308, 1e308, [], {}, [[]], {"a": {}},
    {"$ref": "#"}, {"$ref": "#/properties/x"}, {"allOf": [{}]}, {"type": ["string", "null"]}, {"pattern": "(a|aa)+$"},
    {"enum": []}, {"const": "\ud800"}, "\ud800", "(", "start: start", '{"type": "object"}', "get_weather", "required",
)  # fmt: skip


PATHS = (
    ("/v1/chat/completions", CHATS),
    ("/v1/completions", COMPLETIONS),
    ("/v1/messages", MESSAGES),
    ("/v1/messages/count_tokens", MESSAGES),
    ("/api/chat", OLLAMA_CHATS),
    ("/ollama/api/generate", OLLAMA_PROMPTS),
)
_SHARES = (5, 2, 4, 1, 3, 2)


def body_of(rng: random.Random) -> tuple[str, bytes]:
    """Returns a path and a body with up to four changes."""
    path, bodies = rng.choices(PATHS, _SHARES)[0]
    body = copy.deepcopy(rng.choice(bodies))
    body = {"model": MODEL, **body} if "/api/" in path else {"model": MODEL, "max_tokens": 4, **body}
    if rng.random() < 0.3:
        body["stream"] = "/api/" not in path  # Ollama's routes stream unless this is false
    for _ in range(rng.randint(0, 4)):
        _change(rng, body)
    return path, json.dumps(body).encode()


def _change(rng: random.Random, body: Any) -> None:
    """Replaces, drops, repeats or nests a value somewhere in it; sometimes inserts a value of another body."""
    place = _place(rng, body)
    if isinstance(place, dict):
        kind = rng.random()
        if kind < 0.2 or not place:
            other = rng.choice((*CHATS, *COMPLETIONS, *MESSAGES, *OLLAMA_CHATS, *OLLAMA_PROMPTS))
            name = rng.choice(list(other))
            place[name] = copy.deepcopy(other[name])
            return
        key: Any = rng.choice(list(place))
    elif place:
        kind, key = rng.random(), rng.randrange(len(place))
    else:
        place.append(copy.deepcopy(rng.choice(_VALUES)))
        return
    if kind < 0.35:
        del place[key]
    elif kind < 0.45:
        place[key] = [place[key]] * rng.choice((1, 2, 40))
    elif kind < 0.55:
        place[key] = {"type": place[key]}
    else:
        place[key] = copy.deepcopy(rng.choice(_VALUES))


def _place(rng: random.Random, value: Any) -> Any:
    """Returns a dict or list somewhere in the value."""
    while True:
        inner = [one for one in (value.values() if isinstance(value, dict) else value) if isinstance(one, dict | list)]
        if not inner or rng.random() < 0.4:
            return value
        value = rng.choice(inner)


async def attack(rig: Rig, rng: random.Random, count: int) -> Counter[str]:
    """Sends the requests; returns their outcomes."""

    async def one(number: int) -> str:
        path, data = body_of(rng)
        try:
            async with asyncio.timeout(ANSWER_S):
                status = await post(rig.api_port, path, data)
        except TimeoutError:
            status = "NO ANSWER"
        except OSError as exc:
            status = type(exc).__name__
        if not status.startswith(("2", "4")) and status != "503":
            rig.harm.append(f"{status} to {path} {data[:1000]!r}")
        elif status == "503" and len(rig.notes) < MAX_LISTED:
            rig.notes.append(f"503 to {path} {data[:300]!r}")
        return status

    return await many(count, one)
