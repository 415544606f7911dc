"""Analyses JSON schemas, once for the grammars that enforce them and for the readers of what a model writes. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any
from urllib.parse import unquote, urldefrag, urljoin

KINDS = ("null", "boolean", "number", "string", "array", "object")
"""The types of JSON values. A shape may also have the kind "integer", a part of "number"."""

MAX_SHAPES = 64
"""Most alternatives that the analysis of a schema keeps apart."""

MAX_STEPS = 400_000
"""Most comparisons of one analysis, 0.5 us each; a plain part of a schema takes about 40. References and combinations
can multiply the parts without end."""

PART_STEPS = 10
"""Steps for reading one part of a schema."""

_OTHER_NAMES = {
    "string": ("str", "text", "varchar", "char", "enum"),
    "integer": ("int", "uint", "long", "short", "unsigned"),
    "number": ("num", "float", "double", "decimal"),
    "boolean": ("bool", "binary"),
    "array": ("arr", "list"),
    "object": ("obj", "dict"),
}
"""Beginnings of names of types that schemas outside the standard use."""

_ONE = frozenset({"additionalItems", "additionalProperties", "contains", "else", "if", "items", "not", "propertyNames",
                  "then", "unevaluatedItems", "unevaluatedProperties"})  # fmt: skip
_LISTS = frozenset({"allOf", "anyOf", "items", "oneOf", "prefixItems"})
_MAPS = frozenset({"dependencies", "dependentSchemas", "patternProperties", "properties"})
_NOTES = frozenset({"$anchor", "$comment", "$defs", "$id", "$schema", "$vocabulary", "default", "definitions",
                    "deprecated", "description", "examples", "nullable", "readOnly", "title", "writeOnly"})  # fmt: skip
_ALL: tuple[Any, ...] = (True, {})
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "additionalItems": _ALL,
    "allOf": ([],),
    "contentEncoding": ("",),
    "contentMediaType": ("",),
    "dependencies": ({},),
    "dependentRequired": ({},),
    "dependentSchemas": ({},),
    "format": ("",),
    "items": _ALL,
    "minItems": (0,),
    "minLength": (0,),
    "minProperties": (0,),
    "not": (False, {"not": {}}, {"not": True}),
    "pattern": ("",),
    "patternProperties": ({},),
    "prefixItems": ([],),
    "propertyNames": (*_ALL, {"type": "string"}),
    "required": ([],),
    "unevaluatedItems": _ALL,
    "unevaluatedProperties": _ALL,
    "uniqueItems": (False,),
}
"""The values of keywords that allow everything, so a grammar need not know these keywords."""

_COMBINED = ("$ref", "allOf", "anyOf", "oneOf")


class SchemaError(ValueError):
    """The schema cannot be analysed. The text says why."""


class Steps:
    """Bounds the work of one analysis, or of several together."""

    def __init__(self, most: int = MAX_STEPS) -> None:
        self._left = most

    @property
    def are_spent(self) -> bool:
        """Whether no work is allowed any more."""
        return self._left < 0

    def spend(self, number: int) -> None:
        """Count steps. Raises SchemaError if there were too many."""
        self._left -= number
        if self._left < 0:
            raise SchemaError("the schema has too many parts")


def standard_schema(schema: dict[str, Any]) -> dict[str, Any]:
    """The same schema without notes, nulls and keywords that allow everything.

    `nullable: true` becomes the type null. Each `$ref` points to a member of the `$defs` at the root, whatever it was:
    a pointer, an anchor or an `$id`. Raises SchemaError for a reference that leads nowhere inside the schema;
    references to other documents stay.
    """
    return StandardSchemas(schema).of(schema)


class StandardSchemas:
    """Makes standard schemas of a schema and of its parts. steps: bounds the work; without it, all is done."""

    def __init__(self, root: dict[str, Any], steps: Steps | None = None) -> None:
        self._root = root
        self._steps = steps
        self._base = root["$id"] if isinstance(root.get("$id"), str) else ""
        self._ids: dict[str, Any] | None = None
        self._names: dict[int, str] = {}
        self._waiting: list[tuple[str, Any, str]] = []
        self._found: dict[str, Any] = {}

    def of(self, part: Any) -> dict[str, Any]:
        """The standard schema of a part, see standard_schema. Raises SchemaError."""
        made = self._schema(part, self._base)
        made = made if isinstance(made, dict) else {} if made else {"enum": []}
        while self._waiting:
            name, node, base = self._waiting.pop()
            self._found[name] = self._schema(node, base)
        return {**made, "$defs": self._found} if self._found else made

    def _schema(self, schema: Any, base: str) -> Any:
        if self._steps is not None:
            self._steps.spend(PART_STEPS)
        if not isinstance(schema, dict):
            return schema
        if isinstance(schema.get("$id"), str):
            base = urljoin(base, schema["$id"])
        made = {}
        for word, value in schema.items():
            if word in _NOTES or (value is None and word != "const"):
                continue
            value = self._value(word, value, base)
            if not any(value == neutral for neutral in _NEUTRAL.get(word, ())):
                made[word] = value
        _drop_idle(made)
        if schema.get("nullable") is True:
            _allow_null(made)
        return made

    def _value(self, word: str, value: Any, base: str) -> Any:
        if word == "$ref" and isinstance(value, str):
            return self._reference(value, base)
        if word in _MAPS and isinstance(value, dict):
            return {name: self._schema(inner, base) for name, inner in value.items()}
        if word in _LISTS and isinstance(value, list):
            return [self._schema(inner, base) for inner in value]
        if word in _ONE:
            return self._schema(value, base)
        if word == "dependentRequired" and isinstance(value, dict):
            return {name: needed for name, needed in value.items() if needed != []}
        return int(value) if isinstance(value, float) and value.is_integer() and word[:3] in ("min", "max") else value

    def _reference(self, reference: str, base: str) -> str:
        uri, fragment = urldefrag(urljoin(base, reference))
        if self._ids is None:
            self._ids = {"": self._root, self._base.rstrip("#"): self._root}
            self._collect(self._root, self._base)
        if uri not in self._ids:
            return reference  # another document
        node = self._ids[uri]
        if fragment.startswith("/"):
            node = _at_pointer(node, fragment, reference)
        elif fragment:
            node = self._ids.get(f"{uri}#{fragment}")
        if not isinstance(node, dict | bool):
            raise SchemaError(f'"$ref" {json.dumps(reference)} does not exist in the schema')
        if id(node) not in self._names:
            self._names[id(node)] = f"d{len(self._names)}"
            self._waiting.append((self._names[id(node)], node, uri))
        return f"#/$defs/{self._names[id(node)]}"

    def _collect(self, node: Any, base: str) -> None:
        """Find the schemas that have an `$id` or an `$anchor`."""
        assert self._ids is not None
        if self._steps is not None:
            self._steps.spend(1)
        if isinstance(node, dict):
            if isinstance(node.get("$id"), str):
                base = urljoin(base, node["$id"])
                self._ids[base] = node
            if isinstance(node.get("$anchor"), str):
                self._ids[f"{base}#{node['$anchor']}"] = node
        for inner in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
            self._collect(inner, base)


def _at_pointer(node: Any, pointer: str, reference: str) -> Any:
    for part in unquote(pointer).split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(node, dict) and name in node:
            node = node[name]
        elif isinstance(node, list) and name.isdecimal() and int(name) < len(node):
            node = node[int(name)]
        else:
            raise SchemaError(f'"$ref" {json.dumps(reference)} does not exist in the schema')
    return node


def _allow_null(made: dict[str, Any]) -> None:
    if any(word in made for word in (*_COMBINED, "const", "if", "not")):
        inner = dict(made)
        made.clear()
        made["anyOf"] = [inner, {"type": "null"}]
        return
    kinds = [made["type"]] if isinstance(made.get("type"), str) else made.get("type")
    if isinstance(kinds, list) and "null" not in kinds:
        made["type"] = [*kinds, "null"]
    if isinstance(made.get("enum"), list) and None not in made["enum"]:
        made["enum"] = [*made["enum"], None]


def _drop_idle(made: dict[str, Any]) -> None:
    """Drop or replace keywords that have no effect beside the others."""
    if "if" not in made or not ("then" in made or "else" in made):
        for word in ("if", "then", "else"):
            made.pop(word, None)
    if made.get("minContains") == 0 and "maxContains" not in made:
        made.pop("contains", None)
    if "contains" not in made:
        made.pop("minContains", None)
        made.pop("maxContains", None)
    if not isinstance(made.get("items"), list):
        made.pop("additionalItems", None)
    if "format" in made and not _may_be_text(made):
        del made["format"]  # "int32" and its like
    if made.get("unevaluatedProperties") is False and not any(
        word in made for word in (*_COMBINED, "additionalProperties", "dependentSchemas", "if")
    ):
        made["additionalProperties"] = made.pop("unevaluatedProperties")
    denied = made.get("not")
    if isinstance(denied, dict) and denied.keys() == {"type"} and "type" not in made and "integer" not in str(denied):
        other = _kinds_of(made.pop("not")["type"])
        made["type"] = [kind for kind in KINDS if kind not in other]


def _may_be_text(made: Any) -> bool:
    """Whether a schema may allow a string, as far as is known without its references."""
    if not isinstance(made, dict):
        return made is not False
    kinds, listed = made.get("type"), [made["const"]] if "const" in made else made.get("enum")
    if kinds is not None and "string" not in (kinds if isinstance(kinds, list) else [kinds]):
        return False
    if isinstance(listed, list) and not any(isinstance(one, str) for one in listed):
        return False
    return all(map(_may_be_text, _listed(made.get("allOf")))) and all(
        any(map(_may_be_text, made[word])) for word in ("anyOf", "oneOf") if isinstance(made.get(word), list)
    )


@dataclass(frozen=True, slots=True)
class Shape:
    """Values of one kind that a schema allows. literals: if given, only these. clauses: schemas without combinations
    such as anyOf, all of which apply."""

    kind: str
    literals: tuple[Any, ...] | None = None
    clauses: tuple[dict[str, Any], ...] = ()

    def keyword(self, word: str) -> list[Any]:
        """The values of a keyword in all clauses."""
        return [clause[word] for clause in self.clauses if word in clause]


@dataclass(frozen=True, slots=True)
class Form:
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


def _kinds_of(wanted: Any) -> frozenset[str]:
    """The kinds that the keyword `type` allows; all for names that nobody knows."""
    found = set()
    for name in [wanted] if isinstance(wanted, str) else wanted if isinstance(wanted, list) else ():
        name = str(name).strip().lower()
        if name in KINDS or name == "integer":
            found.add(name)
        else:
            others = (kind for kind, names in _OTHER_NAMES.items() if name.startswith(names))
            found |= {next(others, "")} - {""} or set(KINDS)
    return frozenset(found - {"integer"} if "number" in found else found) or frozenset(KINDS)


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
        found = _own_shapes({word: value for word, value in schema.items() if word not in (*_COMBINED, "$defs")})
        if "$ref" in schema:
            name = str(schema["$ref"]).removeprefix("#/$defs/")
            if name in seen or name not in self._defs:
                raise SchemaError(f"{json.dumps(schema['$ref'])} cannot be resolved")
            if name not in self._known:
                self._known[name] = self.shapes(self._defs[name], seen | {name})
            found = self._both(found, self._known[name])
        for part in _listed(schema.get("allOf")):
            found = self._both(found, self.shapes(part, seen))
        for word in ("anyOf", "oneOf"):
            if word in schema:
                parts = [self.shapes(part, seen) for part in _listed(schema[word])]
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
        """The shapes of a list of alternatives. Those that are only literals count as one."""
        others = [part for part in parts if any(shape.literals is None for shape in part)]
        if len(others) > MAX_SHAPES:
            raise SchemaError("the schema has too many alternatives")
        literals = _merged([shape for part in parts if part not in others for shape in part])
        if word == "oneOf":
            every = [*others, *([tuple(literals)] if literals else [])]
            listed = [_written(one) for shape in literals for one in shape.literals or ()]
            if len(set(listed)) < len(listed) or not all(self._exclude(a, b) for a, b in combinations(every, 2)):
                self.problems.append('"oneOf" whose alternatives are not known to exclude each other')
        return [*literals, *(shape for part in others for shape in part)]

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
        required = [name for names in shape.keyword("required") for name in _listed(names) if isinstance(name, str)]
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


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _only(shapes: Sequence[Shape]) -> Shape:
    """The shape, if there is one alone; else one that anything may meet."""
    return shapes[0] if len(shapes) == 1 else Shape("")


def _all_of(parts: Sequence[Any]) -> Any:
    real = [part for part in parts if part not in _ALL]
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
    kinds = _kinds_of(schema.get("type"))
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
