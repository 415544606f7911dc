"""Calls of a model server over HTTP, each with a deadline and a bound on the bytes read."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

import aiohttp
import msgspec

from exo_mesh.base.authorities import read_authorities
from exo_mesh.errors import EngineError, MeshError, StageLostError
from exo_mesh_openai.failures import error_of_reply
from exo_mesh_openai.options import FIRST_TOKEN_S, ServerAddress

MAX_REPLY_BYTES = 4 << 20
"""Longest reply that is no stream: the list of models of a server with some thousand of them."""

MAX_ERROR_BYTES = 64 << 10


class Deadlines(msgspec.Struct, frozen=True):
    """Longest waits in seconds. probe_s: for a short reply. usage_s: for the token counts after the end of an
    answer."""

    connect_s: float = 5.0
    first_token_s: float = FIRST_TOKEN_S
    between_tokens_s: float = 30.0
    usage_s: float = 5.0
    probe_s: float = 3.0


class JsonReply(msgspec.Struct, frozen=True):
    """A short reply. value: its JSON; None if it is not JSON."""

    status: int
    value: Any


class ServerClient:
    """Talks to one model server. Made on the event loop that uses it; every call opens a connection of its own, so that
    no request meets a connection that the server has just closed."""

    def __init__(self, address: ServerAddress, key: str = "", deadlines: Deadlines | None = None) -> None:
        self.address = address
        self.deadlines = deadlines or Deadlines()
        headers = {"Accept-Encoding": "identity"}
        if key:
            headers["Authorization"] = f"Bearer {key}"
        tls = read_authorities() if address.base.startswith("https:") else True
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(ssl=tls, limit=0, force_close=True),
            cookie_jar=aiohttp.DummyCookieJar(),
            headers=headers,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=self.deadlines.connect_s),
            auto_decompress=False,  # a few bytes could become gigabytes, and nothing was asked for in this form
            trust_env=False,  # prompts go to the server that the operator named, and to no proxy
        )

    async def close(self) -> None:
        await self._session.close()

    async def ask(self, path: str, body: Mapping[str, Any] | None = None) -> JsonReply:
        """A short reply: of a GET, or of a POST if there is a body.

        Raises StageLostError if the server does not answer, and EngineError if the reply is too long or its
        certificate is not valid.
        """
        try:
            async with asyncio.timeout(self.deadlines.probe_s):
                response = await self._request(path, body)
                try:
                    content = await _read(response, MAX_REPLY_BYTES)
                finally:
                    response.close()
        except TimeoutError as exc:
            raise self._lost(f"does not answer within {self.deadlines.probe_s:g} s") from exc
        except aiohttp.ClientError as exc:
            raise self.lost(exc) from exc
        if len(content) >= MAX_REPLY_BYTES:
            raise EngineError(
                f"the model server {self.address.where} sent a reply of more than {MAX_REPLY_BYTES} bytes"
            )
        try:
            return JsonReply(response.status, json.loads(content))
        except (ValueError, RecursionError):
            return JsonReply(response.status, None)

    async def stream(self, path: str, body: Mapping[str, Any]) -> aiohttp.ClientResponse:
        """The reply to a request for a stream of events; the caller sets the deadline and closes it.

        Raises the error of the mesh that fits a refusal, and StageLostError if the server cannot be reached.
        """
        try:
            response = await self._request(path, body)
            if response.status == 200 and response.content_type == "text/event-stream":
                return response
            try:
                content = await _read(response, MAX_ERROR_BYTES)
            finally:
                response.close()
        except aiohttp.ClientError as exc:
            raise self.lost(exc) from exc
        if response.status == 200:
            raise EngineError(f"the model server {self.address.where} does not stream: {response.content_type}")
        raise error_of_reply(response.status, content, self.address.where, response.headers.get("Retry-After", ""))

    async def _request(self, path: str, body: Mapping[str, Any] | None) -> aiohttp.ClientResponse:
        url = self.address.base + path
        # redirects are not followed: prompts and the key are for this server only
        if body is None:
            return await self._session.get(url, allow_redirects=False)
        return await self._session.post(url, json=body, allow_redirects=False)

    def lost(self, exc: aiohttp.ClientError) -> MeshError:
        """The error for a broken or refused connection."""
        if isinstance(exc, aiohttp.ClientSSLError):
            return EngineError(f"the certificate of the model server {self.address.where} is not valid: {exc}")
        if isinstance(exc, aiohttp.ClientConnectorError):
            return self._lost(f"cannot be reached: {exc.strerror or exc}")
        return self._lost(f"broke the connection ({type(exc).__name__})")

    def _lost(self, why: str) -> StageLostError:
        return StageLostError(f"the model server {self.address.where} {why}")


async def _read(response: aiohttp.ClientResponse, most: int) -> bytes:
    """The body of a reply, cut at `most` bytes."""
    content = bytearray()
    while len(content) < most and (part := await response.content.read(most - len(content))):
        content += part
    return bytes(content)
