"""The handlers of API keys: list, make, revoke. They change the file of `exo-mesh key`, with the same effect.

The text of a key is in one reply only: that of the call that makes it.
"""

from __future__ import annotations

import asyncio
import datetime
from typing import Any, Literal

import msgspec
from aiohttp import hdrs, web

from exo_mesh.api.access import ANY_ADMIN, CALLER
from exo_mesh.api.body import read_body
from exo_mesh.api.context import ApiContext
from exo_mesh.api.decoding import decode_body
from exo_mesh.api.errors import json_response, plain_error
from exo_mesh.api.routes import ADMIN, Route, RouteTable
from exo_mesh.errors import InputError
from exo_mesh.security.api_keys import ApiKey, KeyFile, Role


class KeyBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/keys."""

    role: Literal["use", "admin"] = "use"


class KeyRoutes:
    """Each method answers one route."""

    def __init__(self, context: ApiContext) -> None:
        self._access = context.options.access
        self._body_silence_s = context.options.body_silence_s

    def table(self) -> RouteTable:
        """The routes."""
        # fmt: off
        return [
            Route("GET", ("/v1/keys",), self.keys, ADMIN, "The valid API keys, without their texts"),
            Route(
                "POST", ("/v1/keys",), self.add, ADMIN, "Make an API key; its text is in this reply only",
                body=KeyBody, status=201, errors=(400,),
            ),
            Route("DELETE", ("/v1/keys/{id}",), self.remove, ADMIN, "Revoke an API key", errors=(400, 404)),
        ]
        # fmt: on

    async def keys(self, request: web.Request) -> web.Response:
        """GET /v1/keys. scope: the nodes at which these keys are valid."""
        file = self._access.keys
        keys = [] if file is None else sorted((one for one in file.table.values() if not one.revoked), key=_age)
        own = request[CALLER].key_id
        scope = "mesh" if self._access.needs_key else "node"
        return json_response({"object": "list", "scope": scope, "data": [_described(key, own) for key in keys]})

    async def add(self, request: web.Request) -> web.Response:
        """POST /v1/keys"""
        if request[CALLER] == ANY_ADMIN:
            return _no_owner()
        body = decode_body(await read_body(request, self._body_silence_s) or b"{}", KeyBody)
        text, key = await asyncio.to_thread(self._file().add, Role(body.role), datetime.datetime.now(datetime.UTC))
        reply = json_response({**_described(key, ""), "key": text}, 201)
        reply.headers[hdrs.CACHE_CONTROL] = "no-store"
        return reply

    async def remove(self, request: web.Request) -> web.Response:
        """DELETE /v1/keys/{id}: no peer of the mesh takes the key any more."""
        if request[CALLER] == ANY_ADMIN:
            return _no_owner()
        wanted = request.match_info["id"]
        if not await asyncio.to_thread(self._file().remove, wanted, datetime.datetime.now(datetime.UTC)):
            return plain_error("not_found", f"there is no key {wanted}; GET /v1/keys lists them", "id")
        return json_response({"id": wanted, "object": "api_key.deleted", "deleted": True})

    def _file(self) -> KeyFile:
        if self._access.keys is None:
            raise InputError("this node keeps no API keys")
        return self._access.keys


def _described(key: ApiKey, own: str) -> dict[str, Any]:
    return {
        "id": key.id,
        "object": "api_key",
        "role": str(key.role),
        "created": key.created,
        "is_yours": bool(own) and key.id == own,
    }


def _age(key: ApiKey) -> tuple[str, str]:
    return key.created, key.id


def _no_owner() -> web.Response:
    """The first key closes the API to all others, which a stranger on an open mesh must not do."""
    message = (
        "--open-admin lets nobody change the keys, because the first key closes the API to everybody without one: "
        "run `exo-mesh key new` on the machine of the node, or send its local token"
    )
    return plain_error("insufficient_permissions", message)
