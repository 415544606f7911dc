"""Handlers that place, show and stop instances of models."""

from __future__ import annotations

from functools import partial

from aiohttp import web
from msgspec.structs import replace

from exo_mesh.api.access import CALLER
from exo_mesh.api.body import read_as
from exo_mesh.api.context import ApiContext
from exo_mesh.api.decoding import decode_body
from exo_mesh.api.errors import json_response, plain_error
from exo_mesh.api.model_names import find_model, named_model
from exo_mesh.api.placement_options import InstanceBody, errors_name, instance_spec, names_of_query, preview_spec


class InstanceRoutes:
    """Each method answers one route."""

    def __init__(self, context: ApiContext) -> None:
        self._models = context.services.models
        self._instances = context.services.instances
        self._observation = context.services.observation
        self._body_silence_s = context.options.body_silence_s

    async def create_instance(self, request: web.Request) -> web.Response:
        """POST /instance: place a model and wait until it is ready; `replicas`: the number of instances to place."""
        body = await read_as(request, self._body_silence_s, partial(decode_body, kind=InstanceBody))
        body.model = await self._found(request, body.model)
        spec = instance_spec(body)
        if body.replicas is not None:
            made = await self._instances.create_replicas(spec, body.replicas)
            return json_response({"object": "list", "data": made}, 201)
        return json_response(await self._instances.create(spec), 201)

    async def previews(self, request: web.Request) -> web.Response:
        """GET /instance/previews?model=…: the possible placements for the query (see wishes.preview_spec)."""
        with errors_name(names_of_query(request.query)):
            spec = preview_spec(request.query)
            spec = replace(spec, model=await self._found(request, spec.model))
            return json_response({"model": spec.model, "previews": await self._instances.previews(spec)})

    async def instance(self, request: web.Request) -> web.Response:
        """GET /instance/{id}"""
        instance_id = request.match_info["id"]
        placed = self._observation.state().view.instances
        found = next((one for one in placed if one.id == instance_id), None)
        return _no_instance(instance_id) if found is None else json_response(found)

    async def delete_instance(self, request: web.Request) -> web.Response:
        """DELETE /instance/{id}"""
        instance_id = request.match_info["id"]
        if not await self._instances.delete(instance_id):
            return _no_instance(instance_id)
        return json_response({"id": instance_id, "object": "instance.deleted", "deleted": True})

    async def _found(self, request: web.Request, name: str) -> str:
        """The name of a model that can be placed: a model of the mesh, or of the hub if the caller may download."""
        name = await named_model(request, self._models, name)
        return (await find_model(self._models, name, may_download=request[CALLER].may_download)).name


def _no_instance(instance_id: str) -> web.Response:
    return plain_error("not_found", f"no instance {instance_id}; GET /state lists the instances", "id")
