"""Ollama's replies as recipes, so that another reader gets the same lines."""

from __future__ import annotations

from typing import Literal

import msgspec

from exo_mesh.api.core.answer import Answer
from exo_mesh.api.core.preparing import PreparedRequest
from exo_mesh.api.core.recipes import StreamRecipe, recipe_of
from exo_mesh.api.ollama.replies import OllamaChatReply, OllamaDelivery, OllamaGenerateReply, OllamaReply
from exo_mesh.base.clock import monotonic

OllamaDialect = Literal["ollama_chat", "ollama_generate"]

REPLIES: dict[OllamaDialect, type[OllamaReply]] = {
    "ollama_chat": OllamaChatReply,
    "ollama_generate": OllamaGenerateReply,
}


def ollama_recipe(
    dialect: OllamaDialect, prepared: PreparedRequest, created: int, *, shows_logprobs: bool
) -> StreamRecipe:
    """The recipe of a reply."""
    return msgspec.structs.replace(recipe_of(dialect, prepared, created), shows_logprobs=shows_logprobs)


def ollama_reply(dialect: OllamaDialect, recipe: StreamRecipe, answer: Answer) -> OllamaReply:
    """The streamed reply that a recipe describes; its total time begins now."""
    delivery = OllamaDelivery(recipe.model, recipe.created, monotonic(), recipe.shows_logprobs)
    return REPLIES[dialect](answer, delivery)
