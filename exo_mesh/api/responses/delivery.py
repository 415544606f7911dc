"""The options of a response as fields of a recipe, so that another peer makes the same events."""

from __future__ import annotations

import msgspec

from exo_mesh.api.core.answer import Answer
from exo_mesh.api.core.preparing import PreparedRequest
from exo_mesh.api.core.recipes import StreamRecipe, recipe_of
from exo_mesh.api.responses.replies import ResponseDelivery, ResponseReply
from exo_mesh.api.responses.tools import ToolName
from exo_mesh.api.responses.writers import ItemOptions


def response_recipe(prepared: PreparedRequest, delivery: ResponseDelivery, created: int) -> StreamRecipe:
    """The recipe of a response with these options."""
    return msgspec.structs.replace(
        recipe_of("response", prepared, created),
        repeated=delivery.repeated,
        tool_names={full: (one.name, one.namespace, one.is_custom) for full, one in delivery.tools.items()},
        as_summary=delivery.items.as_summary,
        shows_opaque=delivery.items.shows_opaque,
        shows_logprobs=delivery.shows_logprobs,
    )


def response_reply(recipe: StreamRecipe, answer: Answer, after: int = -1) -> ResponseReply:
    """The streamed response that a recipe describes. after: see ResponseDelivery."""
    delivery = ResponseDelivery(
        recipe.repeated,
        {full: ToolName(*parts) for full, parts in recipe.tool_names.items()},
        ItemOptions(recipe.as_summary, recipe.shows_opaque),
        recipe.shows_logprobs,
        after,
    )
    return ResponseReply(answer, delivery, recipe.created)
