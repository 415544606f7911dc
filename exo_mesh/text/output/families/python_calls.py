"""Reads calls in Python syntax, `[f(a=1, b="x"), g()]`: LFM 2, OLMo 3, and Llama 4 without a marker. Pure."""

from __future__ import annotations

import ast
import json
import re
import warnings
from functools import partial
from typing import Any

from exo_mesh.text.output.families.family import ToolFamily
from exo_mesh.text.output.families.values import ObjectWriter, as_json
from exo_mesh.text.output.reader import Malformed, More, Reader
from exo_mesh.text.output.tools import Schemas
from exo_mesh.text.output.writer import EventWriter

_NAME = re.compile(r"[\w.-]+")
_NAME_START = re.compile(r"[\w.]")
_KEY = re.compile(r"[^\s*()\[\]{}\"'#]+")
_PLAIN = re.compile(r"""[^()\[\]{}"'#,]+""")
_IN_STRING = re.compile(r"""[^"'\\\n]+""")
_WORDS = {"true": True, "false": False, "null": None}


def _read_calls(is_bare: bool, reader: Reader, writer: EventWriter, schemas: Schemas, start: str) -> More[None]:
    """Read calls in brackets, or one on each line. A call is written only once it is complete, because an incomplete
    one may still turn out to be text.

    is_bare: the format allows calls without a start marker; such calls must name tools that were offered.
    """
    in_brackets = (yield from reader.space()) == "["
    if in_brackets:
        reader.take(1)
        yield from reader.space()
    while True:
        name, words = yield from _read_call(reader)
        arguments = _arguments(words)
        if is_bare and not start and name not in schemas.names:
            raise Malformed
        writer.begin(name)
        out = ObjectWriter(writer.arguments)
        for key, value in arguments.items():
            out.key(key)
            out.raw(value)
        out.close()
        writer.end()
        following = yield from reader.space()
        if in_brackets and following == "]":
            reader.take(1)
            return
        if following == ",":
            reader.take(1)
            following = yield from reader.space()
        if not _NAME_START.match(following) or not (in_brackets or following):
            return
        reader.record()


def _read_call(reader: Reader) -> More[tuple[str, list[str]]]:
    """Read a name, and the arguments up to the bracket that closes them. Raises Malformed."""
    name = yield from _read_name(reader)
    words = [""]
    depth = 0
    while following := (yield from reader.peek()):
        if following in "\"'":
            words[-1] += yield from _read_string(reader)
            continue
        if (found := reader.match(_PLAIN)) is not None:
            words[-1] += reader.take(len(found.group()))
            continue
        reader.take(1)
        if following == "," and depth == 1:
            words.append("")
            continue
        depth += 1 if following in "([{" else -1 if following in ")]}" else 0
        if depth == 0:
            return name, words
        if depth > 1 or following not in "([{":
            words[-1] += following
    raise Malformed


def _read_name(reader: Reader) -> More[str]:
    parts: list[str] = []
    while (yield from reader.peek()) and (found := reader.match(_NAME)) is not None:
        parts.append(reader.take(len(found.group())))
    if not parts or (yield from reader.peek()) != "(":
        raise Malformed
    return "".join(parts)


def _read_string(reader: Reader) -> More[str]:
    """Read a string with its quotes; a line break inside becomes an escape. Raises Malformed without a closing
    quote."""
    quote = reader.take(1)
    parts = [quote]
    while following := (yield from reader.peek()):
        if (found := reader.match(_IN_STRING)) is not None:
            parts.append(reader.take(len(found.group())))
            continue
        parts.append(reader.take(1))
        if following == "\\" and (yield from reader.peek()):
            parts.append(reader.take(1))
        elif following == "\n":
            parts[-1] = "\\n"
        elif following == quote:
            return "".join(parts)
    raise Malformed


def _arguments(words: list[str]) -> dict[str, str]:
    """The arguments `key=value` of a call, as JSON. A key may be a keyword of Python, such as `from`. Raises
    Malformed."""
    found: dict[str, str] = {}
    for word in words if words[-1].strip() else words[:-1]:
        key, sign, value = word.partition("=")
        key = key.strip()
        if not sign or key in found or not _KEY.fullmatch(key):
            raise Malformed
        found[key] = _as_json(value.strip())
    return found


def _as_json(text: str) -> str:
    """A value in the notation of JSON or Python, as JSON. Raises Malformed."""
    try:
        json.loads(text)
        return text
    except (ValueError, RecursionError):
        pass
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python warns about unknown escapes such as "\d"
            value = _value(ast.parse(text, mode="eval").body)
    except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError) as exc:
        raise Malformed from exc
    return as_json(value, str(value))


def _value(node: ast.expr) -> Any:
    """The value of a Python literal that may contain the JSON words true, false and null."""
    return ast.literal_eval(_JsonWords().visit(node))


class _JsonWords(ast.NodeTransformer):
    """Replaces the JSON words true, false and null by Python's constants."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(_WORDS[node.id]) if node.id in _WORDS else node


LFM2 = ToolFamily("pythonic", ("<|tool_call_start|>",), ("<|tool_call_end|>",), partial(_read_calls, False))
OLMO3 = ToolFamily("olmo3", ("<function_calls>",), ("</function_calls>",), partial(_read_calls, False))
LLAMA4 = ToolFamily(
    "llama4_pythonic", ("<|python_start|>",), ("<|python_end|>",), partial(_read_calls, True), bare_starts="["
)
