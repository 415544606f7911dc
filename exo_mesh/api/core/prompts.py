"""Makes the prompt of a conversation with the model's chat template."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from exo_mesh.api.context import RequestDefaults
from exo_mesh.api.core.agent_lines import with_agent_lines_last
from exo_mesh.api.core.conversation import (
    check_parts,
    forms_of,
    offers_tools,
    template_for,
    template_messages,
    template_variables,
)
from exo_mesh.api.core.request import Conversation, FieldNames, Turn
from exo_mesh.api.core.texts import TextModels
from exo_mesh.errors import InputError
from exo_mesh.text.control_text import ChatPrompt
from exo_mesh.text.output.formats import opened_reasoning
from exo_mesh.text.template import ChatTemplate
from exo_mesh.text.text_guard import TextGuard
from exo_mesh.text.tokenizer import TextModel
from exo_mesh.text.vision import VisionSpec


class PromptOptions(msgspec.Struct, frozen=True):
    """Options for making prompts. moves_agent_lines: see agent_lines. guards_texts: see exo_mesh.text.control_text."""

    moves_agent_lines: bool = True
    guards_texts: bool = True


def prompt_options(defaults: RequestDefaults) -> PromptOptions:
    """The options that the settings define."""
    return PromptOptions(not defaults.keep_agent_lines, not defaults.control_tokens_in_text)


async def conversation_prompt(
    conversation: Conversation, text: TextModel, texts: TextModels, names: FieldNames, options: PromptOptions
) -> ChatPrompt:
    """Render the prompt. Raises InputError if the template does not support a field or refuses the messages."""
    template = template_for(conversation, text.chat_template)

    def forms() -> list[tuple[Turn, ...]]:
        check_parts(conversation, names)
        turns = with_agent_lines_last(conversation.turns) if options.moves_agent_lines else conversation.turns
        return forms_of(turns, template.traits, has_tools=offers_tools(conversation))

    refusal: InputError | None = None
    for form in await texts.work(forms):
        guard = text.guard() if options.guards_texts else TextGuard()
        try:
            return await _rendered(form, conversation, text, template, texts, names, guard)
        except InputError as exc:
            refusal = refusal or exc
    assert refusal is not None
    raise refusal


def continues_reasoning(conversation: Conversation, text: TextModel) -> bool:
    """Whether the answer continues a message that ends in its reasoning, because it has no text yet."""
    last = conversation.turns[-1]
    is_open = last.reasoning and not last.text and not last.parts
    return bool(conversation.continues_last and is_open and text.output.reasoning_start)


async def _rendered(
    turns: Sequence[Turn],
    conversation: Conversation,
    text: TextModel,
    template: ChatTemplate,
    texts: TextModels,
    names: FieldNames,
    guard: TextGuard,
) -> ChatPrompt:
    marker = text.vision.marker if isinstance(text.vision, VisionSpec) else ""
    thought = (turns[-1].reasoning or "") if continues_reasoning(conversation, text) else ""
    if thought:  # templates end the reasoning of a message, so it is written after the beginning of a new one
        turns = turns[:-1]

    def write() -> tuple[list[dict[str, Any]], dict[str, Any]]:
        try:
            variables = template_variables(conversation, template, names, guard, text.special_tokens)
            return template_messages(turns, template.traits, guard, marker), variables
        except RecursionError as exc:
            message = f"{names.messages}: tools, arguments of calls or template variables are nested too deeply"
            raise InputError(message, param=names.messages) from exc

    messages, variables = await texts.work(write)
    continues_text = conversation.continues_last and not thought
    opens_turn = not continues_text if conversation.opens_turn is None else conversation.opens_turn or bool(thought)
    rendered = await texts.render(
        text,
        template,
        messages,
        variables=variables,
        add_generation_prompt=opens_turn,
        continue_final_message=continues_text,
    )
    if thought:
        rendered = opened_reasoning(text.output, rendered) + guard.text(thought, is_assistant=True)
    return ChatPrompt(rendered, guard.mark)
