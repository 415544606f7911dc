"""Finds the shapes of the values that a standard JSON schema allows, for grammars and for readers alike. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from typing import Any

import msgspec
from msgspec.structs import replace

from exo_mesh.text.json_schema import ANYTHING, COMBINED, KINDS, PART_STEPS, SchemaError, Steps, as_list, kinds_of

MAX_SHAPES = 64
"""Most alternatives that the analysis of a schema keeps apart."""


class Shape(msgspec.Struct, frozen=True):
    """Values of one kind that a schema allows. literals: if given, only these. clauses: schemas without combinations
    such as anyOf, all of which apply."""

    kind: str
    literals: tuple[Any, ...] | None = None
    clauses: tuple[dict[str, Any], ...] = ()

    def keyword(self, word: str) -> list[Any]:
        """The values of a keyword in all clauses."""
        return [clause[word] for clause in self.clauses if word in clause]


class Form(msgspec.Struct, frozen=True):
    """A set of members that an object may have. properties: (name, schema, whether it is required)."""

    properties: tuple[tuple[str, Any, bool], ...]
    clauses: tuple[dict[str, Any], ...] = ()


def kind_of(value: Any) -> str:
    """The kind of a JSON value."""
    if isinstance(value, bool | None):
        return "null" if value is None else "boolean"
    kinds = {int: "number", float: "number", str: "string", list: "array"}
    return next((kind for one, kind in kinds.items() if isinstance(value, one)), "object")


def is_integral(value: Any) -> bool:
    """Whether a number is an integer; 5.0 is one."""
    return isinstance(value, int) or (isinstance(value, float) and value.is_integer())


class Analysis:
    """Finds what a schema allows. schema: a standard schema. steps: bounds the work. problems: what a grammar of the
    shapes would not enforce.

    Raises SchemaError where a schema has too many alternatives or parts, or is a circle of references.
    """

    def __init__(self, schema: dict[str, Any], steps: Steps | None = None) -> None:
        self.schema = schema
        self.problems: list[str] = []
        self._steps = Steps() if steps is None else steps
        self._known: dict[str, tuple[Shape, ...]] = {}
        self._defs = schema.get("$defs", {})

    def shapes(self, schema: Any, seen: frozenset[str] = frozenset()) -> tuple[Shape, ...]:
        """The shapes of the values that a part of the schema allows."""
        self._steps.spend(PART_STEPS)
        if not isinstance(schema, dict):
            return () if schema is False else tuple(Shape(kind) for kind in KINDS)
        found = _own_shapes({word: value for word, value in schema.items() if word not in (*COMBINED, "$defs")})
        if "$ref" in schema:
            name = str(schema["$ref"]).removeprefix("#/$defs/")
            if name in seen or name not in self._defs:
                raise SchemaError(f"{json.dumps(schema['$ref'])} cannot be resolved")
            if name not in self._known:
                self._known[name] = self.shapes(self._defs[name], seen | {name})
            found = self._both(found, self._known[name])
        for part in as_list(schema.get("allOf")):
            found = self._both(found, self.shapes(part, seen))
        for word in ("anyOf", "oneOf"):
            if word in schema:
                parts = [self.shapes(part, seen) for part in as_list(schema[word])]
                found = self._both(found, self._one_of(parts, word))
        return tuple(found)

    def _both(self, first: Sequence[Shape], second: Sequence[Shape]) -> list[Shape]:
        """The shapes of the values that are in both."""
        found = []
        for a in first:
            for b in second:
                self._steps.spend(_cost(a, b))
                if (shape := _meet(a, b)) is not None:
                    found.append(shape)
        if len(found) > MAX_SHAPES:
            raise SchemaError("the schema has too many alternatives")
        return found

    def _one_of(self, parts: Sequence[tuple[Shape, ...]], word: str) -> list[Shape]:
        """The shapes of a list of alternatives. Alternatives that are only literals count as one."""
        others = [part for part in parts if any(shape.literals is None for shape in part)]
        if len(others) > MAX_SHAPES:
            raise SchemaError("the schema has too many alternatives")
        literals = _merged([shape for part in parts if part not in others for shape in part])
        if word == "oneOf":
            every = [*others, *([tuple(literals)] if literals else [])]
            listed = [_written(one) for shape in literals for one in shape.literals or ()]
            if len(set(listed)) < len(listed) or not all(self._exclude(a, b) for a, b in combinations(every, 2)):
                self.problems.append('"oneOf" whose alternatives are not known to exclude each other')
        found = [*literals, *(shape for part in others for shape in part)]
        return _without_covered(found) if word == "anyOf" else found

    def _exclude(self, first: Iterable[Shape], second: Sequence[Shape]) -> bool:
        """Whether no value can be in both alternatives of a `oneOf`."""
        for a in first:
            for b in second:
                self._steps.spend(_cost(a, b))
                if _meet(a, b) is not None and not self._differ_in_member(a, b):
                    return False
        return True

    def _differ_in_member(self, first: Shape, second: Shape) -> bool:
        """Whether both are objects with a required member whose literals differ."""
        if first.kind != "object" or first.literals is not None or second.literals is not None:
            return False
        members = [
            {name: self.shapes(inner) for name, inner, needed in self.form(one).properties if needed}
            for one in (first, second)
        ]
        shared = members[0].keys() & members[1].keys()
        return any(
            _meet(a, b) is None and None not in (a.literals, b.literals)
            for name in shared
            for a, b in [(_only(members[0][name]), _only(members[1][name]))]
        )

    def form(self, shape: Shape) -> Form:
        """The members of the objects of a shape, in the order of the schema."""
        schemas: dict[str, list[Any]] = {}
        for properties in shape.keyword("properties"):
            for name, inner in properties.items() if isinstance(properties, dict) else ():
                schemas.setdefault(name, []).append(inner)
        required = [name for names in shape.keyword("required") for name in as_list(names) if isinstance(name, str)]
        for name in required:
            schemas.setdefault(name, [])
        self._steps.spend(len(shape.clauses) * len(schemas))
        for clause in shape.clauses:
            for name, parts in schemas.items():
                parts += _of_others(clause, name)
        kept = {name: _all_of(parts) for name, parts in schemas.items()}
        return Form(tuple((name, kept[name], name in required) for name in kept), shape.clauses)

    def with_defs(self, schema: Any) -> dict[str, Any]:
        """A part of the schema, with the definitions that its references need."""
        made = dict(schema) if isinstance(schema, dict) else {} if schema else {"enum": []}
        needed: dict[str, Any] = {}
        waiting: list[Any] = [made]
        while waiting:
            for name in _references(waiting.pop()):
                if name in self._defs and name not in needed:
                    needed[name] = self._defs[name]
                    waiting.append(needed[name])
        return {**made, "$defs": needed} if needed else made


def _of_others(clause: Mapping[str, Any], name: str) -> list[Any]:
    """What a clause says of a member that it does not name. Patterns are not tried: they are the client's."""
    listed = clause.get("properties")
    if "patternProperties" in clause or (isinstance(listed, dict) and name in listed):
        return []
    return [clause.get("additionalProperties", {})]


def _references(schema: Any) -> Iterable[str]:
    if isinstance(schema, dict):
        if isinstance(schema.get("$ref"), str):
            yield schema["$ref"].removeprefix("#/$defs/")
        for word, inner in schema.items():
            if word != "$defs":
                yield from _references(inner)
    elif isinstance(schema, list):
        for inner in schema:
            yield from _references(inner)


def _only(shapes: Sequence[Shape]) -> Shape:
    """The shape, if there is exactly one; else a shape that anything may meet."""
    return shapes[0] if len(shapes) == 1 else Shape("")


def _all_of(parts: Sequence[Any]) -> Any:
    real = [part for part in parts if part not in ANYTHING]
    return {"allOf": real} if len(real) > 1 else real[0] if real else {}


def _merged(shapes: Iterable[Shape]) -> list[Shape]:
    """Shapes of literals with the same clauses as one."""
    found: dict[str, list[Shape]] = {}
    for shape in shapes:
        found.setdefault(json.dumps([shape.kind, shape.clauses]), []).append(shape)
    return [
        replace(same[0], literals=tuple(one for shape in same for one in shape.literals or ()))
        for same in found.values()
    ]


def _own_shapes(schema: Mapping[str, Any]) -> list[Shape]:
    kinds = kinds_of(schema.get("type"))
    clause = {word: value for word, value in schema.items() if word not in ("const", "enum", "type")}
    clauses = (clause,) if clause else ()
    listed = [schema["const"]] if "const" in schema else schema.get("enum")
    if not isinstance(listed, list):
        return [Shape(kind, None, clauses) for kind in (*KINDS, "integer") if kind in kinds]
    if "const" in schema and isinstance(schema.get("enum"), list):
        listed = [one for one in listed if _written(one) in map(_written, schema["enum"])]
    made = []
    for kind in KINDS:
        literals = tuple(one for one in listed if kind_of(one) == kind)
        if kind == "number" and "integer" in kinds:
            literals = tuple(filter(is_integral, literals))
        if literals and (kind in kinds or (kind == "number" and "integer" in kinds)):
            made.append(Shape(kind, literals, clauses))
    return made


def _without_covered(shapes: Sequence[Shape]) -> list[Shape]:
    """Leaves out shapes whose values another shape allows as well because it allows every value of its kind."""
    whole = {shape.kind: shape for shape in shapes if shape.literals is None and not shape.clauses}
    return [*whole.values(), *(shape for shape in shapes if shape.kind not in whole)]


def _cost(first: Shape, second: Shape) -> int:
    """The steps for finding the values that are in both shapes."""
    if first.kind != second.kind and {first.kind, second.kind} != {"integer", "number"}:
        return 1
    num_literals = len(first.literals or ()) + len(second.literals or ())
    return (1 + len(first.clauses)) * (1 + len(second.clauses)) + 10 * num_literals


def _meet(first: Shape, second: Shape) -> Shape | None:
    """The values that are in both shapes; None if there are none."""
    kinds = {first.kind, second.kind}
    if len(kinds) > 1 and kinds != {"integer", "number"} and "" not in kinds:
        return None
    clauses = first.clauses + tuple(clause for clause in second.clauses if clause not in first.clauses)
    kind = "integer" if "integer" in kinds else first.kind
    lists = [one.literals for one in (first, second) if one.literals is not None]
    if not lists:
        return Shape(kind, None, clauses)
    literals = lists[0]
    if len(lists) == 2:
        other = set(map(_written, lists[1]))
        literals = tuple(one for one in literals if _written(one) in other)
    if kind == "integer":
        kind, literals = "number", tuple(filter(is_integral, literals))
    return Shape(kind, literals, clauses) if literals else None


def _written(value: Any) -> str:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return json.dumps(value, sort_keys=True)
