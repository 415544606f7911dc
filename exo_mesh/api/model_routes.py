"""Handlers for models: search at the hub, cards, deletion, the disk space of models, and the model store."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import msgspec
from aiohttp import web

from exo_mesh.api.body import read_as
from exo_mesh.api.context import ApiContext
from exo_mesh.api.decoding import decode_body
from exo_mesh.api.errors import json_response, plain_error, quoted
from exo_mesh.api.listed import model_object
from exo_mesh.api.model_names import may_name_paths
from exo_mesh.domain.download import DownloadState
from exo_mesh.errors import InputError, NoStoreError
from exo_mesh.models.names import is_name
from exo_mesh.node.store_service import StoreService

MAX_QUERY_CHARS = 200
DEFAULT_RESULTS, MAX_RESULTS = 20, 100
MAX_PEERS = 64
"""Peers that one request may name."""


class CardBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /models/add."""

    repo: str


class ModelRoutes:
    """Each method answers one route."""

    def __init__(self, context: ApiContext) -> None:
        self._models = context.services.models
        self._any_store = context.services.store
        self._body_silence_s = context.options.body_silence_s
        self._started_at = context.started_at

    async def search(self, request: web.Request) -> web.Response:
        """GET /models/search?query=…[&limit=N]: search the hub for models."""
        query, limit = request.query.get("query", "").strip(), request.query.get("limit", str(DEFAULT_RESULTS))
        if not 0 < len(query) <= MAX_QUERY_CHARS or not query.isprintable():
            raise InputError(f"query must have 1 to {MAX_QUERY_CHARS} printable characters", param="query")
        if not re.fullmatch(r"[1-9][0-9]{0,2}", limit) or int(limit) > MAX_RESULTS:
            raise InputError(
                f"limit must be a whole number from 1 to {MAX_RESULTS}, not {quoted(limit)}", param="limit"
            )
        found = await self._models.search(query, int(limit))
        return json_response({"object": "list", "query": query, "data": found})

    async def add_card(self, request: web.Request) -> web.Response:
        """POST /models/add: make a card from the headers of a repository, for all peers."""
        body = await read_as(request, self._body_silence_s, partial(decode_body, kind=CardBody))
        if not is_name(body.repo):
            message = f"repo must be a hub id such as Qwen/Qwen3-0.6B, or ID@REVISION, not {quoted(body.repo)}"
            raise InputError(message, param="repo")
        entry = await self._models.add_card(body.repo)
        return json_response(model_object(entry, self._started_at), 201)

    async def delete_card(self, request: web.Request) -> web.Response:
        """DELETE /models/custom/{id}: delete a custom card; the files of the model stay."""
        name = request.match_info["id"]
        if not await self._models.delete_card(name):
            return plain_error("not_found", f"no custom card {name}; POST /models/add makes one", "id")
        return json_response({"id": name, "object": "model_card.deleted", "deleted": True})

    async def delete(self, request: web.Request) -> web.Response:
        """DELETE /models/{id}[?peers=A,B]: delete the files of a model, at all peers or at the named ones."""
        name = request.match_info["id"]
        peers = peer_names(request.query.get("peers", "").split(",") if "peers" in request.query else ())
        freed = await self._models.delete(name, peers=peers)
        if not freed:
            who = "none of the named peers" if peers else "no peer"
            return plain_error("model_not_found", f"{who} has files of {name} that it may delete", "id")
        return json_response({"id": name, "object": "model", "deleted": True, "peers": list(freed),
                              "freed_bytes": sum(freed.values())})  # fmt: skip

    async def storage(self, request: web.Request) -> web.Response:
        """GET /store/storage: the disk space of this node's models; only admins see the path."""
        storage = await self._models.storage()
        hidden = () if may_name_paths(request) else ("path",)
        return json_response({name: value for name, value in storage.items() if name not in hidden})

    @property
    def _store(self) -> StoreService:
        if not self._any_store.is_configured:
            raise NoStoreError(
                "no model store is configured: peers copy models from each other, and download the rest from the hub"
            )
        return self._any_store

    async def store_health(self, request: web.Request) -> web.Response:
        """GET /store/health: the peer that hosts the store, and whether it is alive."""
        return json_response(self._store.health())

    async def store_registry(self, request: web.Request) -> web.Response:
        """GET /store/registry: the models of the store."""
        return json_response({"object": "list", "data": self._store.registry()})

    async def store_downloads(self, request: web.Request) -> web.Response:
        """GET /store/downloads: the downloads of the store's host."""
        return json_response({"object": "list", "data": [one.describe() for one in self._store.downloads()]})

    async def store_status(self, request: web.Request) -> web.Response:
        """GET /store/models/{id}/download/status: the progress of the host's download of a model."""
        name = request.match_info["id"]
        if found := self._store.downloads(name):
            return json_response(found[0].describe())
        if any(model["id"] == name and model["whole"] for model in self._store.registry()):
            return json_response({"model": name, "state": str(DownloadState.COMPLETED)})
        return plain_error("model_not_found", f"the model store neither has nor downloads {name}", "id")

    async def store_download(self, request: web.Request) -> web.Response:
        """POST /store/models/{id}/download: let the host download all files of a model."""
        entries = await self._store.start(request.match_info["id"])
        return json_response({"object": "list", "data": [one.describe() for one in entries]}, 202)

    async def store_delete(self, request: web.Request) -> web.Response:
        """DELETE /store/models/{id}: delete a model of the store and all copies staged from it."""
        name = request.match_info["id"]
        if not await self._store.delete(name):
            return plain_error("model_not_found", f"the model store does not have {name}", "id")
        return json_response({"id": name, "object": "store.model", "deleted": True})

    async def purge_staging(self, request: web.Request) -> web.Response:
        """POST /store/purge-staging[?peers=A,B]: delete unused staged copies."""
        peers = peer_names(request.query.get("peers", "").split(",") if "peers" in request.query else ())
        return json_response({"object": "list", "peers": await self._store.purge(peers)})


def peer_names(names: Any) -> tuple[str, ...]:
    """Check the names or ids of peers in a request. Raises InputError for too many, and for an invalid name."""
    given = tuple(names)
    if len(given) > MAX_PEERS or not all(0 < len(name) <= 200 and name.isprintable() for name in given):
        raise InputError(f"peers must be a list of at most {MAX_PEERS} names or ids of peers", param="peers")
    return given
