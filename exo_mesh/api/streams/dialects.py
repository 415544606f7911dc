"""The reply of each dialect, from the recipe that its request left."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from exo_mesh.api.anthropic.delivery import message_reply
from exo_mesh.api.core.answer import Answer
from exo_mesh.api.core.recipes import DialectName, StreamRecipe
from exo_mesh.api.core.reply import Reply
from exo_mesh.api.ollama.delivery import ollama_reply
from exo_mesh.api.openai.delivery import openai_reply
from exo_mesh.api.responses.delivery import response_reply

REPLIES: Mapping[DialectName, Callable[[StreamRecipe, Answer], Reply]] = {
    "chat": partial(openai_reply, "chat"),
    "completion": partial(openai_reply, "completion"),
    "message": message_reply,
    "ollama_chat": partial(ollama_reply, "ollama_chat"),
    "ollama_generate": partial(ollama_reply, "ollama_generate"),
    "response": response_reply,
}


def reply_of(recipe: StreamRecipe, answer: Answer) -> Reply:
    """The streamed reply that a recipe describes."""
    return REPLIES[recipe.dialect](recipe, answer)
