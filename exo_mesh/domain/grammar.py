"""The form that the client requires of an answer's text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

GrammarKind = Literal["json_schema", "lark", "regex", "choice"]


@dataclass(frozen=True, slots=True)
class GrammarSpec:
    """A grammar. text: a JSON schema, a Lark grammar whose first rule is `start`, a regular expression for the whole
    answer, or a JSON list of strings of which the answer is one."""

    kind: GrammarKind
    text: str
