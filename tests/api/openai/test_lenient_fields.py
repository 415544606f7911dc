"""Fields that real clients send: accepted where they change nothing, else refused by name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from exo_mesh.api.core.neutral_fields import ANY
from exo_mesh.api.openai.lenient import NEUTRAL
from exo_mesh.api.openai.schema import ChatBody, CompletionBody
from exo_mesh.domain.request import FLEX_PRIORITY
from tests.api.scripted_mesh import Served

TOOL = {"type": "function", "function": {"name": "f", "description": "a" * 100, "parameters": {}}}

ACCEPTED: list[dict[str, Any]] = [
    # OpenAI
    {"modalities": ["text"]},
    {"store": True},
    {"service_tier": "flex"},
    {"prediction": {"type": "content", "content": "x"}},
    {"prompt_cache_retention": "24h"},
    {"prompt_cache_key": "k"},
    {"functions": []},
    {"function_call": "none"},
    {"tool_choice": "auto"},
    {"tools": [TOOL], "tool_choice": "none"},
    {"tools": [], "tool_choice": "auto"},
    {"parallel_tool_calls": False},
    {"reasoning_effort": "low"},
    {"top_logprobs": 0},
    {"logprobs": False, "top_logprobs": None},
    {"response_format": {"type": "text"}},
    # vLLM and SGLang
    {"skip_special_tokens": True},
    {"spaces_between_special_tokens": True},
    {"include_stop_str_in_output": False},
    {"use_beam_search": False},
    {"length_penalty": 1.0},
    {"best_of": 1},
    {"early_stopping": False},
    {"stop_token_ids": []},
    {"bad_words": None},
    {"prompt_logprobs": 0},
    {"return_token_ids": False},
    {"request_id": "r"},
    {"cache_salt": "s"},
    # llama.cpp, LM Studio and Ollama
    {"max_tokens": -1},
    {"max_completion_tokens": -1},
    {"n_predict": -1},
    {"cache_prompt": True},
    {"id_slot": -1},
    {"n_probs": 0},
    {"n_keep": 0},
    {"mirostat": 0, "mirostat_tau": 5.0, "mirostat_eta": 0.1},
    {"typical_p": 1},
    {"tfs_z": 1.0},
    {"xtc_probability": 0, "xtc_threshold": 0.1},
    {"dry_multiplier": 0.0, "dry_base": 1.75},
    {"dynatemp_range": 0},
    {"repeat_penalty": 1.1},
    {"repeat_penalty": 1.1, "repetition_penalty": 1.1},
    {"grammar": ""},
    {"timings_per_token": False},
    {"keep_alive": "5m"},
    {"options": {}},
    # OpenRouter, Groq, DeepSeek, Kimi and Z.ai
    {"usage": {"include": True}},
    {"provider": {"sort": "throughput"}, "route": "fallback", "transforms": [], "plugins": []},
    {"include_reasoning": True, "reasoning_format": "parsed"},
    {"reasoning": {"effort": "low", "exclude": False}},
    {"reasoning": {"enabled": False, "max_tokens": 100}},
    {"thinking": {"type": "disabled"}},
    {"thinking": {"type": "enabled", "budget_tokens": 1024}},
    {"think": False},
    {"think": "high"},
    # applications
    {"session_id": "s", "chat_id": "c"},
    {"safe_prompt": False},
    {"tool_stream": True, "parse_tool_calls": True},
    {"ttl": 300, "draft_model": "small"},
    {"stop": [f"<mark-{i}>" for i in range(64)]},
]

REFUSED: list[tuple[dict[str, Any], str, str]] = [
    (
        {"modalities": ["text", "audio"]},
        "modalities",
        'is ["text", "audio"], which is not supported yet; it must be ["text"]',
    ),
    ({"functions": [{"name": "f"}]}, "functions", "it must be []"),
    ({"function_call": {"name": "f"}}, "function_call", 'it must be "none" or "auto"'),
    ({"tools": [TOOL], "tool_choice": "auto"}, "tools", "does not support tools"),
    ({"audio": {"voice": "x"}}, "audio", "not support"),
    ({"web_search_options": {}}, "web_search_options", "not support"),
    ({"n": 129}, "n", "n is 129"),
    ({"skip_special_tokens": False}, "skip_special_tokens", "is false, which is not supported yet; it must be true"),
    ({"skip_special_tokens": 1}, "skip_special_tokens", "is 1"),
    ({"use_beam_search": True}, "use_beam_search", "is true"),
    ({"include_stop_str_in_output": True}, "include_stop_str_in_output", "is true"),
    ({"length_penalty": 0.8}, "length_penalty", "is 0.8"),
    ({"best_of": 2}, "best_of", "it must be 1"),
    ({"n_predict": 5}, "n_predict", "is 5"),
    ({"mirostat": 2}, "mirostat", "it must be 0"),
    ({"typical_p": 0.9}, "typical_p", "is 0.9"),
    ({"xtc_probability": 0.5}, "xtc_probability", "is 0.5"),
    ({"dry_multiplier": 0.8}, "dry_multiplier", "is 0.8"),
    ({"grammar": "root ::= x"}, "grammar", "GBNF"),
    ({"n_probs": 3}, "n_probs", "is 3"),
    ({"repeat_penalty": 1.2, "repetition_penalty": 1.1}, "repeat_penalty", "two names"),
    ({"repeat_penalty": 0}, "repeat_penalty", "between 0.01 and 10"),
    ({"max_tokens": 0}, "max_tokens", "between 1"),
    ({"max_tokens": -2}, "max_tokens", "or -1 for no limit"),
    ({"extra_body": {"top_k": 3}}, "extra_body", "it must be {}"),
    ({"include_reasoning": False}, "include_reasoning", "it must be true"),
    ({"reasoning_format": "hidden"}, "reasoning_format", 'it must be "auto"'),
    ({"reasoning": {"exclude": True}}, "reasoning.exclude", "it must be false"),
    ({"reasoning": {"max_tokens": -1}}, "reasoning.max_tokens", "between 0"),
    ({"thinking": {"type": "enabled", "budget_tokens": -1}}, "thinking.budget_tokens", "between 0"),
    ({"transforms": ["middle-out"]}, "transforms", "it must be []"),
    ({"think": "deeply"}, "think", "deeply"),
]


async def test_what_changes_nothing_is_accepted(api: Served) -> None:
    for fields in ACCEPTED:
        status, reply = await api.chat(**fields)
        assert (status, reply.get("choices", [{}])[0].get("finish_reason")) == (200, "stop"), (fields, reply)


async def test_what_changes_the_answer_is_refused_by_name(api: Served) -> None:
    for fields, param, words in REFUSED:
        status, reply = await api.chat(**fields)
        assert (status, reply["error"]["code"], reply["error"]["param"]) == (400, "invalid_request", param), fields
        assert words in reply["error"]["message"], fields
    assert api.mesh.requests == []


def test_the_table_is_as_long_as_what_the_audit_tried() -> None:
    assert len(ACCEPTED) + len(REFUSED) >= 57
    assert len({name for fields in ACCEPTED for name in fields} & NEUTRAL.keys()) > 30


async def test_no_limit_means_all_that_the_model_can_hold(api: Served) -> None:
    await api.chat()
    unlimited = api.mesh.request.max_tokens
    for name in ("max_tokens", "max_completion_tokens"):
        await api.chat(**{name: -1})
        assert api.mesh.request.max_tokens == unlimited


async def test_the_other_name_of_a_penalty_is_honoured(api: Served) -> None:
    await api.chat(repeat_penalty=1.3)
    assert api.mesh.request.sampling.repetition_penalty == 1.3


@pytest.mark.parametrize("stream", [False, True])
async def test_the_reply_names_the_tier_that_there_is(api: Served, stream: bool) -> None:
    for wish, tier in {"auto": "default", "flex": "flex", "priority": "default"}.items():
        if stream:
            body = {"messages": [{"role": "user", "content": "Hi"}], "service_tier": wish, "stream": True}
            async with api.http.post("/v1/chat/completions", json=body) as reply:
                lines = (await reply.text()).splitlines()
            first = json.loads(next(line[5:] for line in lines if line.startswith("data:")))
        else:
            first = (await api.chat(service_tier=wish))[1]
        assert first["service_tier"] == tier
        assert (api.mesh.request.priority == FLEX_PRIORITY) == (wish == "flex")
    assert "service_tier" not in (await api.chat())[1]


async def test_a_tier_and_a_priority_contradict_each_other(api: Served) -> None:
    status, reply = await api.chat(service_tier="flex", priority=-1)
    assert (status, reply["error"]["param"]) == (400, "priority")
    body = {"prompt": "Hi", "service_tier": "flex"}
    async with api.http.post("/v1/completions", json=body) as answer:
        assert answer.status == 200 and api.mesh.request.priority == FLEX_PRIORITY


async def test_completions_take_them_as_well(api: Served) -> None:
    body = {"prompt": "Hi", "max_tokens": -1, "cache_prompt": True, "echo": False, "skip_special_tokens": True}
    async with api.http.post("/v1/completions", json=body) as reply:
        assert reply.status == 200, await reply.text()
    async with api.http.post("/v1/completions", json={**body, "mirostat": 1}) as reply:
        assert (reply.status, (await reply.json())["error"]["param"]) == (400, "mirostat")


def test_no_entry_is_dead() -> None:
    fields = set(ChatBody.__struct_fields__) & set(CompletionBody.__struct_fields__)
    assert not fields & NEUTRAL.keys(), "a route that has the field decides about it"
    assert all(allowed is ANY or allowed for allowed in NEUTRAL.values())
