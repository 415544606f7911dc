"""Routes with the names of older programs: thin wrappers around instances, and the identity of this node."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final, Literal, TypeVar

import msgspec
from aiohttp import web

from exo_mesh.api.access import CALLER
from exo_mesh.api.body import read_as
from exo_mesh.api.context import ApiContext
from exo_mesh.api.core.preparing import choose_model
from exo_mesh.api.decoding import decode_body
from exo_mesh.api.errors import json_response, plain_error
from exo_mesh.api.model_names import find_model, model_of_request, named_model
from exo_mesh.api.placement_options import InstanceBody, errors_name, instance_spec
from exo_mesh.api.table import PLACEMENT
from exo_mesh.domain.wiring_rules import MAX_MESH_RANKS
from exo_mesh.errors import InputError
from exo_mesh.rings.placing.spec import InstanceSpec

T = TypeVar("T")

_BACKENDS: Final[Mapping[str, Literal["ring", "jaccl"]]] = {"MlxRing": "ring", "MlxJaccl": "jaccl", "MlxIbv": "jaccl"}


_OUR_NAMES = {
    "model": "model_id",
    "min_peers": "min_nodes",
    "exclude_peers": "excluded_nodes",
    "tensor_group": "sharding",
    "group_backend": "instance_meta",
}
"""Our name of each field, and the name that older programs use."""


class PlaceBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /place_instance. With sharding "Tensor", min_nodes peers form one stage (a tensor group). instance_meta: the
    communication backend of that group."""

    model_id: str
    sharding: Literal["Pipeline", "Tensor"] | None = None
    instance_meta: Literal["MlxRing", "MlxJaccl", "MlxIbv"] | None = None
    min_nodes: int | None = None
    excluded_nodes: list[str] = []


class ModelBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /model/load and /model/unload. model: another name for model_id."""

    model_id: str | None = None
    model: str | None = None


class SeedRoutes:
    """Each method answers one route."""

    def __init__(self, context: ApiContext) -> None:
        self._context = context
        self._models = context.services.models
        self._instances = context.services.instances
        self._observation = context.services.observation

    async def place(self, request: web.Request) -> web.Response:
        """POST /place_instance"""
        body = await self._read(request, partial(decode_body, kind=PlaceBody))
        with errors_name(_OUR_NAMES):
            return json_response(await self._instances.create(await self._spec(request, body)), 201)

    async def placement(self, request: web.Request) -> web.Response:
        """GET /instance/placement?model_id=…: preview one plan with its arithmetic; changes nothing."""
        wanted = _place_query(request)
        with errors_name(_OUR_NAMES):
            return json_response(await self._instances.preview(await self._spec(request, wanted)))

    async def load(self, request: web.Request) -> web.Response:
        """POST /model/load: return the model's instance, or place one and wait for it."""
        name = await self._model(request)
        entry = await find_model(
            self._models, choose_model(name, self._models.all()), may_download=request[CALLER].may_download
        )
        return json_response(await self._instances.create(InstanceSpec(entry.name)))

    async def unload(self, request: web.Request) -> web.Response:
        """POST /model/unload: stop all instances of a model; without a name, of the only loaded model."""
        name = await self._model(request)
        placed = self._observation.state().view.instances
        models = {instance.model for instance in placed}
        if name is None and len(models) != 1:
            raise InputError(f"model_id is required, because {len(models)} models are loaded", param="model_id")
        wanted = models.pop() if name is None else (await self._models.named(name)).name
        ended = await self._end([one.id for one in placed if one.model == wanted])
        if not ended:
            return plain_error("not_found", f"{wanted} has no instance; GET /state lists the instances", "model_id")
        return json_response({"model": wanted, "instances": ended, "unloaded": True})

    async def collect(self, request: web.Request) -> web.Response:
        """POST /model/gc"""
        return json_response({"instances": await self._end(self._observation.idle_instances())})

    async def node_id(self, request: web.Request) -> web.Response:
        """GET /node_id"""
        return json_response(self._observation.identity()["node_id"])

    async def identity(self, request: web.Request) -> web.Response:
        """GET /node/identity"""
        return json_response(self._observation.identity())

    async def _spec(self, request: web.Request, body: PlaceBody) -> InstanceSpec:
        """Translate the body to an InstanceSpec. Raises InputError naming the wrong field, or as find_model."""
        most = MAX_MESH_RANKS if body.sharding == "Tensor" else 2**31 - 1
        if body.min_nodes is not None and not 1 <= body.min_nodes <= most:
            raise InputError(f"min_nodes must be between 1 and {most}", param="min_nodes")
        if body.sharding == "Tensor" and body.min_nodes == 1:
            raise InputError("sharding Tensor needs at least 2 nodes, but min_nodes is 1", param="min_nodes")
        name = await named_model(request, self._models, body.model_id)
        entry = await find_model(self._models, name, may_download=request[CALLER].may_download)
        wish = InstanceBody(model=entry.name, min_peers=body.min_nodes, exclude_peers=body.excluded_nodes)
        if body.sharding is not None:
            wish.tensor_group = (body.min_nodes or 2) if body.sharding == "Tensor" else 1
        if body.instance_meta is not None:
            wish.group_backend = _BACKENDS[body.instance_meta]
        return instance_spec(wish)

    async def _model(self, request: web.Request) -> str | None:
        """The model that the body names, else this node's default model. The body may be empty."""
        body = await self._read(request, lambda raw: decode_body(b"{}" if raw.isspace() else raw or b"{}", ModelBody))
        if body.model is not None and body.model_id is not None:
            raise InputError("model and model_id are two names of the same field: send only one", param="model")
        name = body.model_id if body.model is None else body.model
        return await model_of_request(request, self._models, name, self._context.options.defaults().model)

    async def _read(self, request: web.Request, decode: Callable[[bytes], T]) -> T:
        return await read_as(request, self._context.options.body_silence_s, decode)

    async def _end(self, instance_ids: list[str]) -> list[str]:
        """Stop these instances; returns the ids that still existed."""
        return [one for one in instance_ids if await self._instances.delete(one)]


def _place_query(request: web.Request) -> PlaceBody:
    """Read the query as a body. Raises InputError that names the wrong parameter."""
    for name in request.query:
        if name not in PLACEMENT:
            raise InputError(f"{name}: this route does not support this parameter", param=name)
    given: dict[str, Any] = dict(request.query)
    if "model_id" not in given:
        raise InputError("model_id: this parameter is required", param="model_id")
    if "excluded_nodes" in given:
        given["excluded_nodes"] = [name for name in given["excluded_nodes"].split(",") if name]
    try:
        return msgspec.convert(given, PlaceBody, strict=False)
    except msgspec.ValidationError as exc:
        text, _, place = str(exc).partition(" - at `$.")
        param = place.rstrip("`")
        raise InputError(f"{param}: {text[:1].lower()}{text[1:]}", param=param) from exc
