"""Decides the grammar of an answer, from the tools that must be called and the form that the client asked for."""

from __future__ import annotations

from collections.abc import Sequence

from exo_mesh.api.core.request import Conversation, FieldNames, ToolChoice
from exo_mesh.domain.grammar import GrammarSpec
from exo_mesh.errors import InputError
from exo_mesh.text.grammars import lark_of
from exo_mesh.text.output.formats import OutputFormat, after_reasoning, as_answer, tool_grammar
from exo_mesh.text.output.tools import Tool


def answer_grammar(
    asked: GrammarSpec | None,
    conversation: Conversation,
    tools: Sequence[Tool],
    output: OutputFormat,
    names: FieldNames,
    starts_in_reasoning: bool,
) -> GrammarSpec | None:
    """The grammar of everything that the model writes; None if the model is free. Raises InputError if the request
    cannot be enforced. starts_in_reasoning: the prompt ends inside reasoning."""
    spec = asked
    choice = conversation.tool_choice
    if tools and (choice.mode in ("required", "named") or asked is not None):
        calls = _calls(conversation, tools, output, choice, names)
        spec = calls if asked is None or choice.mode != "auto" else _either(as_answer(output, asked), calls)
    return None if spec is None else after_reasoning(output, spec, starts_in_reasoning)


def _calls(
    conversation: Conversation,
    tools: Sequence[Tool],
    output: OutputFormat,
    choice: ToolChoice,
    names: FieldNames,
) -> GrammarSpec:
    is_named = choice.mode == "named"
    wanted = [tool for tool in tools if not is_named or tool.name == choice.name]
    spec = tool_grammar(output, wanted, "required", conversation.parallel_tool_calls and not is_named)
    if spec is None:
        message = 'tool calls cannot be enforced in this model\'s format; use tool_choice "auto" and no schema'
        raise InputError(message, param=names.tool_choice)
    return spec


def _either(answer: GrammarSpec, calls: GrammarSpec) -> GrammarSpec:
    """A grammar for an answer in the form that the client asked for, or for tool calls."""
    return GrammarSpec("lark", f"start: answer | calls\nanswer: {lark_of(answer)}\ncalls: {lark_of(calls)}\n")
