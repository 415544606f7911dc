"""Handlers for invitations: the operator of a node opens one, and a machine that has the code joins.

A machine without a key may call only /v1/join, and only while an invitation is open. The API may be plain HTTP, because
the exchange (exo_mesh.security.joining) is safe even if others read it.
"""

from __future__ import annotations

import asyncio
import base64
import ipaddress
from typing import Any

import msgspec
from aiohttp import hdrs, web

from exo_mesh.api.access import ANY_ADMIN, CALLER, LOCAL
from exo_mesh.api.context import ApiContext
from exo_mesh.api.errors import json_response, plain_error
from exo_mesh.api.web.qr import MAX_BYTES, qr_rows
from exo_mesh.errors import InputError
from exo_mesh.security.invitations import Invitation
from exo_mesh.security.joining import Side, shown_name

MAX_BODY_BYTES = 1024
_NEEDS_TOKEN = "an invitation needs the local token: run `exo-mesh invite` on the node's machine, as the node's user"
_NEEDS_PRIVACY = (
    "with an admin key, an invitation can be opened only over HTTPS or from the node's own machine, because others on "
    "the network could read the code. Run `exo-mesh invite` on the node's machine, or start the node with --tls-cert"
)
_FORWARDED = ("Forwarded", "X-Forwarded-For", "X-Forwarded-Proto", "X-Real-IP")
"""Headers with which a proxy shows that it forwards a call."""


class HelloBody(msgspec.Struct, forbid_unknown_fields=True):
    """The first call of a machine that joins."""

    hello: str
    name: str


class ProofBody(msgspec.Struct, forbid_unknown_fields=True):
    """The second call of a machine that joins."""

    exchange: str
    proof: str


JoinBody = dict[str, str]


class JoinRoutes:
    """Each method answers one route."""

    def __init__(self, context: ApiContext) -> None:
        self._invitations = context.options.invitations

    async def invite(self, request: web.Request) -> web.Response:
        """POST /v1/invite: open an invitation with a one-time code. It needs the local token, or an admin key over a
        private connection.

        The code is as valuable as the secret of the mesh, so somebody who intercepted an admin key on plain HTTP must
        not get one.
        """
        if request[CALLER] == ANY_ADMIN:
            return plain_error("insufficient_permissions", _NEEDS_TOKEN)
        if request[CALLER] != LOCAL and not _is_private(request):
            return plain_error("insufficient_permissions", _NEEDS_PRIVACY)
        invitation = self._invitations.open()
        codes = [f"{address}/{invitation.password}" for address in self._invitations.addresses()]
        described = {**_described(invitation), "codes": codes}
        if codes:
            command = f"exo-mesh join {codes[0]}"
            described |= {"command": command, "qr": qr_rows(command) if len(command) <= MAX_BYTES else []}
        reply = json_response(described, 201)
        reply.headers[hdrs.CACHE_CONTROL] = "no-store"
        return reply

    async def invitation(self, request: web.Request) -> web.Response:
        """GET /v1/invite: the state of the last invitation."""
        last = self._invitations.last
        return json_response({"object": "invitation", "state": "none"} if last is None else _described(last))

    async def withdraw(self, request: web.Request) -> web.Response:
        """DELETE /v1/invite"""
        if (last := self._invitations.last) is not None:
            last.withdraw()
        return await self.invitation(request)

    async def join(self, request: web.Request) -> web.Response:
        """POST /v1/join: one of the two calls of a machine that joins."""
        invitation = self._invitations.current()
        body = await _small_body(request)
        try:
            asked = msgspec.json.decode(body, type=dict[str, str])
            if "hello" in asked:
                return await _hello(invitation, msgspec.convert(asked, HelloBody))
            return _proof(invitation, msgspec.convert(asked, ProofBody), request.remote or "")
        except (msgspec.MsgspecError, RecursionError) as exc:
            raise InputError(f"this is not a valid join message: {exc}") from exc


def _is_private(request: web.Request) -> bool:
    """Whether nobody on the network can read the reply: HTTPS, a caller on this machine, or a proxy on this machine
    that reports HTTPS."""
    if request.secure:
        return True
    try:
        is_here = ipaddress.ip_address((request.remote or "").partition("%")[0]).is_loopback
    except ValueError:
        return False
    proxied = any(name in request.headers for name in _FORWARDED)
    return is_here and (not proxied or request.headers.get("X-Forwarded-Proto", "").lower() == "https")


async def _hello(invitation: Invitation, body: HelloBody) -> web.Response:
    hello = _binary(body.hello, "hello")

    def answer() -> tuple[Side, bytes]:
        side = Side("B", invitation.password)
        return side, side.finish(hello)

    invitation.reserve()
    try:
        side, key = await asyncio.to_thread(answer)
    except BaseException:
        invitation.give_up()
        raise
    transcript = invitation.begin(side, key, hello, shown_name(body.name))
    return json_response({"exchange": transcript.exchange, "hello": _text(transcript.inviter_hello)})


def _proof(invitation: Invitation, body: ProofBody, address: str) -> web.Response:
    return json_response({"sealed": _text(invitation.prove(body.exchange, _binary(body.proof, "proof"), address))})


def _described(invitation: Invitation) -> dict[str, Any]:
    return {
        "object": "invitation",
        "state": str(invitation.state),
        "left_s": round(invitation.left_s, 1),
        "tries_left": invitation.tries_left,
        "joined": invitation.joined,
    }


async def _small_body(request: web.Request) -> bytes:
    """Read a body of at most MAX_BODY_BYTES; the limit is small because the callers have no key. Raises InputError."""
    body = b""
    while chunk := await request.content.read(MAX_BODY_BYTES + 1 - len(body)):
        body += chunk
        if len(body) > MAX_BODY_BYTES:
            raise InputError(f"the join message is too long; at most {MAX_BODY_BYTES} bytes are allowed")
    return body


def _text(value: bytes) -> str:
    return base64.b64encode(value).decode()


def _binary(text: str, param: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except ValueError as exc:
        raise InputError(f"{param} must be base64", param=param) from exc
