"""Real processes: a stage is killed in the middle of a schema, and the answer is what it is without."""

from __future__ import annotations

import json
import os
import signal
from typing import Any

import pytest

from tests.support.peers import Peer, await_all, chat_body
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
FORMAT = {"type": "json_schema", "json_schema": {"name": "words", "schema": SCHEMA}}


def pieces(peer: Peer, seed: int) -> Any:
    body = chat_body("Say some words.", stream=True, max_tokens=1200, seed=seed, temperature=0.8)
    for event in peer.api.stream("/v1/chat/completions", {**body, "response_format": FORMAT}):
        for choice in event.get("choices", ()):
            if text := choice["delta"].get("content"):
                yield text


@pytest.mark.parametrize("stage", [0, 1], ids=["first", "last"])
def test_a_stage_that_is_killed_in_the_middle_of_a_schema_changes_nothing(pair: list[Peer], stage: int) -> None:
    if not pair[0].instances():
        pair[0].place()
    expected = "".join(pieces(pair[0], stage))
    value = json.loads(expected)
    assert len(value) == 12 and all(set(item) == {"word", "number", "kind"} for item in value)
    before = pair[0].instances()[0]
    came = ""
    for piece in pieces(pair[0], stage):
        if len(came) < 200 <= len(came) + len(piece):
            os.kill(before["stages"][stage]["pid"], signal.SIGKILL)
        came += piece
    assert came == expected
    assert eventually(lambda: any(one["ballot"] > before["ballot"] for one in pair[0].instances()), 30)
    await_all(pair, Peer.idle)
