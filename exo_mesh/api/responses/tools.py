"""Decodes tools and the choice among them. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal

import msgspec

from exo_mesh.api.core.checks import check_num_tools
from exo_mesh.api.core.neutral_fields import refuse_unless, show_json
from exo_mesh.api.core.request import ToolChoice
from exo_mesh.api.decoding import convert_part
from exo_mesh.api.responses.turns import INPUT, model_name
from exo_mesh.errors import InputError
from exo_mesh.text.output.tools import Tool


class FunctionTool(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A function of the client. strict has no effect, because enforced calls always follow the schema."""

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    defer_loading: bool | None = None
    allowed_callers: list[str] | None = None
    is_async: bool | None = msgspec.field(name="async", default=None)
    output_schema: dict[str, Any] | None = None


class CustomForm(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The form of a custom tool's input."""

    type: Literal["text", "grammar"]
    syntax: Literal["lark", "regex"] | None = None
    definition: str | None = None


class CustomTool(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A tool of the client that gets one text. format: a grammar is shown to the model; see `_custom`."""

    type: Literal["custom"]
    name: str
    description: str | None = None
    format: CustomForm | None = None
    defer_loading: bool | None = None
    allowed_callers: list[str] | None = None
    is_async: bool | None = msgspec.field(name="async", default=None)


class NamespaceTool(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Several tools under one name."""

    type: Literal["namespace"]
    name: str
    tools: list[dict[str, Any]]
    description: str | None = None


class ToolName(msgspec.Struct, frozen=True):
    """How a client calls a tool. namespace: "" if the tool is in none."""

    name: str
    namespace: str = ""
    is_custom: bool = False


class AllowedTools(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A choice among some of the tools."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: list[dict[str, Any]]


class ForcedTool(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A tool that must be called."""

    type: Literal["function", "custom"]
    name: str
    namespace: str | None = None


def neutral_tools(tools: Sequence[dict[str, Any]]) -> tuple[tuple[Tool, ...], dict[str, ToolName]]:
    """(the tools, their names for the client by those for the model). Raises InputError for tools that a server would
    run."""
    found: list[Tool] = []
    names: dict[str, ToolName] = {}
    for tool, where, namespace in _flat(tools):
        kind = tool.get("type")
        match kind:
            case "function":
                made = _function(convert_part(tool, FunctionTool, where), where)
            case "custom":
                made = _custom(convert_part(tool, CustomTool, where), where)
            case _:
                message = (
                    f"{where}.type is {show_json(kind)}: tools that a server runs are not supported, only tools of the "
                    'types "function" and "custom", which the client runs, and a "namespace" of these'
                )
                raise InputError(message, param=f"{where}.type")
        if not made.name:
            raise InputError(f"{where}.name is empty", param=f"{where}.name")
        full = model_name(made.name, namespace)
        names[full] = ToolName(made.name, namespace, kind == "custom")
        found.append(replace(made, name=full))
    check_num_tools(found)
    return tuple(found), names


def _flat(tools: Sequence[dict[str, Any]]) -> Iterator[tuple[dict[str, Any], str, str]]:
    """(tool, its place, its namespace) of each tool."""
    for index, tool in enumerate(tools):
        where = f"tools[{index}]"
        if tool.get("type") != "namespace":
            yield tool, where, ""
            continue
        group = convert_part(tool, NamespaceTool, where)
        for place, inner in enumerate(group.tools):
            yield inner, f"{where}.tools[{place}]", group.name


def choose_tools(choice: str | dict[str, Any] | None, tools: tuple[Tool, ...]) -> tuple[tuple[Tool, ...], ToolChoice]:
    """(the tools that the model may call, whether it may or must). Raises InputError."""
    names = {tool.name for tool in tools}
    match choice:
        case None | "auto":
            return tools, ToolChoice()
        case "none":
            return tools, ToolChoice("none")
        case "required":
            if not tools:
                raise InputError('tool_choice is "required", but there are no tools', param="tool_choice")
            return tools, ToolChoice("required")
        case {"type": "allowed_tools"}:
            allowed = convert_part(choice, AllowedTools, "tool_choice")
            wanted = [_allowed_name(tool, names, f"tool_choice.tools[{i}]") for i, tool in enumerate(allowed.tools)]
            if not wanted:
                raise InputError("tool_choice.tools is empty", param="tool_choice.tools")
            return tuple(tool for tool in tools if tool.name in wanted), ToolChoice(allowed.mode)
        case {"type": "function" | "custom"}:
            named = convert_part(choice, ForcedTool, "tool_choice")
            full = model_name(named.name, named.namespace)
            if full not in names:
                message = f"tool_choice names {show_json(named.name)}, which is not in tools"
                raise InputError(message, param="tool_choice")
            return tools, ToolChoice("named", full)
        case _:
            message = (
                f'tool_choice is {show_json(choice)}; it must be "auto", "none", "required", or an object of the type '
                '"function", "custom" or "allowed_tools"'
            )
            raise InputError(message, param="tool_choice")


def _allowed_name(tool: dict[str, Any], names: set[str], where: str) -> str:
    name, namespace = tool.get("name"), tool.get("namespace")
    full = model_name(name, namespace) if isinstance(name, str) and isinstance(namespace, str | None) else ""
    if full not in names:
        raise InputError(f"{where} is {show_json(tool)}, which is not in tools", param=where)
    return full


def _check_callers(tool: FunctionTool | CustomTool, where: str) -> None:
    refuse_unless(f"{where}.defer_loading", tool.defer_loading, (False,))
    refuse_unless(f"{where}.async", tool.is_async, (False,))
    if tool.allowed_callers and "direct" not in tool.allowed_callers:
        refuse_unless(f"{where}.allowed_callers", tool.allowed_callers, (["direct"],))


def _function(tool: FunctionTool, where: str) -> Tool:
    _check_callers(tool, where)
    parameters = tool.parameters or {"type": "object", "properties": {}}
    return Tool(tool.name, tool.description or "", parameters, f"{where}.parameters")


def _custom(tool: CustomTool, where: str) -> Tool:
    """A custom tool as a function with one text, because models call only functions.

    A regular expression is part of the schema, so calls that the client requires follow it. A Lark grammar is only
    shown to the model: the input is inside a JSON string, where it cannot be enforced.
    """
    _check_callers(tool, where)
    schema: dict[str, Any] = {"type": "string"}
    description = tool.description or ""
    if tool.format is not None and tool.format.type == "grammar":
        if not tool.format.definition or tool.format.syntax is None:
            message = f"{where}.format: a grammar needs `syntax` and `definition`"
            raise InputError(message, param=f"{where}.format")
        if tool.format.syntax == "regex":
            schema["pattern"] = tool.format.definition
        description += f"\nThe input must match this grammar ({tool.format.syntax}):\n{tool.format.definition}"
    parameters = {"type": "object", "properties": {INPUT: schema}, "required": [INPUT]}
    return Tool(tool.name, description.lstrip(), parameters, f"{where}.format.definition")


def custom_input(arguments: str) -> str:
    """The text for a custom tool from the arguments that the model wrote; the arguments as they are if they have no
    such text."""
    try:
        found = json.loads(arguments).get(INPUT)
    except (ValueError, AttributeError, RecursionError):
        return arguments
    return found if isinstance(found, str) else arguments
