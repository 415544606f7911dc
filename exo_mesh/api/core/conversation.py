"""Translates neutral messages to the messages and variables of a chat template. Pure."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

from msgspec.structs import replace

from exo_mesh.api.core.call_arguments import numbered_id, with_results_in_order
from exo_mesh.api.core.neutral_fields import show_json
from exo_mesh.api.core.request import Conversation, FieldNames, ImageInput, Thinking, ToolCall, Turn
from exo_mesh.base.long_texts import json_size
from exo_mesh.errors import InputError
from exo_mesh.text.output.tools import Tool
from exo_mesh.text.template import RESERVED, ChatTemplate, TemplateTraits
from exo_mesh.text.text_guard import TextGuard

TOGGLES = ("enable_thinking", "thinking")
"""Variables of templates that turn thinking on and off: the first of Qwen and GLM, the second of DeepSeek and
Granite."""

_RANKS = {name: rank for rank, name in enumerate(("type", "description", "enum", "properties", "required", "items"))}

NO_EFFORT = "none"
"""The reasoning effort that turns thinking off."""


SYSTEM_ROLES = ("system", "developer")

SYSTEM_FOR_TOOLS = "You are a helpful assistant."
"""The system message of a conversation without one, for a template that shows tools only together with one."""


def template_for(conversation: Conversation, template: ChatTemplate) -> ChatTemplate:
    """The template to use: for tools their own one if there is one, also for their calls and results if only that shows
    them."""
    traits = template.traits
    has_calls = any(turn.tool_calls or turn.role == "tool" for turn in conversation.turns)
    hides_calls = has_calls and not (traits.shows_calls and traits.shows_results)
    uses_tools = offers_tools(conversation) or hides_calls
    return template.tool_use if template.tool_use is not None and uses_tools else template


def forms_of(turns: Sequence[Turn], traits: TemplateTraits, *, has_tools: bool) -> list[tuple[Turn, ...]]:
    """The turns in the forms to render until the template takes one: as its traits say, then as stricter templates
    want them."""
    turns = with_results_in_order(turns)
    # `developer` is a newer name for `system` that few templates know
    is_renamed = not traits.knows_developer
    plain = [replace(turn, role="system") if turn.role == "developer" and is_renamed else turn for turn in turns]
    if has_tools and traits.tools_need_system and not any(turn.role == "system" for turn in plain):
        plain.insert(0, Turn("system", SYSTEM_FOR_TOOLS, "system"))
    if not traits.takes_several_systems:
        plain = _with_one_system(plain)
    late, none = with_late_system_as_user(plain), with_system_as_user(plain)
    first = none if not traits.shows_system else late if not traits.shows_late_system and _has_late(plain) else plain
    # some templates refuse a message that has calls, text and reasoning
    silent = [replace(turn, reasoning=None) if turn.tool_calls and turn.text else turn for turn in first]
    forms: list[tuple[Turn, ...]] = []
    for form in map(tuple, (first, silent, late, none)):
        if form not in forms:
            forms.append(form)
    return forms


def template_messages(
    turns: Sequence[Turn], traits: TemplateTraits, guard: TextGuard, image_marker: str = ""
) -> list[dict[str, Any]]:
    """One dict per message, its content in the form that the template reads. Raises InputError for calls and results
    that it does not show.

    image_marker: how the prompts of a model that takes images mark one. A template that takes parts gets a message with
    images as parts, any other the marker in the text.
    """
    ids = {} if traits.takes_any_ids else _nine_letter_ids(turns)
    if traits.calls_stand_alone or traits.hides_text_of_calls:
        turns = _with_calls_apart(turns)
    if not traits.takes_several_calls:
        turns = _with_single_calls(turns)
    messages = []
    for turn in turns:
        message = _message(turn, traits, guard, ids)
        is_assistant = turn.role == "assistant"
        if turn.parts and image_marker and not traits.takes_image_parts:
            texts = (guard.text(part) if isinstance(part, str) else image_marker for part in turn.parts)
            message["content"] = "\n".join(texts)
        elif turn.parts and image_marker:
            message["content"] = [_part(part, guard) for part in _without_neighbours(turn.parts)]
        elif turn.tool_calls and traits.calls_stand_alone:
            message["content"] = None
        else:
            message["content"] = guard.text(turn.text, is_assistant=is_assistant)
        if turn.role in traits.part_roles and isinstance(message["content"], str):
            message["content"] = [{"type": "text", "text": message["content"]}]
        messages.append(message)
    return messages


def _with_calls_apart(turns: Sequence[Turn]) -> list[Turn]:
    """The turns with calls after their text in a turn of their own."""
    made: list[Turn] = []
    for turn in turns:
        if turn.tool_calls and turn.text:
            made += [replace(turn, tool_calls=()), _silent(turn)]
        else:
            made.append(turn)
    return made


def _with_single_calls(turns: Sequence[Turn]) -> list[Turn]:
    """The turns with each call in a turn of its own, followed by its result."""
    made: list[Turn] = []
    place = 0
    while place < len(turns):
        turn, place = turns[place], place + 1
        if len(turn.tool_calls) < 2:
            made.append(turn)
            continue
        results: dict[str | None, list[Turn]] = {}
        while place < len(turns) and turns[place].role == "tool":
            results.setdefault(turns[place].tool_call_id, []).append(turns[place])
            place += 1
        for index, call in enumerate(turn.tool_calls):
            made.append(replace(turn if index == 0 else _silent(turn), tool_calls=(call,)))
            if found := results.get(call.id):
                made.append(found.pop(0))
        made += [result for left in results.values() for result in left]
    return made


def _silent(turn: Turn) -> Turn:
    """A turn with its calls alone."""
    return replace(turn, text="", parts=(), reasoning=None)


def _with_one_system(turns: Sequence[Turn]) -> list[Turn]:
    """The turns with the system messages at the start as one."""
    num_first = _num_first_systems(turns)
    first = [joined_turns(turns[:num_first], "\n\n")] if num_first else []
    return [*first, *turns[num_first:]]


def _num_first_systems(turns: Sequence[Turn]) -> int:
    return next((place for place, turn in enumerate(turns) if turn.role not in SYSTEM_ROLES), len(turns))


def _part(part: str | ImageInput, guard: TextGuard) -> dict[str, str]:
    return {"type": "text", "text": guard.text(part)} if isinstance(part, str) else {"type": "image"}


def _without_neighbours(parts: Sequence[str | ImageInput]) -> list[str | ImageInput]:
    """The parts with texts that follow each other as one, because templates put nothing between them."""
    made: list[str | ImageInput] = []
    for _, group in groupby(parts, lambda part: isinstance(part, str)):
        found = list(group)
        texts = [part for part in found if isinstance(part, str)]
        made += ["\n".join(texts)] if texts else found
    return made


def _has_late(turns: Sequence[Turn]) -> bool:
    return any(turn.role in SYSTEM_ROLES for turn in turns[_num_first_systems(turns) :])


def with_late_system_as_user(turns: Sequence[Turn]) -> tuple[Turn, ...]:
    """The turns with each system message after the first other message as marked text of the user. Consecutive turns of
    the user, or of the assistant, become one, because templates that refuse the former also refuse these."""
    num_first = _num_first_systems(turns)
    late = [
        replace(turn, role="user", text=f"<system>\n{turn.text}\n</system>") if turn.role in SYSTEM_ROLES else turn
        for turn in turns[num_first:]
    ]
    return (*turns[:num_first], *with_neighbours_joined(late))


def with_neighbours_joined(turns: Iterable[Turn]) -> list[Turn]:
    """The turns with consecutive turns of the user, or of the assistant, as one."""
    made: list[Turn] = []
    for role, group in groupby(turns, lambda turn: turn.role):
        found = list(group)
        made += [joined_turns(found)] if role in ("user", "assistant") else found
    return made


def with_system_as_user(turns: Sequence[Turn]) -> tuple[Turn, ...]:
    """The turns without system messages: the first ones begin the first turn of the user, as templates of Gemma 3 have
    it, and later ones are as in with_late_system_as_user."""
    made = with_late_system_as_user(turns)
    num_first = _num_first_systems(made)
    first, rest = made[:num_first], made[num_first:]
    text = "\n\n".join(turn.text for turn in first if turn.text)
    if not text:
        return rest or tuple(replace(turn, role="user") for turn in first[:1])
    opening = Turn("user", text, first[0].where, has_cache_marks=first[0].has_cache_marks)
    if not rest or rest[0].role != "user":
        return (opening, *rest)
    return (joined_turns([opening, rest[0]], "\n\n"), *rest[1:])


def without_empty_ending(turns: tuple[Turn, ...]) -> tuple[Turn, ...]:
    """The turns without a last message of the assistant that says nothing: it only asks for an answer."""
    last = turns[-1] if len(turns) > 1 else None
    is_empty = last is not None and last.role == "assistant" and not (last.text or last.tool_calls or last.reasoning)
    return turns[:-1] if is_empty else turns


def joined_turns(turns: Sequence[Turn], gap: str = "\n") -> Turn:
    """Messages of one role as one, with the fields of the first. In one step: joining thousands one by one would copy
    gigabytes."""
    if len(turns) == 1:
        return turns[0]
    parts = [part for turn in turns for part in (turn.parts or (turn.text,)) if part]
    thoughts = [turn.reasoning for turn in turns if turn.reasoning is not None]
    return replace(
        turns[0],
        text=gap.join(turn.text for turn in turns if turn.text),
        parts=tuple(parts) if any(turn.parts for turn in turns) else (),
        tool_calls=tuple(call for turn in turns for call in turn.tool_calls),
        reasoning="\n".join(thoughts) if thoughts else None,
        has_cache_marks=any(turn.has_cache_marks for turn in turns),
    )


def template_variables(
    conversation: Conversation, template: ChatTemplate, names: FieldNames, guard: TextGuard, special: Collection[str]
) -> dict[str, Any]:
    """Variables for the template: the client's variables, the thinking options and the tools. special: names of special
    tokens, which a client may replace. Raises InputError."""
    variables = {
        name: value if name in special else guard.value(value) for name, value in conversation.variables.items()
    }
    for name in sorted(RESERVED & variables.keys()):
        raise InputError(f"{names.variables}.{name} is reserved; a request may not set it", param=names.variables)
    known = template.variables
    variables |= _thinking_variables(conversation.thinking, known)
    if tools := offered_tools(conversation):
        if "tools" not in known or not template.traits.shows_tools:
            text = "the model's chat template does not support tools; use a model that lists the capability `tools`"
            raise InputError(text, param=names.tools)
        variables["tools"] = [guard.value(tool.as_function()) for tool in tools]
    elif template.traits.needs_tools:
        variables["tools"] = []
    return variables


MAX_PART_BYTES = 4 << 20
"""Most bytes of the tools and the template variables of a request together, as JSON."""


def check_parts(conversation: Conversation, names: FieldNames) -> None:
    """Raises InputError if the tools and the template variables have too many bytes together: a template walks
    over them."""
    tools = [(tool.description, tool.parameters) for tool in conversation.tools]
    sizes = {names.tools: _size(tools), names.variables: _size(conversation.variables)}
    if sum(sizes.values()) > MAX_PART_BYTES:
        name = max(sizes, key=lambda one: sizes[one])
        raise InputError(
            f"{name} has {sizes[name]} bytes; at most {MAX_PART_BYTES} are allowed for the tools and the variables of "
            "the chat template together",
            param=name,
        )


def _size(value: Any) -> int:
    try:
        return json_size(value) if value else 0
    except (RecursionError, UnicodeEncodeError):  # refused later, by name
        return 0


def offers_tools(conversation: Conversation) -> bool:
    """Whether the model may call tools."""
    return bool(conversation.tools) and conversation.tool_choice.mode != "none"


def offered_tools(conversation: Conversation) -> tuple[Tool, ...]:
    """The tools that the model may call, in canonical form; () if the client forbids calls. Raises InputError."""
    if not offers_tools(conversation):
        return ()
    try:
        tools = tuple(map(canonical_tool, conversation.tools))
        by_name = {tool.name: tool for tool in tools}
        for tool in tools:
            if tool != by_name[tool.name]:  # a call could be of either, and its arguments are read by one schema
                message = f"tools has two different tools called {show_json(tool.name)}; names must be unique"
                raise InputError(message, param="tools")
    except RecursionError as exc:
        raise InputError("tools: the schema of a tool is nested too deeply", param="tools") from exc
    return tools


def canonical_tool(tool: Tool) -> Tool:
    """The same tool with the keys of its schema in a fixed order.

    Clients that keep objects in hash tables send the same tools in a different order each time. With a fixed order
    their prompts are equal, so a prefix cache finds them.
    """
    return dataclasses.replace(tool, parameters=_ordered(tool.parameters))


def _ordered(value: Any) -> Any:
    """Sort the keys: first the keywords in the order of the models' training data, then all others alphabetically."""
    if isinstance(value, dict):
        return {name: _ordered(value[name]) for name in sorted(value, key=lambda name: (_RANKS.get(name, 9), name))}
    return [_ordered(item) for item in value] if isinstance(value, list) else value


def _thinking_variables(thinking: Thinking, known: frozenset[str]) -> Mapping[str, Any]:
    """The thinking options as variables of the template. Options that the template does not read are dropped."""
    made: dict[str, Any] = {}
    enabled = thinking.enabled
    if thinking.effort is not None:
        made["reasoning_effort"] = thinking.effort
        enabled = (thinking.effort != NO_EFFORT) if enabled is None else enabled
    if enabled is not None:
        made |= dict.fromkeys(TOGGLES, enabled)
    if thinking.budget is not None:
        made["thinking_budget"] = thinking.budget
    return {name: value for name, value in made.items() if name in known}


def _message(turn: Turn, traits: TemplateTraits, guard: TextGuard, ids: Mapping[str, str]) -> dict[str, Any]:
    """A message without its content. ids: the ids of calls that replace others."""
    made: dict[str, Any] = {"role": turn.role}
    if turn.name is not None:
        made["name"] = guard.text(turn.name)
    if turn.tool_calls:
        if not traits.shows_calls:
            raise _not_shown(f"{turn.where}.tool_calls", "calls of tools")
        made["tool_calls"] = [_call(call, traits, guard, ids) for call in turn.tool_calls]
    if turn.role == "tool" and not traits.shows_results:
        raise _not_shown(turn.where, "results of tools")
    if turn.tool_call_id is not None:
        made["tool_call_id"] = guard.text(ids.get(turn.tool_call_id, turn.tool_call_id))
    if turn.reasoning is not None:
        made[traits.reasoning_key] = guard.text(turn.reasoning, is_assistant=True)
    return made


def _call(call: ToolCall, traits: TemplateTraits, guard: TextGuard, ids: Mapping[str, str]) -> dict[str, Any]:
    arguments = guard.value(call.arguments)
    if traits.takes_text_arguments:
        arguments = json.dumps(arguments, ensure_ascii=False)
    function = {"name": guard.text(call.name), "arguments": arguments}
    return {"id": guard.text(ids.get(call.id, call.id)), "type": "function", "function": function}


def _nine_letter_ids(turns: Sequence[Turn]) -> dict[str, str]:
    """For each id of a call, an id that every template takes."""
    given = [id_ for turn in turns for id_ in (*(call.id for call in turn.tool_calls), turn.tool_call_id) if id_]
    return {id_: numbered_id(index) for index, id_ in enumerate(dict.fromkeys(given))}


def _not_shown(where: str, what: str) -> InputError:
    """The error for a part of a conversation that would be dropped silently."""
    return InputError(f"{where}: the model's chat template does not show {what}", param=where)
