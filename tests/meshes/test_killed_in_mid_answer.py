"""Real processes: a stage is killed in the middle of a schema, a tool call or a thought, and the answer is the same."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest

from tests.support.peers import MODEL, Peer, await_all, chat_body
from tests.support.processes import eventually

pytestmark = pytest.mark.extended

SCHEMA = {
    "type": "array",
    "minItems": 12,
    "maxItems": 12,
    "items": {
        "type": "object",
        "properties": {
            "word": {"type": "string", "minLength": 8, "maxLength": 12},
            "number": {"type": "integer", "minimum": 0, "maximum": 999},
            "kind": {"enum": ["the first of two kinds", "the second of two kinds"]},
        },
        "required": ["word", "number", "kind"],
        "additionalProperties": False,
    },
}
NOTE = {
    "name": "save_note",
    "parameters": {
        "type": "object",
        "properties": {"text": {"type": "string", "minLength": 400, "maxLength": 420}},
        "required": ["text"],
        "additionalProperties": False,
    },
}
NEVER = -100.0

Part = tuple[str, str]
"""What kind of text it is, and a piece of it."""


def schema(peer: Peer) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "words", "schema": SCHEMA}}}


def call(peer: Peer) -> dict[str, Any]:
    """Its argument is so long that the stage dies within it."""
    return {"tools": [{"type": "function", "function": NOTE}], "tool_choice": "required", "parallel_tool_calls": False}


def thought(peer: Peer) -> dict[str, Any]:
    """The model may not end it by itself, so that its budget does."""
    end = peer.api.post("/tokenize", {"model": MODEL, "content": "</think>", "add_special": False})["tokens"]
    bias = {"logit_bias": {str(end[0]): NEVER}, "thinking_budget": 300, "min_tokens": 310, "max_tokens": 400}
    return {"chat_template_kwargs": {"enable_thinking": True}, **bias}


def parts(peer: Peer, seed: int, fields: dict[str, Any]) -> Iterator[Part]:
    body = chat_body("Say some words.", stream=True, max_tokens=1200, seed=seed, temperature=0.8)
    for event in peer.api.stream("/v1/chat/completions", {**body, **fields}):
        for choice in event.get("choices", ()):
            delta = choice["delta"]
            yield from ((name, delta[name]) for name in ("content", "reasoning_content") if delta.get(name))
            for made in delta.get("tool_calls") or ():
                yield from (
                    (name, made["function"][name]) for name in ("name", "arguments") if name in made["function"]
                )


def joined(found: Iterable[Part]) -> dict[str, str]:
    """The whole text of each kind."""
    texts: dict[str, str] = {}
    for name, text in found:
        texts[name] = texts.get(name, "") + text
    return texts


def check(kind: Kind, texts: dict[str, str]) -> None:
    """The answer is what was asked for."""
    if kind is schema:
        value = json.loads(texts["content"])
        assert len(value) == 12 and all(set(item) == {"word", "number", "kind"} for item in value)
    elif kind is call:
        assert texts["name"] == "save_note" and 400 <= len(json.loads(texts["arguments"])["text"]) <= 420
    else:
        assert len(texts["reasoning_content"]) > 300 and texts["content"]


Kind = Callable[[Peer], dict[str, Any]]


@pytest.mark.parametrize(
    ("kind", "stage"), [pytest.param(schema, 0, marks=pytest.mark.slow), (schema, 1), (call, 1), (thought, 0)]
)
def test_a_stage_that_is_killed_in_mid_answer_changes_nothing(pair: list[Peer], kind: Kind, stage: int) -> None:
    for peer in pair:  # a runner that is killed again and again is left alone for a while
        peer.api.delete("/v1/diagnostics/node/quarantine")
    if not pair[0].instances():
        pair[0].place()
    fields = kind(pair[0])
    expected = joined(parts(pair[0], stage, fields))
    check(kind, expected)
    before = pair[0].instances()[0]
    found: list[Part] = []
    length = 0
    for part in parts(pair[0], stage, fields):
        found.append(part)
        length += len(part[1])
        if length - len(part[1]) < 200 <= length:
            os.kill(before["stages"][stage]["pid"], signal.SIGKILL)
    assert joined(found) == expected
    assert eventually(lambda: any(one["ballot"] > before["ballot"] for one in pair[0].instances()), 30)
    await_all(pair, Peer.idle)
