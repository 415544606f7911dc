"""Grammars of values that a family writes as bare text: what they allow, `value_text` reads as the same value. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from exo_mesh.errors import InputError
from exo_mesh.text.output.families.values import NUMBER, TEXT, ValueRules
from exo_mesh.text.output.lark_rules import LarkRules, any_text_without, in_regex
from exo_mesh.text.output.tools import Allowed, Parameters
from exo_mesh.text.schema_shapes import Form, Shape

_SPACE = "".join(f"\\x{{{code:x}}}" for code in range(0x3001) if chr(code).isspace())
"""White space as Python's `str.strip` knows it, for a class of characters."""

_BOUNDS = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"})
_OF_WHOLE_OBJECTS = ("minProperties", "maxProperties", "dependentRequired", "dependentSchemas", "dependencies", "if",
                     "not", "patternProperties", "propertyNames")  # fmt: skip


class UnenforceableError(InputError):
    """The schema of a tool cannot be enforced in the format of the model."""

    def __init__(self, what: str) -> None:
        super().__init__(
            f"the schema cannot be enforced in this model's format because of {what}; "
            'use tool_choice "auto" and no schema of the answer'
        )


class Place(msgspec.Struct, frozen=True):
    """Where a family writes values. rules: how it reads them. marker: what ends a value. end: the marker with the text
    around it. verbatim: a text at whose beginning the reader changes its rules."""

    rules: ValueRules
    marker: str
    end: str
    verbatim: str = ""


def check_form(form: Form) -> None:
    """Raises UnenforceableError if the members of a form depend on each other."""
    for clause in form.clauses:
        for word in _OF_WHOLE_OBJECTS:
            if word in clause:
                raise UnenforceableError(json.dumps(word))


def enforceable(parameters: Parameters, schema: Any) -> Allowed:
    """The values that a part of the schema allows. Raises UnenforceableError if their shapes do not say all of it."""
    allowed = parameters.allowed(schema)
    if parameters.analysis.problems:
        raise UnenforceableError(parameters.analysis.problems[0])
    return allowed


def bare_value(lark: LarkRules, parameters: Parameters, schema: Any, place: Place) -> str:
    """An expression for a value of this part of the schema, with the marker after it. Raises UnenforceableError."""
    allowed = enforceable(parameters, schema)
    kinds = place.rules.kinds(allowed)
    shapes = [shape for shape in allowed.shapes if shape.kind in kinds]
    found = []
    if not place.rules.is_quoted and "string" in kinds:
        if text := _texts(shapes, place):
            found.append(lark.text(text, place.end))
        kinds = _left(shapes)
    if kinds:
        whole = parameters.part(schema, None if len(kinds) == len(allowed.kinds) else kinds)
        found.append(f"{lark.json(whole)} {lark.literal(place.end)}")
    if not found:
        raise UnenforceableError("a value that this format cannot express")
    return f"({' | '.join(found)})"


def bare_string(lark: LarkRules, shapes: Sequence[Shape], place: Place) -> str:
    """An expression for a string, with the marker after it; "" if the format can express none of these strings."""
    text = _texts([shape for shape in shapes if shape.kind == "string"], place)
    return lark.text(text, place.end) if text else ""


def _is_free_number(shape: Shape) -> bool:
    return shape.kind in ("number", "integer") and not any(clause.keys() & _BOUNDS for clause in shape.clauses)


def _left(shapes: Iterable[Shape]) -> frozenset[str]:
    """The kinds that stand beside bare strings as JSON: all but words and free numbers. If there are such kinds, or
    numbers, then strings may also stand there with quotes."""
    shapes = list(shapes)
    found = {
        shape.kind
        for shape in shapes
        if shape.kind in ("array", "object")
        or (shape.kind in ("number", "integer") and not _is_free_number(shape) and shape.literals is None)
    }
    quoted = {"string"} if any(shape.kind not in TEXT for shape in shapes) else set()
    return frozenset(found | quoted)


def _texts(shapes: Sequence[Shape], place: Place) -> str:
    """An expression for strings without quotes, and for the words and numbers beside them; "" if there are none."""
    other = [re.compile(pattern, re.DOTALL) for pattern in _read_as_other(shapes)]
    found: list[str] = []
    for shape in shapes:
        if shape.kind == "string":
            found.append(_string(shape, place, other))
        elif shape.literals is not None and shape.kind not in ("array", "object"):
            found += [json.dumps(json.dumps(one)) for one in shape.literals]
        elif shape.kind == "null":
            found.append('"null"')
        elif shape.kind == "boolean":
            found += ['"true"', '"false"']
        elif _is_free_number(shape):
            found.append(f"/{_NUMBERS if shape.kind == 'number' else _INTEGERS}/")
    return " | ".join(f"({one})" for one in dict.fromkeys(found) if one)


_NUMBERS = NUMBER.pattern
_INTEGERS = "-?(0|[1-9][0-9]*)"


def _read_as_other(shapes: Iterable[Shape]) -> list[str]:
    """Expressions for the texts that are read as another value than a string."""
    found = set()
    for shape in shapes:
        if shape.kind in ("array", "object"):
            found.add(r"\[(.*)" if shape.kind == "array" else r"\{(.*)")
        elif shape.kind == "null":
            found.add("[nN][uU][lL][lL]")
        elif shape.kind == "boolean":
            found.add("true|false")
        elif shape.kind != "string":
            found.add(_NUMBERS if _is_free_number(shape) or shape.literals is not None else "[-0-9](.*)")
    if any(shape.kind not in TEXT for shape in shapes):
        found.add('"(.*)')
    return [rf"[ \t\n\r]*({pattern})[ \t\n\r]*" for pattern in sorted(found)]


def _string(shape: Shape, place: Place, other: Iterable[re.Pattern[str]]) -> str:
    if shape.literals is not None:
        texts = [json.dumps(one) for one in shape.literals if _is_readable(one, place, other)]
        return " & ".join([f"({' | '.join(texts)})", *_bounds(shape)]) if texts else ""
    parts = [any_text_without(place.marker)]
    parts += [f"~/{_dotted(pattern.pattern)}/" for pattern in other]
    if place.rules.trim == "space":
        parts.append(f"~/[{_SPACE}](?s:.*)|(?s:.*)[{_SPACE}]/")
    if place.verbatim:
        parts.append(f"~/{in_regex(place.verbatim)}(?s:.*)/")
    return " & ".join([*parts, *_bounds(shape)])


def _bounds(shape: Shape) -> list[str]:
    """Expressions for what the keywords of a string allow. The client's patterns run only in the compiled grammar."""
    found = []
    for clause in shape.clauses:
        if "not" in clause:
            raise UnenforceableError('"not"')
        if "minLength" in clause or "maxLength" in clause:
            found.append(f"/(?s:.{{{clause.get('minLength', 0)},{clause.get('maxLength', '')}}})/")
        if "pattern" in clause:
            found.append(f"/{_search(clause['pattern'])}/")
    return found


def _dotted(pattern: str) -> str:
    return pattern.replace("(.*)", "(?s:.*)")


def _search(pattern: str) -> str:
    """A regular expression for the whole texts in which a pattern of a schema is found. Raises UnenforceableError."""
    from llguidance import regex_to_lark

    made = []
    for branch in _branches(pattern):
        start = "" if branch.startswith("^") else "(?s:.*)"
        is_ended = branch.endswith("$") and (len(branch) - len(branch[:-1].rstrip("\\"))) % 2 == 1
        inner = branch.removeprefix("^")
        inner = inner[:-1] if is_ended else inner
        made.append(f"{start}(?:{inner}){'' if is_ended else '(?s:.*)'}")
    try:
        return str(regex_to_lark("|".join(made), use_ascii="d"))
    except ValueError as exc:
        raise UnenforceableError(f'"pattern" {json.dumps(pattern)}') from exc


def _branches(pattern: str) -> list[str]:
    """The alternatives at the top of a regular expression."""
    made, depth, start, at, in_class = [], 0, 0, 0, False
    while at < len(pattern):
        char = pattern[at]
        if char == "\\":
            at += 1
        elif in_class:
            in_class = char != "]"
        elif char == "[":
            in_class = True
        elif char in "()":
            depth += 1 if char == "(" else -1
        elif char == "|" and depth == 0:
            made.append(pattern[start:at])
            start = at + 1
        at += 1
    return [*made, pattern[start:]]


def _is_readable(text: str, place: Place, other: Iterable[re.Pattern[str]]) -> bool:
    """Whether a string is read as this string."""
    is_trimmed = place.rules.trim != "space" or text.strip() == text
    is_verbatim = bool(place.verbatim) and text.startswith(place.verbatim)
    return is_trimmed and not is_verbatim and place.marker not in text and not any(one.fullmatch(text) for one in other)
