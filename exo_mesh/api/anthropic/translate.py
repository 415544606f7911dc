"""Translates Anthropic's bodies to neutral requests. Pure."""

from __future__ import annotations

import json

from msgspec.structs import replace

from exo_mesh.api.anthropic.blocks import decode_tool
from exo_mesh.api.anthropic.messages import turns_of
from exo_mesh.api.anthropic.schema import CountTokensBody, MessagesBody
from exo_mesh.api.core.checks import check_num_tools, check_range, check_stops, stop_strings
from exo_mesh.api.core.conversation import without_empty_ending
from exo_mesh.api.core.grammar import grammar_of
from exo_mesh.api.core.keeping import cache_wish
from exo_mesh.api.core.neutral_fields import show_json
from exo_mesh.api.core.request import (
    Conversation,
    FieldNames,
    NeutralRequest,
    SamplingWish,
    Thinking,
    ToolChoice,
    Turn,
)
from exo_mesh.domain.request import GrammarSpec
from exo_mesh.errors import InputError
from exo_mesh.text.output.tools import Tool

_MOST = 2**31 - 1
_MODES = {"auto": "auto", "any": "required", "none": "none"}


def neutral_message(body: MessagesBody, num_held: int = 0) -> NeutralRequest:
    """Translate and check a body. num_held: see turns_of. Raises InputError that names the wrong field."""
    check_range("max_tokens", body.max_tokens, 0, _MOST)
    check_range("temperature", body.temperature, 0, 2)
    check_range("top_p", body.top_p, 0, 1)
    check_range("top_k", body.top_k, 0, _MOST)
    stops = stop_strings(body.stop_sequences)
    check_stops(stops, "stop_sequences")
    grammar, field = _grammar(body)
    return NeutralRequest(
        body.model,
        neutral_conversation(body, num_held),
        SamplingWish(temperature=body.temperature, top_k=body.top_k, top_p=body.top_p),
        grammar,
        body.max_tokens,
        stops=stops,
        cache=cache_wish(body.cache, body.prompt_cache_key),
        names=FieldNames(grammar=field),
    )


def neutral_conversation(body: CountTokensBody, num_held: int = 0) -> Conversation:
    """Translate the conversation of a body. num_held: see turns_of. Raises InputError that names the wrong field."""
    if not body.messages:
        raise InputError("messages is empty; at least one message is required", param="messages")
    check_num_tools(body.tools or ())
    tools = tuple(_tool(tool, f"tools[{index}]") for index, tool in enumerate(body.tools or ()))
    turns = without_empty_ending(turns_of(body, num_held))
    if any(tool.get("cache_control") is not None for tool in body.tools or ()):
        turns = (_marked(turns[0]), *turns[1:])  # templates put the tools into the first turn
    continues_last = turns[-1].role == "assistant"
    if continues_last and turns[-1].tool_calls:
        where = turns[-1].where
        message = f"{where}: the last message has tool calls, so no answer can continue it; send their results"
        raise InputError(message, param=where)
    choice = body.tool_choice
    return Conversation(
        turns,
        tools,
        _tool_choice(body, tools),
        not (choice is not None and choice.disable_parallel_tool_use),
        thinking_of(body),
        continues_last=continues_last,
    )


def thinking_of(body: CountTokensBody) -> Thinking:
    """The thinking options. A model does not think unless the client asks for it, as with Anthropic."""
    effort = body.output_config.effort if body.output_config else None
    wish = body.thinking
    if wish is None or wish.type == "disabled":
        return Thinking(False, effort, is_asked=wish is not None)
    check_range("thinking.budget_tokens", wish.budget_tokens, 1, _MOST)
    return Thinking(True if wish.type == "enabled" else None, effort, wish.budget_tokens)


def _marked(turn: Turn) -> Turn:
    return replace(turn, has_cache_marks=True)


def _tool(tool: dict[str, object], where: str) -> Tool:
    given = decode_tool(tool, where)
    description = given.description or ""
    if given.input_examples:
        examples = "\n".join(json.dumps(example, ensure_ascii=False) for example in given.input_examples)
        description = f"{description}\nExamples of input:\n{examples}".lstrip()
    return Tool(given.name, description, given.input_schema, f"{where}.input_schema")


def _tool_choice(body: CountTokensBody, tools: tuple[Tool, ...]) -> ToolChoice:
    choice = body.tool_choice
    if choice is None:
        return ToolChoice()
    if choice.type == "tool":
        if not any(tool.name == choice.name for tool in tools):
            message = f"tool_choice names {show_json(choice.name)}, which is not in tools"
            raise InputError(message, param="tool_choice")
        return ToolChoice("named", choice.name or "")
    if choice.type == "any" and not tools:
        raise InputError('tool_choice is "any", but there are no tools', param="tool_choice")
    return ToolChoice(_MODES[choice.type])  # type: ignore[arg-type]


def _grammar(body: CountTokensBody) -> tuple[GrammarSpec | None, str]:
    """The grammar of the answer, and the field that it comes from. Raises InputError if two fields have one."""
    newer = body.output_config.format if body.output_config else None
    if newer is not None and body.output_format is not None:
        message = "output_config.format and output_format are two names of the same field: send only one"
        raise InputError(message, param="output_format")
    found = newer or body.output_format
    field = "output_format" if body.output_format is not None else "output_config.format"
    return (None if found is None else grammar_of("json_schema", found.schema, field)), field
