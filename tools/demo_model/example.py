"""One question with its right answer, and the rule that keeps the held-out questions out of training."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

# Of every thousand keys of a group, this many are held out.
HELD_OUT_PERMILLE = {
    "count": 30,
    "word": 50,  # spell and reverse share the group: a held-out word is unseen by both
    "add": 60,
    "subtract": 60,
    "days_months": 300,
    "repeat": 50,
    "identity": 150,
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


def is_held_out(example: Example) -> bool:
    """Whether the example belongs to the held-out set: a stable hash of its key, the same on every machine."""
    digest = hashlib.sha256(f"{example.group}|{example.key}".encode()).digest()
    return int.from_bytes(digest[:8], "big") % 1000 < HELD_OUT_PERMILLE[example.group]
