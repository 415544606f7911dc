"""Finds a shortest answer that a grammar allows, so that a thought can end early enough to leave room for it. Pure."""

from __future__ import annotations

import json
from contextlib import suppress
from re import _parser as regex_parser  # type: ignore[attr-defined]
from typing import Any

from exo_mesh.domain.request import GrammarSpec
from exo_mesh.text.json_schema import SchemaError, standard_schema
from exo_mesh.text.schema_shapes import Analysis, Shape

UNKNOWN = "x" * 64
"""Stands for the shortest answer of a grammar that is not analysed."""

MAX_STRING = 4096
MAX_STEPS = 2000
MAX_DEPTH = 24


def shortest_answer(spec: GrammarSpec) -> str:
    """A text about as long as the shortest text that the grammar allows."""
    with suppress(ValueError, RecursionError, TypeError, AttributeError):  # check_grammar reports what is wrong
        match spec.kind:
            case "json_schema":
                schema = json.loads(spec.text)
                return shortest_json(schema) if isinstance(schema, dict) else "{}"
            case "choice":
                return min(map(str, json.loads(spec.text)), key=len)
            case "regex":
                return "x" * _width(spec.text)
    return UNKNOWN


def shortest_json(schema: dict[str, Any]) -> str:
    """A text as long as the shortest JSON value that a schema allows. Raises SchemaError."""
    return _Shortest(standard_schema(schema)).value()


class _Shortest:
    def __init__(self, schema: dict[str, Any]) -> None:
        self._analysis = Analysis(schema)
        self._steps = 0

    def value(self) -> str:
        """The shortest value. Raises SchemaError if there is none that ends."""
        found = self._value(self._analysis.schema, 0)
        if found is None:
            raise SchemaError("no value ends")
        return found

    def _value(self, schema: Any, depth: int) -> str | None:
        """The shortest value; None if every value is too deep."""
        self._steps += 1
        if depth > MAX_DEPTH or self._steps > MAX_STEPS:
            return None
        best: str | None = None
        shapes = sorted(self._analysis.shapes(schema), key=lambda shape: shape.kind in ("array", "object"))
        for shape in shapes:
            if best is not None and len(best) <= len("null") and shape.kind in ("array", "object"):
                break
            found = self._of_shape(shape, depth)
            if found is not None and (best is None or len(found) < len(best)):
                best = found
        return best

    def _of_shape(self, shape: Shape, depth: int) -> str | None:
        if shape.literals is not None:
            return min((json.dumps(one, ensure_ascii=False) for one in shape.literals), key=len)
        match shape.kind:
            case "string":
                return f'"{"x" * _length(shape)}"'
            case "array":
                return self._array(shape, depth)
            case "object":
                return self._object(shape, depth)
            case "number" | "integer":
                return _number(shape)
        return "true" if shape.kind == "boolean" else "null"

    def _array(self, shape: Shape, depth: int) -> str | None:
        least = max([0, *shape.keyword("minItems")])
        if not least:
            return "[]"
        first = next(iter(shape.keyword("prefixItems") or [[]]))
        schemas = [*first, next(iter(shape.keyword("items")), {})]
        items: list[str] = []
        for schema in schemas[:least]:
            item = self._value(schema, depth + 1)
            if item is None:
                return None
            items.append(item)
            if sum(map(len, items)) > MAX_STRING:
                break
        # a bound, because the lengths of nested arrays multiply
        items += [items[-1]] * min(least - len(items), MAX_STRING // len(items[-1]) + 1)
        return f"[{', '.join(items)}]"

    def _object(self, shape: Shape, depth: int) -> str | None:
        members: list[str] = []
        for name, schema, is_required in self._analysis.form(shape).properties:
            if is_required:
                value = self._value(schema, depth + 1)
                if value is None:
                    return None
                if len(members) > MAX_STRING or len(value) > MAX_STRING:
                    return value
                members.append(f"{json.dumps(name, ensure_ascii=False)}: {value}")
        return f"{{{', '.join(members)}}}"


def _number(shape: Shape) -> str:
    least = [*shape.keyword("minimum"), *shape.keyword("exclusiveMinimum")]
    most = [*shape.keyword("maximum"), *shape.keyword("exclusiveMaximum")]
    if all(bound <= 0 for bound in least) and all(bound >= 0 for bound in most):
        return "0"
    return max((str(bound) for bound in [*least, *most]), key=len)


def _length(shape: Shape) -> int:
    widths = [_width(pattern) for pattern in shape.keyword("pattern")]
    widths += [20 for _ in shape.keyword("format")]
    widths += map(int, shape.keyword("minLength"))
    return min(max([0, *widths]), MAX_STRING)


def _width(pattern: str) -> int:
    """The fewest characters that a regular expression matches."""
    try:
        width = int(regex_parser.parse(pattern).getwidth()[0])
        return MAX_STRING if width > MAX_STRING else width
    except (ValueError, OverflowError, RecursionError):
        return len(UNKNOWN)
