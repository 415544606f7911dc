"""The tools that a request offers to the model. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import msgspec

from exo_mesh.text.json_schema import KINDS, MAX_STEPS, SchemaError, StandardSchemas, Steps
from exo_mesh.text.schema_shapes import Analysis, Shape


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the client can run. parameters: the JSON schema of its arguments, an object. where: the place of
    that schema in the request."""

    name: str
    description: str
    parameters: dict[str, Any]
    where: str = field(default="tools", compare=False)

    def as_function(self) -> dict[str, Any]:
        """The tool as chat templates expect it, with its keys in a fixed order."""
        function = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": function}


class Allowed(msgspec.Struct, frozen=True):
    """The values that a parameter may have, by its schema."""

    shapes: tuple[Shape, ...]

    @property
    def kinds(self) -> frozenset[str]:
        """The kinds of the values; empty if the schema does not restrict them."""
        found = frozenset(shape.kind for shape in self.shapes)
        is_open = found >= frozenset(KINDS) and all(shape.literals is None for shape in self.shapes)
        return frozenset() if is_open else found


class Parameters:
    """The parameters of a tool.

    schema: the standard schema of the arguments, always an object. steps: bounds the work. forms: the members that a
    call may have; several if the schema has alternatives at its root. Raises SchemaError if the schema cannot be
    analysed.
    """

    def __init__(self, tool: Tool, steps: Steps | None = None) -> None:
        steps = Steps() if steps is None else steps
        self.schema = {**StandardSchemas(tool.parameters, steps).of(tool.parameters), "type": "object"}
        self.analysis = Analysis(self.schema, steps)
        shapes = self.analysis.shapes(self.schema)
        self.forms = tuple(self.analysis.form(shape) for shape in shapes if shape.literals is None)
        self.problems = tuple(self.analysis.problems)
        if len(self.forms) < len(shapes):
            self.problems += ("a whole object as a constant",)

    def allowed(self, schema: Any) -> Allowed:
        """The values that a part of the schema allows. Raises SchemaError."""
        return Allowed(self.analysis.shapes(schema))

    def part(self, schema: Any, kinds: frozenset[str] | None = None) -> dict[str, Any]:
        """A part of the schema as a schema of its own. kinds: if given, only values of these kinds."""
        if kinds is not None:
            schema = {"allOf": [schema, {"type": sorted(kinds)}]}
        return self.analysis.with_defs(schema)

    def closed(self) -> dict[str, Any]:
        """The schema of the arguments; unless it says otherwise, other members than those it names are not allowed."""
        if not any(word in self.schema for word in ("$ref", "allOf", "anyOf", "oneOf")):
            return {"type": "object", "additionalProperties": False, **self.schema}
        if self.problems or any(len(form.clauses) and _has_more(form.clauses) for form in self.forms):
            return self.schema
        made = [
            {
                "type": "object",
                "properties": {name: schema for name, schema, _ in form.properties},
                "required": [name for name, _, is_required in form.properties if is_required],
                "additionalProperties": False,
            }
            for form in self.forms
        ]
        return self.analysis.with_defs(made[0] if len(made) == 1 else {"anyOf": made})


_OF_MEMBERS = frozenset({"additionalProperties", "properties", "required", "type", "unevaluatedProperties"})


def _has_more(clauses: Sequence[dict[str, Any]]) -> bool:
    """Whether the clauses have keywords that a list of members does not express."""
    return any(
        clause.keys() - _OF_MEMBERS or clause.get("additionalProperties", False) is not False for clause in clauses
    )


class Schemas:
    """Finds what the parameters of the tools may be."""

    def __init__(self, tools: Sequence[Tool] = ()) -> None:
        self.names = frozenset(tool.name for tool in tools)
        self._tools = {tool.name: tool for tool in tools}
        self._found: dict[str, dict[str, Allowed]] = {}

    def parameter(self, tool: str, name: str) -> Allowed | None:
        """What a parameter may be; None if the tool or the parameter is unknown."""
        if tool not in self._found:
            self._found[tool] = _allowed_by_name(self._tools[tool]) if tool in self._tools else {}
        return self._found[tool].get(name)


_BROKEN = (SchemaError, RecursionError, TypeError, AttributeError, KeyError)
"""What the analysis of a schema raises. Clients may send any JSON as a schema if no grammar needs it."""


def _allowed_by_name(tool: Tool) -> dict[str, Allowed]:
    """What the parameters may be. If the schema as a whole cannot be analysed, its properties are, each alone; those
    that cannot be are left out, and read as unknown ones. It runs in the event loop, so the work has one bound."""
    with suppress(*_BROKEN):
        return _allowed_in(Parameters(tool, Steps(MAX_STEPS // 2)))
    found: dict[str, Allowed] = {}
    steps = Steps(MAX_STEPS // 2)
    parts = StandardSchemas(tool.parameters, steps)
    listed = tool.parameters.get("properties")
    for name, schema in listed.items() if isinstance(listed, dict) else ():
        if steps.are_spent:
            break
        with suppress(*_BROKEN):
            part = parts.of(schema)
            found[name] = Allowed(Analysis(part, steps).shapes(part))
    return found


def _allowed_in(parameters: Parameters) -> dict[str, Allowed]:
    found: dict[str, Allowed] = {}
    for form in parameters.forms:
        for name, schema, _ in form.properties:
            earlier = found[name].shapes if name in found else ()
            found[name] = Allowed(earlier + parameters.allowed(schema).shapes)
    return found
