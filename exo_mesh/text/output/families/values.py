"""Converts argument values that a model writes as bare text to JSON, by what the parameter may be. Pure."""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import msgspec

from exo_mesh.text.json_schema import KINDS
from exo_mesh.text.output.json_text import encode
from exo_mesh.text.output.reader import Malformed, Markers, More, Reader
from exo_mesh.text.output.tools import Allowed
from exo_mesh.text.schema_shapes import is_integral, kind_of

NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?")
_INTEGER = re.compile(r"-?(0|[1-9][0-9]*)")
_WORDS = {"null": "null", "true": "boolean", "false": "boolean"}
_OPENING = {'"': "string", "{": "object", "[": "array"}

ANYTHING = frozenset(KINDS)
TEXT = frozenset({"string", "null"})


class ValueRules(msgspec.Struct, frozen=True):
    """How a family writes values.

    untyped: the kinds of a parameter without a type, and of an unknown one. trim: the white space around a value that
    does not belong to it. is_quoted: whether strings are written as JSON, with quotes.
    """

    untyped: frozenset[str] = TEXT
    trim: Literal["none", "line", "space"] = "none"
    is_quoted: bool = False

    def kinds(self, allowed: Allowed | None) -> frozenset[str]:
        """The kinds that a value of this parameter may have. "integer" stands for numbers that are integers."""
        return (allowed.kinds if allowed is not None else frozenset()) or self.untyped

    def is_text(self, kinds: frozenset[str]) -> bool:
        """Whether a value is a string without quotes, or the word null; strings are passed on as they arrive."""
        return not self.is_quoted and "string" in kinds and kinds <= TEXT


class ObjectWriter:
    """Writes the JSON text of an object, member by member."""

    def __init__(self, sink: Callable[[str], None]) -> None:
        self._sink = sink
        self._is_empty = True

    def key(self, name: str) -> None:
        """Write the key of the next member; its value must follow."""
        self._sink(("{" if self._is_empty else ", ") + json.dumps(name, ensure_ascii=False) + ": ")
        self._is_empty = False

    def raw(self, text: str) -> None:
        """Write a piece of the value, as JSON text."""
        self._sink(text)

    def close(self) -> None:
        """Close the object."""
        self._sink("{}" if self._is_empty else "}")


def read_text_value(
    reader: Reader, end: Markers, out: ObjectWriter, rules: ValueRules, kinds: frozenset[str]
) -> More[None]:
    """Read a value up to and including the marker after it, and write it to out. Raises Malformed without a marker."""
    if rules.is_text(kinds):
        string = _StringWriter(out.raw, rules.trim, null_word="null" in kinds)
        if not (yield from reader.until(end, string.push)):
            string.stop()
            raise Malformed
        string.close()
        return
    text = yield from _text_of_value(reader, end)
    out.raw(value_text(trimmed(text, rules.trim), kinds))


def _text_of_value(reader: Reader, end: Markers) -> More[str]:
    """Read up to and including the marker that ends the value. A marker inside a string of JSON belongs to the string,
    unless that string never ends. Raises Malformed."""
    parts: list[str] = []
    if not (marker := (yield from reader.until(end, parts.append))):
        raise Malformed
    text = "".join(parts)
    if text.lstrip()[:1] not in _OPENING or not _ends_in_string(text):
        return text
    parts = [text]
    is_open = True
    while is_open:
        parts.append(marker)
        num_parts = len(parts)
        if not (marker := (yield from reader.until(end, parts.append))):
            reader.unread("".join(parts[2:]))
            return text
        is_open ^= _ends_in_string("".join(parts[num_parts:]))
    return "".join(parts)


_QUOTES = re.compile(r'\\.|"', re.DOTALL)


def _ends_in_string(text: str) -> bool:
    """Whether an odd number of quotes that are not escaped is in the text."""
    return _QUOTES.findall(text).count('"') % 2 == 1


class _StringWriter:
    """Writes a string as it arrives. White space at its end, and text that may be the word null, is held until more
    text arrives."""

    def __init__(self, sink: Callable[[str], None], trim: Literal["none", "line", "space"], *, null_word: bool) -> None:
        self._sink = sink
        self._trim = trim
        self._null_word = null_word
        self._is_started = False
        self._is_first = True
        self._held: list[str] = []
        self._word = ""

    def push(self, text: str) -> None:
        if self._is_first and self._trim != "none":
            text = text.removeprefix("\n") if self._trim == "line" else text.lstrip()
            self._is_first = self._trim == "space" and not text
        if not text:
            return
        num_held = 0
        if self._trim == "line":
            num_held = 1 if text.endswith("\n") else 0
        elif self._trim == "space":
            num_held = len(text) - len(text.rstrip())
            if num_held == len(text):
                self._held.append(text)
                return
        self._write("".join(self._held) + text[: len(text) - num_held])
        self._held = [text[len(text) - num_held :]]

    def _write(self, text: str) -> None:
        if not self._is_started:
            self._word += text
            if self._null_word and "null".startswith(self._word.lower()):
                return
            text, self._is_started = '"' + _escaped(self._word), True
            self._sink(text)
            return
        self._sink(_escaped(text))

    def stop(self) -> None:
        """Write the held text without a closing quote, because the answer ended inside the string."""
        if not self._is_started and self._word:
            self._sink('"' + _escaped(self._word))

    def close(self) -> None:
        """End the string."""
        if self._is_started:
            self._sink('"')
        elif self._null_word and self._word.lower() == "null":
            self._sink("null")
        else:
            self._sink(f'"{_escaped(self._word)}"')


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def trimmed(text: str, trim: Literal["none", "line", "space"]) -> str:
    """Remove the white space around a value that does not belong to it."""
    if trim == "space":
        return text.strip()
    return text.removeprefix("\n").removesuffix("\n") if trim == "line" else text


def as_json(value: Any, text: str) -> str:
    """The JSON text of a value. If JSON cannot express the value (a set, infinity), `text` as a JSON string."""
    try:
        return encode(value)
    except (TypeError, ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)


def literal(text: str) -> Any:
    """The value of a Python literal. Raises ValueError."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python warns about unknown escapes such as "\d"
            return ast.literal_eval(text)
    except (SyntaxError, TypeError, MemoryError, RecursionError) as exc:
        raise ValueError("no literal") from exc


def value_text(text: str, kinds: frozenset[str]) -> str:
    """The JSON text of a value that was written as this text, and may be of these kinds.

    JSON of an allowed kind is taken as it is. Other text is a string, if a string is allowed; else it becomes the value
    that it most likely means, such as `True`; else a string.
    """
    kind = _kind_of_json(text)
    if kind == "number" and kind not in kinds and "integer" in kinds and (integer := _integer(text)):
        return integer
    if kind in kinds:
        return text
    if kinds & {"array", "object"} and text[:1] in ("{", "["):
        for read in (partial(json.loads, strict=False), literal):
            try:
                value = read(text)
            except (ValueError, RecursionError):
                continue
            if kind_of(value) in kinds:
                return as_json(value, text)
    if "string" not in kinds and (meant := _meant(text, kinds)):
        return meant
    return json.dumps(text, ensure_ascii=False)


def _kind_of_json(text: str) -> str:
    """The kind of the JSON value that the text is; "" if it is none."""
    word = text.strip(" \t\n\r")
    if NUMBER.fullmatch(word):  # Python cannot read very long integers
        return "number"
    if word in _WORDS or word[:1] not in _OPENING:
        return _WORDS.get(word, "")
    try:
        json.loads(word, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        return ""
    return _OPENING[word[0]]


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _integer(text: str) -> str:
    """The number without a fraction; "" if it has one."""
    if _INTEGER.fullmatch(text.strip()):
        return text
    value = float(text)
    return str(int(value)) if is_integral(value) else ""


def _meant(text: str, kinds: frozenset[str]) -> str:
    """The JSON of a value that a model wrote in another notation; "" if the text means none of these kinds."""
    word = text.strip().lower()
    if word == "null" or (word in ("none", "nil") and "null" in kinds):
        return "null"
    if "boolean" in kinds and word in _BOOLEANS:
        return _BOOLEANS[word]
    if kinds & {"integer", "number"}:
        try:
            value = float(word)
            return (
                encode(int(value) if is_integral(value) else value) if "number" in kinds or is_integral(value) else ""
            )
        except (ValueError, OverflowError):
            return ""
    return ""


_BOOLEANS = dict.fromkeys(("true", "1", "yes", "on"), "true") | dict.fromkeys(("false", "0", "no", "off"), "false")
