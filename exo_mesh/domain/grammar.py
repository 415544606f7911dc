"""What an answer must look like. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class GrammarSpec:
    """A grammar as a request gives it. kind: how `text` is written."""

    kind: Literal["json_schema", "lark", "regex", "choice"]
    text: str
