"""Makes the prompt text of a conversation with the model's chat template."""

from __future__ import annotations

from exo_mesh.api.core.agent_lines import with_agent_lines_last
from exo_mesh.api.core.conversation import template_messages, template_variables
from exo_mesh.api.core.request import Conversation, FieldNames
from exo_mesh.api.core.texts import TextModels
from exo_mesh.text.tokenizer import TextModel


async def conversation_prompt(
    conversation: Conversation, text: TextModel, texts: TextModels, names: FieldNames, *, moves_agent_lines: bool
) -> str:
    """Render the prompt. moves_agent_lines: see agent_lines. Raises InputError if the template does not support a field
    or refuses the messages."""
    opens_turn = not conversation.continues_last if conversation.opens_turn is None else conversation.opens_turn
    turns = with_agent_lines_last(conversation.turns) if moves_agent_lines else conversation.turns
    return await texts.render(
        text,
        template_messages(turns, text.template),
        variables=template_variables(conversation, text.template, names),
        add_generation_prompt=opens_turn,
        continue_final_message=conversation.continues_last,
    )
