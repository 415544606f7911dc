"""Handlers for API keys and sessions: list, make, revoke. They change the same file as `exo-mesh key`, with the same
effect.

The text of a key or session is only in the reply to the call that makes it.
"""

from __future__ import annotations

import asyncio
import datetime
import logging
from typing import Any, Literal

import msgspec
from aiohttp import hdrs, web

from exo_mesh.api.access import ANY_ADMIN, CALLER, LOCAL
from exo_mesh.api.body import read_as
from exo_mesh.api.context import ApiContext
from exo_mesh.api.decoding import decode_body
from exo_mesh.api.errors import json_response, plain_error, quoted
from exo_mesh.errors import InputError
from exo_mesh.security.api_keys import ApiKey, KeyFile, Role
from exo_mesh.security.sessions import VALID_S, Session, number_of

_log = logging.getLogger(__name__)


class KeyBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/keys. name: for people, in lists of keys."""

    role: Literal["use", "admin"] = "use"
    name: str = ""


class SessionBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/session. id: of the session that is renewed."""

    id: str | None = None


class KeyRoutes:
    """Each method answers one route."""

    def __init__(self, context: ApiContext) -> None:
        self._access = context.options.access
        self._body_silence_s = context.options.body_silence_s

    async def keys(self, request: web.Request) -> web.Response:
        """GET /v1/keys: list the valid keys, and the sessions that this node has seen. scope: "mesh" if the keys are
        valid at all nodes, "node" if only here."""
        file = self._access.keys
        keys = [] if file is None else sorted((one for one in file.table.values() if not one.revoked), key=_age)
        own = request[CALLER].key_id
        scope = "mesh" if self._access.needs_key else "node"
        sessions = self._access.sessions.known() if self._access.sessions else []
        data = [*(_described(key, own) for key in keys), *(_described_session(one, own) for one in sessions)]
        return json_response({"object": "list", "scope": scope, "data": data})

    async def session(self, request: web.Request) -> web.Response:
        """POST /v1/session: give the holder of the local token a session, with which every member of a closed mesh
        accepts it. `key` is null in a mesh without a secret, where the token remains what a page sends."""
        if request[CALLER] != LOCAL:
            return plain_error(
                "insufficient_permissions", "only the local token of this node is exchanged for a session"
            )
        if self._access.sessions is None:
            return json_response({"object": "session", "key": None})
        body = await read_as(request, self._body_silence_s, lambda body: decode_body(body or b"{}", SessionBody))
        if body.id is not None and not number_of(body.id):
            raise InputError(f"id is {quoted(body.id)}, which is not the id of a session", param="id")
        text, session = self._access.sessions.make(body.id or "")
        _log.info(
            "made the session %s for a holder of the local token, valid for %d hours", session.id, VALID_S // 3600
        )
        reply = json_response({"object": "session", "id": session.id, "key": text, "valid_s": VALID_S})
        reply.headers[hdrs.CACHE_CONTROL] = "no-store"
        return reply

    async def add(self, request: web.Request) -> web.Response:
        """POST /v1/keys: make a key."""
        if request[CALLER] == ANY_ADMIN:
            return _no_owner()
        body = await read_as(request, self._body_silence_s, lambda body: decode_body(body or b"{}", KeyBody))
        now = datetime.datetime.now(datetime.UTC)
        text, key = await asyncio.to_thread(self._file().add, Role(body.role), now, body.name)
        reply = json_response({**_described(key, ""), "key": text}, 201)
        reply.headers[hdrs.CACHE_CONTROL] = "no-store"
        return reply

    async def remove(self, request: web.Request) -> web.Response:
        """DELETE /v1/keys/{id}: revoke a key or a session; no peer of the mesh accepts it any longer."""
        if request[CALLER] == ANY_ADMIN:
            return _no_owner()
        wanted, now = request.match_info["id"], datetime.datetime.now(datetime.UTC)
        if self._access.sessions and (number := number_of(wanted)):
            await asyncio.to_thread(self._file().refuse, number, now)
        elif not await asyncio.to_thread(self._file().remove, wanted, now):
            return plain_error("not_found", f"no key {wanted}; GET /v1/keys lists the keys", "id")
        return json_response({"id": wanted, "object": "api_key.deleted", "deleted": True})

    def _file(self) -> KeyFile:
        if self._access.keys is None:
            raise InputError("this node keeps no API keys")
        return self._access.keys


def _described(key: ApiKey, own: str) -> dict[str, Any]:
    return {
        "id": key.id,
        "object": "api_key",
        "name": key.name,
        "role": str(key.role),
        "created": key.created,
        "is_yours": bool(own) and key.id == own,
    }


def _described_session(session: Session, own: str) -> dict[str, Any]:
    until = datetime.datetime.fromtimestamp(session.ends_at, datetime.UTC)
    return {
        "id": session.id,
        "object": "session",
        "role": str(Role.ADMIN),
        "until": f"{until:%Y-%m-%dT%H:%M:%SZ}",
        "is_yours": session.id == own,
    }


def _age(key: ApiKey) -> tuple[str, str]:
    return key.created, key.id


def _no_owner() -> web.Response:
    """The refusal for callers with --open-admin rights only: the first key would lock everybody else out of the API."""
    message = (
        "--open-admin does not allow changes to keys, because the first key closes the API to everybody without a key: "
        "run `exo-mesh key new` on the node's machine, or send the node's local token"
    )
    return plain_error("insufficient_permissions", message)
