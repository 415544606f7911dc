"""Translates the messages of Anthropic's clients to neutral turns. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from exo_mesh.api.anthropic.blocks import (
    OF_ASSISTANT,
    OF_RESULT,
    OF_SYSTEM,
    OF_USER,
    Block,
    DocumentBlock,
    ImageBlock,
    RedactedThinkingBlock,
    SearchResultBlock,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
    decode_block,
    decode_image,
    decode_source,
)
from exo_mesh.api.anthropic.schema import Blocks, ContextEdit, CountTokensBody, MessageBody, ThinkingTurns
from exo_mesh.api.bodies.values import ValueBudget
from exo_mesh.api.core.call_arguments import object_of
from exo_mesh.api.core.conversation import with_neighbours_joined
from exo_mesh.api.core.neutral_fields import refuse_unless
from exo_mesh.api.core.request import Role, ToolCall, Turn
from exo_mesh.errors import InputError

KEPT_TURNS = 1
"""Turns that keep their thinking if clear_thinking says nothing, as Anthropic documents it."""


def turns_of(body: CountTokensBody, num_held: int = 0) -> tuple[Turn, ...]:
    """Translate the system prompt and the messages. num_held: how many of the messages are of a thread, and not of the
    request. Raises InputError that names the message and its field."""
    turns: list[Turn] = []
    if body.system:
        turns.append(_spoken("system", body.system, OF_SYSTEM, "system"))
    tools: dict[str, str] = {}
    for index, message in enumerate(body.messages):
        where = f"messages[{index - num_held}]" if index >= num_held else "thread"
        for turn in _turns(message, where, tools):
            tools.update((call.id, call.name) for call in turn.tool_calls)
            turns.append(turn)
    turns = with_neighbours_joined(turns)
    if body.cache_control is not None and turns:
        turns[-1] = replace(turns[-1], has_cache_marks=True)
    for edit in (body.context_management.edits if body.context_management else None) or ():
        turns = _without_old_thoughts(turns, edit)
    return tuple(turns)


def _turns(message: MessageBody, where: str, tools: dict[str, str]) -> list[Turn]:
    """The turns of one message. tools: the name of the tool of each earlier call, by the id of the call."""
    match message.role:
        case "system":
            return [_spoken("system", message.content, OF_SYSTEM, f"{where}.content")]
        case "assistant":
            return [_assistant(message, where)]
        case _:
            return _user(message, where, tools)


def _user(message: MessageBody, where: str, tools: dict[str, str]) -> list[Turn]:
    """A turn for each result of a tool, and one for the text between results."""
    if isinstance(message.content, str):
        return [Turn("user", message.content, where)]
    made: list[Turn] = []
    for block, place in _decoded(message.content, OF_USER, f"{where}.content"):
        if isinstance(block, ToolResultBlock):
            made.append(_result(block, place, tools.get(block.tool_use_id)))
        elif isinstance(block, ImageBlock):
            image = decode_image(block, place)
            made.append(Turn("user", "", where, has_cache_marks=block.cache_control is not None, parts=(image,)))
        else:
            made.append(Turn("user", _text_of(block, place), where, has_cache_marks=block.cache_control is not None))
    return with_neighbours_joined(made) or [Turn("user", "", where)]


def _result(block: ToolResultBlock, where: str, name: str | None) -> Turn:
    spoken = _spoken("tool", block.content or "", OF_RESULT, f"{where}.content")
    # templates know no errors of tools, so the text says it
    text = f"Error: {spoken.text}" if block.is_error else spoken.text
    has_marks = spoken.has_cache_marks or block.cache_control is not None
    return replace(spoken, text=text, where=where, name=name, tool_call_id=block.tool_use_id, has_cache_marks=has_marks)


def _assistant(message: MessageBody, where: str) -> Turn:
    if isinstance(message.content, str):
        return Turn("assistant", message.content, where)
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[ToolCall] = []
    budget = ValueBudget()
    has_marks = False
    for block, place in _decoded(message.content, OF_ASSISTANT, f"{where}.content"):
        has_marks = has_marks or block.cache_control is not None
        match block:
            case TextBlock(text=text):
                texts.append(text)
            case ThinkingBlock(thinking=thinking):
                thoughts.append(thinking)
            case ToolUseBlock(id=call_id, name=name, input=arguments):
                calls.append(ToolCall(call_id, name, object_of(arguments, budget, place)))
            case RedactedThinkingBlock():
                pass
    reasoning = "\n".join(thoughts) if any(thoughts) else None
    return Turn(
        "assistant", _joined(texts), where, tool_calls=tuple(calls), reasoning=reasoning, has_cache_marks=has_marks
    )


def _spoken(role: Role, content: str | Blocks, allowed: tuple[str, ...], where: str) -> Turn:
    """A turn that has only text."""
    if isinstance(content, str):
        return Turn(role, content, where)
    found = _decoded(content, allowed, where)
    has_marks = any(block.cache_control is not None for block, _ in found)
    return Turn(role, _joined([_text_of(block, place) for block, place in found]), where, has_cache_marks=has_marks)


def _decoded(blocks: Blocks, allowed: tuple[str, ...], where: str) -> list[tuple[Block, str]]:
    """Each block with its place."""
    places = [f"{where}[{index}]" for index in range(len(blocks))]
    return [(decode_block(block, allowed, place), place) for block, place in zip(blocks, places, strict=True)]


def _text_of(block: Block, where: str) -> str:
    """The text of a block; a document or search result begins with its title."""
    match block:
        case TextBlock(text=text):
            return text
        case DocumentBlock(title=title, context=context, citations=citations):
            refuse_unless(f"{where}.citations.enabled", citations and citations.enabled, (False,))
            return _joined([title or "", context or "", _text_of_source(block.source, f"{where}.source")])
        case SearchResultBlock(title=title, source=source, citations=citations):
            refuse_unless(f"{where}.citations.enabled", citations and citations.enabled, (False,))
            text = _spoken("user", block.content, OF_SYSTEM, f"{where}.content").text
            return _joined([title, source, text])
        case _:
            raise AssertionError(f"{type(block).__name__} is not allowed here")


def _text_of_source(source: dict[str, Any], where: str) -> str:
    decoded = decode_source(source, where)
    text = decoded.data if decoded.type == "text" else decoded.content
    if text is None:
        field = f"{where}.{'data' if decoded.type == 'text' else 'content'}"
        raise InputError(f"{field}: this field is required", param=field)
    return _spoken("user", text, OF_SYSTEM, f"{where}.content").text


def _joined(texts: Sequence[str]) -> str:
    """The texts joined by newlines, as other servers do for templates that know only strings."""
    return "\n".join(text for text in texts if text)


def _without_old_thoughts(turns: list[Turn], edit: ContextEdit) -> list[Turn]:
    """Remove the thinking of all turns of the assistant but the last ones."""
    match edit.keep:
        case None:
            kept = KEPT_TURNS
        case ThinkingTurns(type="thinking_turns", value=value):
            kept = KEPT_TURNS if value is None else value
        case _:
            return turns
    places = [place for place, turn in enumerate(turns) if turn.role == "assistant"]
    old = set(places[: max(0, len(places) - kept)])
    return [replace(turn, reasoning=None) if place in old else turn for place, turn in enumerate(turns)]
