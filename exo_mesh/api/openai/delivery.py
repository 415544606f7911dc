"""The options of OpenAI's replies as fields of a recipe, so that another peer makes the same reply."""

from __future__ import annotations

from typing import Literal

import msgspec

from exo_mesh.api.core.answer import Answer
from exo_mesh.api.core.preparing import PreparedRequest
from exo_mesh.api.core.recipes import StreamRecipe, recipe_of
from exo_mesh.api.openai.replies import ChatReply, CompletionReply, Delivery, OpenAIReply
from exo_mesh.api.openai.schema import StreamOptions

OpenAIDialect = Literal["chat", "completion"]

REPLIES: dict[OpenAIDialect, type[OpenAIReply]] = {"chat": ChatReply, "completion": CompletionReply}


def openai_recipe(dialect: OpenAIDialect, prepared: PreparedRequest, delivery: Delivery, created: int) -> StreamRecipe:
    """The recipe of a reply with these options."""
    return msgspec.structs.replace(
        recipe_of(dialect, prepared, created),
        include_usage=delivery.options.include_usage,
        continuous_usage=delivery.options.continuous_usage_stats,
        names_tier=bool(delivery.tier),
        shows_logprobs=delivery.shows_logprobs,
        shows_timings=delivery.shows_timings,
        tier=delivery.tier,
    )


def openai_reply(dialect: OpenAIDialect, recipe: StreamRecipe, answer: Answer) -> OpenAIReply:
    """The streamed reply that a recipe describes."""
    options = StreamOptions(include_usage=recipe.include_usage, continuous_usage_stats=recipe.continuous_usage)
    tier = recipe.tier or ("default" if recipe.names_tier else "")
    delivery = Delivery(True, options, tier, recipe.shows_logprobs, shows_timings=recipe.shows_timings)
    return REPLIES[dialect](answer, delivery, recipe.created)
