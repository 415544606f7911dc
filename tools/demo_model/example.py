"""One question with its right answer, and the rule that keeps the held-out questions out of training."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

# Number of held-out keys per thousand keys of a group.
HELD_OUT_PERMILLE = {
    "count": 30,
    "word": 50,  # spell and reverse share the group: a held-out word is unseen by both
    "add": 60,
    "subtract": 60,
    "days_months": 300,
    "repeat": 50,
    "identity": 150,
    "city": 60,  # a city to ask the weather of
    "person": 60,  # a name with an age, for objects and records
    "other": 0,
}


@dataclass(frozen=True)
class Example:
    """A question (`prompt`) and its only right `answer`; `group` and `key` decide whether it is held out."""

    kind: str
    group: str
    key: str
    prompt: str
    answer: str
    thought: str = ""
    """The thought before the answer, for requests with thinking."""
    results: tuple[str, ...] = ()
    """If the answer calls tools: the results of the tools, in the order of the calls."""
    final: str = ""
    """The model's answer after the results."""
    given: tuple[tuple[int, int], ...] = ()
    """Parts of the answer (first character, one past the last) that a grammar would write: not learned."""


def is_held_out(example: Example) -> bool:
    """Whether the example is held out: a stable hash of its key, the same on every machine."""
    return key_is_held_out(example.group, example.key)


def key_is_held_out(group: str, key: str) -> bool:
    """Whether examples with this key are held out."""
    digest = hashlib.sha256(f"{group}|{key}".encode()).digest()
    return int.from_bytes(digest[:8], "big") % 1000 < HELD_OUT_PERMILLE[group]
