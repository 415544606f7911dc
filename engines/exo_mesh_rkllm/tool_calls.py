"""Reads the arguments of a tool call, which RKLLAMA's /v1 writes as JSON with mistakes. Pure.

That interface prints the arguments as Python does and replaces every ' by ". So true comes as True, and "it's" comes
as "it"s".
"""

from __future__ import annotations

import json
import re
from typing import Any

from exo_mesh.errors import EngineError

MAX_ARGUMENTS = 262_144
"""Most characters of the arguments of one call."""

_LITERALS = {"True": "true", "False": "false", "None": "null"}
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')
_LITERAL = re.compile(r"\b(?:True|False|None)\b")
_APOSTROPHE = re.compile(r'(?<=[^\W\d_])"(?=[^\W\d_])')
"""A quote between two letters never begins or ends a string of JSON."""


def arguments_text(arguments: Any) -> str:
    """The arguments as the text of a JSON object. Raises EngineError if they cannot be read in exactly one way."""
    if isinstance(arguments, dict):
        return json.dumps(arguments, ensure_ascii=False)
    text = "{}" if arguments is None else arguments
    if not isinstance(text, str) or len(text) > MAX_ARGUMENTS:
        raise EngineError("RKLLAMA sent a tool call whose arguments are not an object")
    if _is_object(text):
        return text
    repaired = _with_json_literals(_APOSTROPHE.sub("'", text))
    if _is_object(repaired):
        return repaired
    raise EngineError(
        "RKLLAMA sent a tool call whose arguments are not valid JSON and can be read in several ways; a newer RKLLAMA "
        "has /api/chat, which does not have this fault"
    )


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


def _with_json_literals(text: str) -> str:
    """Replaces Python's names of true, false and null outside of strings."""
    made, at = [], 0
    for string in _STRING.finditer(text):
        made += [_LITERAL.sub(lambda found: _LITERALS[found[0]], text[at : string.start()]), string[0]]
        at = string.end()
    return "".join([*made, _LITERAL.sub(lambda found: _LITERALS[found[0]], text[at:])])
