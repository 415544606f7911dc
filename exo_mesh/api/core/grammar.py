"""Decides the grammar of an answer, from the tools that must be called and the form that the client asked for."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from exo_mesh.api.core.conversation import NO_EFFORT, TOGGLES
from exo_mesh.api.core.request import Conversation, FieldNames, Thinking
from exo_mesh.base.long_texts import json_size
from exo_mesh.domain.request import GrammarKind, GrammarSpec
from exo_mesh.errors import InputError
from exo_mesh.text.grammars import MAX_BYTES, lark_of
from exo_mesh.text.output.formats import OutputFormat, after_reasoning, as_answer, tool_grammar
from exo_mesh.text.output.tools import Tool
from exo_mesh.text.shortest import shortest_answer

MAX_SCHEMA_BYTES = 4 * MAX_BYTES
"""Most bytes of the schemas of the tools in one grammar, and of a schema that a client sends. Descriptions count here,
but not in the grammar."""


def grammar_of(kind: GrammarKind, value: Any, param: str) -> GrammarSpec:
    """The grammar that a client sent; a value that is not a text becomes JSON. param: its field. Raises InputError if
    it has too many bytes."""
    try:
        size = len(value) if isinstance(value, str) else json_size(value)
    except UnicodeEncodeError as exc:
        raise InputError(f"{param} contains a lone surrogate (U+D800 to U+DFFF)", param=param) from exc
    except RecursionError as exc:
        raise InputError(f"{param} is nested too deeply", param=param) from exc
    if size > MAX_SCHEMA_BYTES:
        raise InputError(f"{param} has {size} bytes; at most {MAX_SCHEMA_BYTES} are allowed", param=param)
    return GrammarSpec(kind, value if isinstance(value, str) else json.dumps(value))


def answer_grammar(
    asked: GrammarSpec | None,
    conversation: Conversation,
    tools: Sequence[Tool],
    output: OutputFormat,
    names: FieldNames,
    starts_in_reasoning: bool,
    may_think: bool = True,
) -> GrammarSpec | None:
    """The grammar of everything that the model writes; None if the model is free. Raises InputError if the request
    cannot be enforced. starts_in_reasoning: the prompt ends inside reasoning. may_think: whether the answer may begin
    with reasoning."""
    spec = asked
    if wanted := forced_tools(asked, conversation, tools):
        calls = _calls(conversation, wanted, output, names)
        may_call = conversation.tool_choice.mode == "auto"
        spec = _either(as_answer(output, asked), calls) if asked is not None and may_call else calls
    return None if spec is None else after_reasoning(output, spec, starts_in_reasoning, may_think=may_think)


def forced_tools(asked: GrammarSpec | None, conversation: Conversation, tools: Sequence[Tool]) -> list[Tool]:
    """The tools whose calls a grammar must describe."""
    choice = conversation.tool_choice
    if asked is None and choice.mode not in ("required", "named"):
        return []
    return [tool for tool in tools if choice.mode != "named" or tool.name == choice.name]


def _calls(conversation: Conversation, wanted: Sequence[Tool], output: OutputFormat, names: FieldNames) -> GrammarSpec:
    size = sum(json_size(tool.parameters) for tool in wanted)
    if size > MAX_SCHEMA_BYTES:
        message = f"the schemas of the tools have {size} bytes; at most {MAX_SCHEMA_BYTES} can be enforced at once"
        raise InputError(message, param="tools")
    is_parallel = conversation.parallel_tool_calls and conversation.tool_choice.mode != "named"
    try:
        spec = tool_grammar(output, wanted, "required", is_parallel)
    except InputError:
        for tool in wanted:
            tool_alone(output, tool)
        raise
    if spec is None:
        message = 'tool calls cannot be enforced in this model\'s format; use tool_choice "auto" and no schema'
        raise InputError(message, param=names.tool_choice)
    return spec


def tool_alone(output: OutputFormat, tool: Tool) -> GrammarSpec | None:
    """The grammar of calls of one tool. Raises InputError that names the tool."""
    try:
        return tool_grammar(output, [tool], "required", False)
    except InputError as exc:
        raise InputError(f"{tool.where}: {exc}", param=tool.where) from exc


def may_think(thinking: Thinking, variables: Mapping[str, Any], known: Collection[str]) -> bool:
    """Whether an answer under a grammar may begin with reasoning: not if the client turned it off. A dialect's default
    counts only if the template has such a switch. known: the variables that the template reads."""
    enabled = thinking.enabled
    for value in (thinking.effort, variables.get("reasoning_effort")):
        enabled = value != NO_EFFORT if enabled is None and value is not None else enabled
    for name in TOGGLES:
        enabled = variables.get(name) if enabled is None else enabled
    return enabled is not False or not (thinking.is_asked or {*TOGGLES, "reasoning_effort"} & set(known))


def room_for_answer(asked: GrammarSpec | None, wanted: Sequence[Tool]) -> list[tuple[str, int]]:
    """(a text about as long as a shortest valid answer, its members that some formats write between tags) for the
    answer and each tool; the model needs room for the longest."""
    found = [] if asked is None else [(shortest_answer(asked), 0)]
    for tool in wanted:
        arguments = shortest_answer(GrammarSpec("json_schema", json.dumps(tool.parameters or {"type": "object"})))
        call = f'<tool_call>\n{{"name": "{tool.name}", "arguments": {arguments}}}\n</tool_call>'
        found.append((call, _num_members(arguments)))
    return found


def _num_members(arguments: str) -> int:
    try:
        return len(json.loads(arguments))
    except (ValueError, TypeError):  # a stand-in for arguments that are not analysed
        return 0


def _either(answer: GrammarSpec, calls: GrammarSpec) -> GrammarSpec:
    """A grammar for an answer in the form that the client asked for, or for tool calls."""
    return GrammarSpec("lark", f"start: answer | calls\nanswer: {lark_of(answer)}\ncalls: {lark_of(calls)}\n")
