"""What `exo-mesh explain` says of the prompt of a request."""

from __future__ import annotations

from typing import Any

import pytest

from exo_mesh.cli.verbs.explain import computed_by, describe

FOUND: dict[str, Any] = {
    "prompt_tokens": 2048,
    "cached_tokens": 128,
    "common_tokens": 131,
    "nearest_is_own": True,
    "first_token_s": 3.104,
    "text_before": "It is ",
    "text_here": "14:02",
    "text_there": "14:01\x1b[2J",
}


def test_the_first_difference_is_shown_with_the_texts_around_it() -> None:
    assert describe(FOUND).splitlines() == [
        "128 of the 2048 tokens of the prompt came from the prefix cache, 1920 were computed; "
        "its first token came after 3.10 s",
        "the kept sequence that begins most like it has its first 131 tokens, and then differs",
        "  both:         …It is ",
        "  this request: 14:02…",
        "  what is kept: 14:01\ufffd[2J…",
    ]


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"common_tokens": 0}, "nothing that was kept begins with the first 64 tokens of this prompt"),
        ({"common_tokens": 2047}, "all of it was known, but for the last token, which is always computed"),
        ({"nearest_is_own": False}, "(of another caller)"),
    ],
)
def test_other_prompts_are_explained_too(fields: dict[str, Any], sentence: str) -> None:
    assert sentence in describe(FOUND | fields | {"first_token_s": None})


def test_each_ring_of_a_request_is_a_sentence() -> None:
    alice, bob = ({"names": [name], "layers": layers} for name, layers in (("alice", [0, 18]), ("bob", [18, 36])))
    group = {"names": ["carol", "dave"], "layers": [18, 36]}
    first = {"from_token": 0, "pause_s": None, "stages": [alice, bob]}
    later = {"from_token": 57, "pause_s": 1.9, "stages": [alice, group]}
    assert computed_by(first) == "computed by alice 0-17 → bob 18-35"
    assert computed_by(later) == "from token 57 on by alice 0-17 → carol + dave 18-35, after a pause of 1.9 s"
