"""Makes the prompt text of a conversation with the model's chat template."""

from __future__ import annotations

from collections.abc import Sequence

from exo_mesh.api.core.agent_lines import with_agent_lines_last
from exo_mesh.api.core.conversation import template_messages, template_variables, with_late_system_as_user
from exo_mesh.api.core.request import Conversation, FieldNames, Turn
from exo_mesh.api.core.texts import TextModels
from exo_mesh.errors import InputError
from exo_mesh.text.tokenizer import TextModel
from exo_mesh.text.vision import VisionSpec


async def conversation_prompt(
    conversation: Conversation, text: TextModel, texts: TextModels, names: FieldNames, *, moves_agent_lines: bool
) -> str:
    """Render the prompt. moves_agent_lines: see agent_lines. Raises InputError if the template does not support a field
    or refuses the messages."""
    turns = with_agent_lines_last(conversation.turns) if moves_agent_lines else conversation.turns
    try:
        return await _rendered(turns, conversation, text, texts, names)
    except InputError:
        changed = with_late_system_as_user(turns) if conversation.late_system_as_user else turns
        if changed == turns:
            raise
        return await _rendered(changed, conversation, text, texts, names)


async def _rendered(
    turns: Sequence[Turn], conversation: Conversation, text: TextModel, texts: TextModels, names: FieldNames
) -> str:
    opens_turn = not conversation.continues_last if conversation.opens_turn is None else conversation.opens_turn
    return await texts.render(
        text,
        template_messages(turns, text.template, text.vision.marker if isinstance(text.vision, VisionSpec) else ""),
        variables=template_variables(conversation, text.template, names),
        add_generation_prompt=opens_turn,
        continue_final_message=conversation.continues_last,
    )
