"""The tools that a request offers to the model. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the client can run. parameters: the JSON schema of its arguments, an object."""

    name: str
    description: str
    parameters: dict[str, Any]

    def as_function(self) -> dict[str, Any]:
        """The tool as chat templates expect it, with its keys in a fixed order."""
        function = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": function}


class Schemas:
    """Finds the schema of a tool's parameter."""

    def __init__(self, tools: Sequence[Tool] = ()) -> None:
        self.names = frozenset(tool.name for tool in tools)
        self._parameters = {tool.name: tool.parameters for tool in tools}

    def parameter(self, tool: str, name: str) -> dict[str, Any] | None:
        """The JSON schema of one parameter; None if the tool or the parameter is unknown."""
        properties = self._parameters.get(tool, {}).get("properties")
        schema = properties.get(name) if isinstance(properties, dict) else None
        return schema if isinstance(schema, dict) else None
