"""Brings JSON schemas into a standard form: references resolved, neutral keywords left out. Pure."""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import unquote, urldefrag, urljoin

KINDS = ("null", "boolean", "number", "string", "array", "object")
"""The types of JSON values. A shape may also have the kind "integer", a part of "number"."""

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
ANYTHING: tuple[Any, ...] = (True, {})
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "additionalItems": ANYTHING,
    "allOf": ([],),
    "contentEncoding": ("",),
    "contentMediaType": ("",),
    "dependencies": ({},),
    "dependentRequired": ({},),
    "dependentSchemas": ({},),
    "format": ("",),
    "items": ANYTHING,
    "minItems": (0,),
    "minLength": (0,),
    "minProperties": (0,),
    "not": (False, {"not": {}}, {"not": True}),
    "pattern": ("",),
    "patternProperties": ({},),
    "prefixItems": ([],),
    "propertyNames": (*ANYTHING, {"type": "string"}),
    "required": ([],),
    "unevaluatedItems": ANYTHING,
    "unevaluatedProperties": ANYTHING,
    "uniqueItems": (False,),
}
"""The values of keywords that allow everything, so a grammar need not know these keywords."""

COMBINED = ("$ref", "allOf", "anyOf", "oneOf")


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
    if any(word in made for word in (*COMBINED, "const", "if", "not")):
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
        word in made for word in (*COMBINED, "additionalProperties", "dependentSchemas", "if")
    ):
        made["additionalProperties"] = made.pop("unevaluatedProperties")
    denied = made.get("not")
    if isinstance(denied, dict) and denied.keys() == {"type"} and "type" not in made and "integer" not in str(denied):
        other = kinds_of(made.pop("not")["type"])
        made["type"] = [kind for kind in KINDS if kind not in other]


def kinds_of(wanted: Any) -> frozenset[str]:
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


def _may_be_text(made: Any) -> bool:
    """Whether a schema may allow a string, as far as is known without its references."""
    if not isinstance(made, dict):
        return made is not False
    kinds, listed = made.get("type"), [made["const"]] if "const" in made else made.get("enum")
    if kinds is not None and "string" not in (kinds if isinstance(kinds, list) else [kinds]):
        return False
    if isinstance(listed, list) and not any(isinstance(one, str) for one in listed):
        return False
    return all(map(_may_be_text, as_list(made.get("allOf")))) and all(
        any(map(_may_be_text, made[word])) for word in ("anyOf", "oneOf") if isinstance(made.get(word), list)
    )


def as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
