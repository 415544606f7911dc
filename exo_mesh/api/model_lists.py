"""Handlers that list the models of the mesh, in OpenAI's form, or in Anthropic's for its clients."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from exo_mesh.api.anthropic.failures import speaks_anthropic
from exo_mesh.api.anthropic.models import model_info, models_page
from exo_mesh.api.context import ApiContext
from exo_mesh.api.errors import json_response, plain_error, quoted
from exo_mesh.api.listed import known_object, model_object, status_of
from exo_mesh.api.model_names import named_model
from exo_mesh.api.table import STATUSES


class ModelListRoutes:
    """Each method answers one route."""

    def __init__(self, context: ApiContext) -> None:
        self._models = context.services.models
        self._started_at = context.started_at

    async def models(self, request: web.Request) -> web.Response:
        """GET /v1/models: the models on the disks of all peers. `?status=loaded` lists only models with an instance,
        `?status=served` those of model servers, `?status=downloaded` all that can be used at once, whatever their own
        status, `?status=partial` the others. is_reading: this node is still reading its disk, so that more may follow.

        `?status=unusable` instead lists models on this node's disk that cannot be used, each with the reason;
        `?status=known` lists models that have a card but that no peer has.
        """
        entries = self._models.all()
        if speaks_anthropic(request):
            return json_response(models_page(entries, self._started_at, request.query))
        match request.query.get("status"):
            case None:
                pass
            case "downloaded":
                entries = [entry for entry in entries if not entry.is_partial]
            case "partial":
                entries = [entry for entry in entries if entry.is_partial]
            case "loaded":
                entries = [entry for entry in entries if entry.instance_ids]
            case "served":
                entries = [entry for entry in entries if status_of(entry) == "served"]
            case "unusable":
                return json_response({"object": "list", "data": self._unusable_objects()})
            case "known":
                cards = self._models.cards_without_files()
                known = [known_object(card, self._started_at, self._models.engines_of(card)) for card in cards]
                return json_response({"object": "list", "data": known})
            case other:
                message = f"status is {quoted(other)}; it must be {STATUSES}"
                return plain_error("invalid_request", message, "status")
        found = [model_object(entry, self._started_at) for entry in entries]
        return json_response({"object": "list", "data": found, "is_reading": self._models.is_reading()})

    async def model(self, request: web.Request) -> web.Response:
        """GET /v1/models/{id}: one model; hub ids contain a slash."""
        entry = await self._models.named(await named_model(request, self._models, request.match_info["id"]))
        make = model_info if speaks_anthropic(request) else model_object
        return json_response(make(entry, self._started_at))

    def _unusable_objects(self) -> list[dict[str, Any]]:
        return [
            {"id": name, "object": "model", "status": "unusable", "reason": reason}
            for name, reason in sorted(self._models.unusable().items())
        ]
