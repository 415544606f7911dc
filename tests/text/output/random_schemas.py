"""Random schemas of tools, with values that they allow."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

STRINGS = (
    "", "a", "red", "Rome", "a b", "5", "-1.5", "1e3", "007", "true", "False", "null", "None", "nil", "yes", '"q"', '"',
    "'x'", "{", "{'a': 1}", '{"a": 1}', "[1]", "[x", "(1,)", "a\nb", "\n", " lead", "tail ", "\ttab", "Grüße 🙂", "\\",
    "\\n", "\\\"", "a\x7fb", "\u2028", "</parameter>", "a</parameter", "</function>", "<parameter=x>", "</param>",
    "]]>", "<![CDATA[x", "</arg_value>", "<arg_key>", "</longcat_arg_value>", "</tool_call>", '<|"|>', "<escape>",
    "</｜DSML｜parameter>", "<|close|>argument<|sep|>", "</atem:parameter>",
    "}", "]", ")", ",", "a=1, b=2", "&quot;", "&amp;", "x" * 40, "ａ１", "٣", "#", "a#b", "<", "\x01",
)  # fmt: skip
NUMBERS = (0, 1, -1, 5, 42, 10**20, -(10**18), 3.5, -0.25, 1e22, 5.0, 1e-9)
NAMES = (
    "a",
    "city",
    "from",
    "class",
    "user_id",
    "x1",
    "Größe",
    "type",
    "properties",
    "name",
    "arguments",
    "a.b",
    "a-b",
)

Make = Callable[[], Any]


@dataclass
class Drawn:
    """A schema, a function that draws a value which it allows, and the kinds of its values ("any" without a type)."""

    schema: Any
    make: Make
    kinds: frozenset[str]


class Schemas:
    """Draws schemas for one tool. `defs` are the definitions that they refer to."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.defs: dict[str, Any] = {}
        self._drawn: dict[str, Drawn] = {}

    def parameters(self) -> tuple[dict[str, Any], list[tuple[str, Drawn, bool]]]:
        """(the schema of a tool's parameters, its members)."""
        names = self.draw.sample(NAMES, self.draw.randint(0, 4))
        members = [(name, self.any(2), self.draw.random() < 0.6) for name in names]
        schema: dict[str, Any] = {"type": "object", "properties": {name: drawn.schema for name, drawn, _ in members}}
        if required := [name for name, _, needed in members if needed]:
            schema["required"] = required
        for word, value in (
            ("additionalProperties", False),
            ("title", "T"),
            ("$schema", "https://json-schema.org/draft/2020-12/schema"),
            ("minProperties", 0),
        ):
            if self.draw.random() < 0.1:
                schema[word] = value
        if self.defs:
            schema["$defs"] = self.defs
        if self.draw.random() < 0.1:  # the root refers to a definition
            defs = schema.pop("$defs", {})
            schema = {"$ref": "#/$defs/The~1root", "$defs": {**defs, "The/root": schema}}
        return schema, members

    def any(self, depth: int) -> Drawn:
        """A schema of any form."""
        forms = [self.null, self.boolean, self.number, self.integer, self.string, self.string, self.enum, self.const]
        if depth > 0:
            forms += [
                *(partial(form, depth) for form in (self.array, self.object, self.any_of, self.all_of, self.reference)),
                *(self.one_of, self.types, self.optional, self.untyped),
            ]
        drawn = self.draw.choice(forms)()
        if isinstance(drawn.schema, dict) and self.draw.random() < 0.3:
            neutral = self.draw.choice(
                [("uniqueItems", False), ("minItems", 0), ("minLength", 0), ("not", False), ("description", "d"),
                 ("default", None), ("examples", [1]), ("additionalItems", True), ("pattern", ""),
                 ("x-y", {}), ("dependentRequired", {}), ("$comment", ""), ("propertyNames", {}), ("readOnly", True)]
            )  # fmt: skip
            if neutral[0] not in drawn.schema:
                drawn = Drawn({**drawn.schema, neutral[0]: neutral[1]}, drawn.make, drawn.kinds)
        return drawn

    def null(self) -> Drawn:
        return Drawn({"type": "null"}, lambda: None, frozenset({"null"}))

    def boolean(self) -> Drawn:
        return Drawn({"type": "boolean"}, lambda: self.draw.random() < 0.5, frozenset({"boolean"}))

    def number(self) -> Drawn:
        if self.draw.random() < 0.3:
            schema = {"type": "number", "minimum": -2, "maximum": 8}
            return Drawn(schema, lambda: self.draw.choice([-2, 0, 0.5, 8, 3.25]), frozenset({"number"}))
        return Drawn({"type": "number"}, lambda: self.draw.choice(NUMBERS), frozenset({"number"}))

    def integer(self) -> Drawn:
        if self.draw.random() < 0.3:
            return Drawn(
                {"type": "integer", "minimum": 1, "maximum": 12},
                lambda: self.draw.randint(1, 12),
                frozenset({"integer"}),
            )
        whole = [one for one in NUMBERS if isinstance(one, int)]
        return Drawn({"type": "integer"}, lambda: self.draw.choice(whole), frozenset({"integer"}))

    def string(self) -> Drawn:
        kind, kinds = self.draw.random(), frozenset({"string"})
        if kind < 0.15:
            short = [one for one in STRINGS if 1 <= len(one) <= 4]
            return Drawn({"type": "string", "minLength": 1, "maxLength": 4}, lambda: self.draw.choice(short), kinds)
        if kind < 0.25:
            values = ["ab", "abb", "x1"]
            return Drawn({"type": "string", "pattern": "^ab+$|^x[0-9]$"}, lambda: self.draw.choice(values), kinds)
        if kind < 0.3:
            return Drawn({"type": "string", "pattern": "b/c"}, lambda: self.draw.choice(["b/c", "a b/c d"]), kinds)
        return Drawn({"type": "string"}, lambda: self.draw.choice(STRINGS), kinds)

    def enum(self) -> Drawn:
        values = [
            self.draw.choice([*STRINGS[:30], *STRINGS[:30], 1, 2, 2.5, True, None])
            for _ in range(self.draw.randint(1, 4))
        ]
        made = {"enum": values}
        if all(isinstance(one, str) for one in values) and self.draw.random() < 0.5:
            made["type"] = "string"  # type: ignore[assignment]
        return Drawn(made, lambda: self.draw.choice(values), frozenset(map(kind_of, values)))

    def const(self) -> Drawn:
        value = self.draw.choice([5, "x", "5", None, True, [1, "a"], {"k": "v"}, 2.5, ""])
        return Drawn({"const": value}, lambda: value, frozenset({kind_of(value)}))

    def array(self, depth: int) -> Drawn:
        items = self.any(depth - 1)
        least, most = self.draw.choice([(0, 3), (0, 3), (1, 2), (2, 2)])
        schema: dict[str, Any] = {"type": "array", "items": items.schema}
        if (least, most) != (0, 3):
            schema |= {"minItems": least, "maxItems": most}
        return Drawn(
            schema, lambda: [items.make() for _ in range(self.draw.randint(least, most))], frozenset({"array"})
        )

    def object(self, depth: int) -> Drawn:
        names = self.draw.sample(NAMES, self.draw.randint(1, 3))
        members = [(name, self.any(depth - 1), self.draw.random() < 0.5) for name in names]
        schema = {
            "type": "object",
            "properties": {name: drawn.schema for name, drawn, _ in members},
            "required": [name for name, _, needed in members if needed],
        }
        return Drawn(schema, lambda: self.members(members), frozenset({"object"}))

    def members(self, members: list[tuple[str, Drawn, bool]]) -> dict[str, Any]:
        """Values of members; some of the optional ones are left out."""
        return {name: drawn.make() for name, drawn, needed in members if needed or self.draw.random() < 0.5}

    def any_of(self, depth: int) -> Drawn:
        parts = [self.any(depth - 1) for _ in range(self.draw.randint(1, 3))]
        return Drawn({"anyOf": [part.schema for part in parts]}, *self._one(parts))

    def _one(self, parts: list[Drawn]) -> tuple[Make, frozenset[str]]:
        return lambda: self.draw.choice(parts).make(), frozenset().union(*(part.kinds for part in parts))

    def one_of(self) -> Drawn:
        parts = self.draw.sample([self.string(), self.integer(), self.boolean(), self.null()], 2)
        return Drawn({"oneOf": [part.schema for part in parts]}, *self._one(parts))

    def all_of(self, depth: int) -> Drawn:
        part = self.any(depth - 1)
        return Drawn({"allOf": [part.schema, {"description": "more"}]}, part.make, part.kinds)

    def types(self) -> Drawn:
        parts = self.draw.sample([Drawn({"type": "string"}, lambda: self.draw.choice(STRINGS), frozenset({"string"})),
                                  Drawn({"type": "integer"}, lambda: self.draw.randint(-9, 9), frozenset({"integer"})),
                                  self.boolean(), self.null()], 2)  # fmt: skip
        return Drawn({"type": [part.schema["type"] for part in parts]}, *self._one(parts))

    def optional(self) -> Drawn:
        part = self.any(0)
        return Drawn(
            {"anyOf": [part.schema, {"type": "null"}], "default": None},
            lambda: part.make() if self.draw.random() < 0.6 else None,
            part.kinds | {"null"},
        )

    def untyped(self) -> Drawn:
        return Drawn({}, lambda: self.draw.choice(["text", "a b", {"k": 1}]), frozenset({"any"}))

    def reference(self, depth: int) -> Drawn:
        name = self.draw.choice(["Point", "a/b", "t~x", "per cent%", "Node"])
        if name == "Node":
            self.defs["Node"] = {
                "type": "object",
                "properties": {
                    "v": {"type": "integer"},
                    "next": {"anyOf": [{"$ref": "#/$defs/Node"}, {"type": "null"}]},
                },
                "required": ["v", "next"],
            }
            return Drawn({"$ref": "#/$defs/Node"}, self.node, frozenset({"object"}))
        if name not in self._drawn:
            self._drawn[name] = self.boolean()  # until it is drawn, so that it does not refer to itself
            self.defs[name] = {"type": "boolean"}
            drawn = self.any(depth - 1)
            name += "+"
            self._drawn[name] = drawn
            self.defs[name] = drawn.schema
        pointer = name.replace("~", "~0").replace("/", "~1").replace("%", "%25").replace(" ", "%20")
        found = self._drawn[name]
        return Drawn({"$ref": f"#/$defs/{pointer}"}, found.make, found.kinds)

    def node(self) -> dict[str, Any]:
        """A list of nodes."""
        return {"v": self.draw.randint(0, 9), "next": self.node() if self.draw.random() < 0.3 else None}


def kind_of(value: Any) -> str:
    """The type of a value in JSON Schema; integers are numbers."""
    names = {type(None): "null", bool: "boolean", int: "number", float: "number", str: "string", list: "array"}
    return names.get(type(value), "object")
