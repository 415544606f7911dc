"""The options of Anthropic's replies as fields of a recipe, so that another peer makes the same reply."""

from __future__ import annotations

import msgspec

from exo_mesh.api.anthropic.replies import MessageReply
from exo_mesh.api.core.answer import Answer
from exo_mesh.api.core.preparing import PreparedRequest
from exo_mesh.api.core.recipes import StreamRecipe, recipe_of


def message_recipe(prepared: PreparedRequest, created: int, *, hides_thinking: bool) -> StreamRecipe:
    """The recipe of a message."""
    return msgspec.structs.replace(recipe_of("message", prepared, created), hides_thinking=hides_thinking)


def message_reply(recipe: StreamRecipe, answer: Answer) -> MessageReply:
    """The streamed message that a recipe describes."""
    return MessageReply(answer, hides_thinking=recipe.hides_thinking)
