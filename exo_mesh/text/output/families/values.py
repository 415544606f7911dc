"""Converts argument values that a model writes as bare text to JSON, by the schema of the parameter. Pure."""

from __future__ import annotations

import ast
import json
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from exo_mesh.text.output.json_text import encode
from exo_mesh.text.output.reader import Malformed, Markers, More, Reader

ParameterSchema = dict[str, Any]

_TEXT_TYPES = frozenset({"string", "str", "text", "varchar", "char", "enum"})
_TYPES_IN_ORDER = ("integer", "int", "number", "float", "boolean", "bool", "object", "array", "string", "str", "text")
_TYPE_OF = {type(None): "null", bool: "boolean", int: "integer", float: "number", str: "string"} | {
    list: "array",
    dict: "object",
}


@dataclass(frozen=True, slots=True)
class ValueRules:
    """How a family writes values.

    is_text: whether a value is a string, by its parameter's schema (None: unknown parameter); strings are passed on as
    they arrive. convert: the value of any other text. trim: the white space around a value that does not belong to it.
    null_word: whether "null" means null even for a string.
    """

    is_text: Callable[[ParameterSchema | None], bool]
    convert: Callable[[str, ParameterSchema | None], Any]
    trim: Literal["none", "line", "space"] = "none"
    null_word: bool = False


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
    reader: Reader, end: Markers, out: ObjectWriter, rules: ValueRules, schema: ParameterSchema | None, is_text: bool
) -> More[None]:
    """Read a value up to and including the marker after it, and write it to out. Raises Malformed without a marker."""
    if is_text:
        string = _StringWriter(out.raw, rules)
        if not (yield from reader.until(end, string.push)):
            string.stop()
            raise Malformed
        string.close()
        return
    text = trimmed((yield from reader.text_until(end)), rules.trim)
    out.raw(as_json(rules.convert(text, schema), text))


class _StringWriter:
    """Writes a string as it arrives. White space at its end, and text that may be the word null, is held until more
    text arrives."""

    def __init__(self, sink: Callable[[str], None], rules: ValueRules) -> None:
        self._sink = sink
        self._trim = rules.trim
        self._null_word = rules.null_word
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


def json_or_literal(text: str, schema: ParameterSchema | None) -> Any:
    """Read the text as JSON, else as a Python literal, else as a string, as GLM's format needs it."""
    for read in (json.loads, literal):
        try:
            return read(text)
        except (ValueError, RecursionError):
            continue
    return text


def json_or_text(text: str, schema: ParameterSchema | None) -> Any:
    """Read the text as JSON, else as a string."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def is_string_type(schema: ParameterSchema | None) -> bool:
    """Whether the parameter is declared to be a string."""
    return schema is not None and schema.get("type") == "string"


def is_text_by_qwen(schema: ParameterSchema | None) -> bool:
    """Whether Qwen's own parser reads the value as a string; it also does so for unknown parameters."""
    return not schema or str(schema.get("type", "")).strip().lower() in _TEXT_TYPES


def convert_by_qwen(text: str, schema: ParameterSchema | None) -> Any:
    """Convert a value as Qwen's own parser does; a text that does not fit the declared type is a string."""
    if text.lower() == "null":
        return None
    kind = (schema or {}).get("type")
    if kind is None:
        value = json_or_text(text, schema)
        return value if isinstance(value, dict | list) else text
    if isinstance(kind, list):
        return convert_by_types(text, schema)
    kind = str(kind).strip().lower()
    try:
        if kind.startswith(("int", "uint", "long", "short", "unsigned", "num", "float")):
            return _number(text)
        if kind in ("boolean", "bool", "binary"):
            return text.lower() == "true"
        if kind in ("object", "array", "arr") or kind.startswith(("dict", "list")):
            return json.loads(text, strict=False)
    except (ValueError, OverflowError, RecursionError):
        if not kind.startswith(("obj", "arr", "dict", "list")):
            return text
    return _literal_or_text(text)


def _number(text: str) -> int | float:
    value = float(text)
    return int(value) if value == int(value) else value


def _literal_or_text(text: str) -> Any:
    try:
        return literal(text)
    except ValueError:
        return text


def types_of(schema: Any) -> frozenset[str]:
    """Every type that a schema allows; only "string" if the schema names none."""
    found: set[str] = set()
    if isinstance(schema, dict):
        kind = schema.get("type")
        found.update([kind] if isinstance(kind, str) else [k for k in kind if isinstance(k, str)] if kind else [])
        values = schema.get("enum")
        found.update(_TYPE_OF.get(type(value), "string") for value in (values if isinstance(values, list) else ()))
        for word in ("anyOf", "oneOf", "allOf"):
            choices = schema.get(word)
            for choice in choices if isinstance(choices, list) else ():
                found |= types_of(choice)
    return frozenset(kind.lower() for kind in found) or frozenset({"string"})


def is_text_by_types(schema: ParameterSchema | None) -> bool:
    """Whether a value can only be a string."""
    return types_of(schema) <= {"string", "str", "text"}


def convert_by_types(text: str, schema: ParameterSchema | None) -> Any:
    """Convert a value to the narrowest type of the schema that the text fits, as MiniMax's format needs it."""
    if text.lower() == "null":
        return None
    kinds = types_of(schema)
    if "null" in kinds and text.lower() in ("none", "nil"):
        return None
    for kind in _TYPES_IN_ORDER:
        if kind in kinds:
            try:
                return _of_type(text, kind)
            except (ValueError, OverflowError, RecursionError):
                continue
    return json_or_text(text, schema)


def _of_type(text: str, kind: str) -> Any:
    """Convert the text to a value of this type. Raises ValueError if the text does not fit."""
    if kind in ("integer", "int"):
        return int(text)
    if kind in ("number", "float"):
        return _number(text)
    if kind in ("boolean", "bool"):
        word = text.lower().strip()
        if word not in _BOOLEANS:
            raise ValueError("no boolean")
        return _BOOLEANS[word]
    if kind in ("object", "array"):
        try:
            return json.loads(text, strict=False)
        except ValueError:
            return literal(text)
    return text


_BOOLEANS = dict.fromkeys(("true", "1", "yes", "on"), True) | dict.fromkeys(("false", "0", "no", "off"), False)
