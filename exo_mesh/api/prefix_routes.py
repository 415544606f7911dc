"""Explains one request: why its prompt was computed again (GET /v1/requests/{id}/prefix), and which stages computed its
answer (GET /v1/requests/{id}/stages)."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from exo_mesh.api.access import CALLER
from exo_mesh.api.context import ApiContext
from exo_mesh.api.errors import json_response, plain_error
from exo_mesh.rings.serving.explanations import Explanation

_UNKNOWN = (
    "nothing is known of the prompt of this request at this node: it entered at another node or long ago, its prompt "
    "is too short to be kept (up to 16 tokens), or the prefix cache is off"
)


class PrefixRoutes:
    """Each method answers one route. A request of another caller is reported as unknown."""

    def __init__(self, context: ApiContext) -> None:
        self._models = context.services.models
        self._observation = context.services.observation
        self._texts = context.texts

    async def explain(self, request: web.Request) -> web.Response:
        """GET /v1/requests/{id}/prefix: figures of one of the last requests that entered at this node. Texts are shown
        to admins, and to callers with the API key of the request."""
        limited_to, request_id = request[CALLER].limited_to, request.match_info["id"]
        found = self._observation.explanation(request_id, limited_to)
        if found is None:
            return plain_error("not_found", _UNKNOWN)
        shown: dict[str, Any] = {
            "request_id": found.request_id,
            "model": found.model,
            "prompt_tokens": found.prompt_tokens,
            "cached_tokens": found.cached_tokens,
            "computed_tokens": found.prompt_tokens - found.cached_tokens,
            "output_tokens": found.output_tokens,
            "accepted_drafts": found.accepted_drafts,
            "rejected_drafts": found.rejected_drafts,
            "common_tokens": found.common,
            "nearest_is_own": found.is_own,
            "first_token_s": found.first_s,
        }
        if limited_to is None or found.key_id:
            shown |= await self._show_texts(found)
        return json_response(shown)

    async def stages(self, request: web.Request) -> web.Response:
        """GET /v1/requests/{id}/stages: of a running request, or one of the last that entered at this node: the peers
        and layers of each ring that computed a part of it."""
        found = self._observation.answered(request.match_info["id"], request[CALLER].limited_to)
        if found is None:
            return plain_error(
                "not_found", "this request is not known at this node: it entered at another node or long ago"
            )
        shown = {"request_id": found.request_id, "model": found.model, "legs": found.legs.describe()}
        return json_response(shown)

    async def _show_texts(self, found: Explanation) -> dict[str, str]:
        """The texts around the first token that differed, here and in the nearest kept sequence."""
        text = await self._texts.of(self._models, await self._models.named(found.model))
        parts = {"text_before": found.before, "text_here": found.mine, "text_there": found.theirs}
        return {name: text.tokenizer.decode(list(ids), skip_special_tokens=False) for name, ids in parts.items()}
