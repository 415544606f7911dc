"""Reads the body of a request within deadlines, unpacks it within the size limit, and refuses unknown Expect headers.

aiohttp would unpack a body before it checks the size: 98 KB of gzip took 96 MiB. So aiohttp leaves bodies packed here.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Awaitable, Callable

from aiohttp import hdrs, web
from aiohttp.typedefs import Handler
from multidict import CIMultiDict

from exo_mesh.api.quoting import quoted
from exo_mesh.errors import InputError

EXPECTATION = web.RequestKey("expectation", str)
"""The Expect header of a request, if it is not 100-continue."""

_GZIP, _ZLIB, _RAW_DEFLATE = 16 + zlib.MAX_WBITS, zlib.MAX_WBITS, -zlib.MAX_WBITS


async def read_body(request: web.Request, silence_s: float) -> bytes:
    """Read the whole body and unpack it. silence_s: how long the client may pause before the end of the body.

    Raises InputError, HTTPRequestTimeout or HTTPRequestEntityTooLarge.
    """
    most = request.client_max_size
    encoding = request.headers.get(hdrs.CONTENT_ENCODING, "").strip().lower()
    if encoding not in ("", "identity", "gzip", "x-gzip", "deflate"):
        raise InputError(f"Content-Encoding is {quoted(encoding)}; it must be gzip, deflate or identity")
    packed = await _receive(request, most, silence_s)
    return packed if encoding in ("", "identity") else _unpacked(packed, encoding, most)


async def _receive(request: web.Request, most: int, silence_s: float) -> bytes:
    chunks: list[bytes] = []
    size = 0
    if (request.content_length or 0) > most:
        raise web.HTTPRequestEntityTooLarge(most, request.content_length or 0)
    while True:
        try:
            async with asyncio.timeout(silence_s):
                chunk = await request.content.readany()
        except TimeoutError as exc:
            raise web.HTTPRequestTimeout from exc
        except web.RequestPayloadError as exc:
            raise InputError("the request body does not match its headers (length or transfer encoding)") from exc
        if not chunk:
            return b"".join(chunks)
        chunks.append(chunk)
        size += len(chunk)
        if size > most:
            raise web.HTTPRequestEntityTooLarge(most, size)


def _unpacked(packed: bytes, encoding: str, most: int) -> bytes:
    """Unpack a body, but never more than `most` + 1 bytes of it. Raises InputError or HTTPRequestEntityTooLarge."""
    if not packed:
        return b""
    # some clients send deflate without the zlib header that RFC 9110 requires
    deflate = _ZLIB if packed[0] & 0xF == 8 else _RAW_DEFLATE
    unpacker = zlib.decompressobj(deflate if encoding == "deflate" else _GZIP)
    try:
        body = unpacker.decompress(packed, most + 1)
    except zlib.error as exc:
        raise InputError(f"the request body is not valid {encoding}") from exc
    if len(body) > most:
        raise web.HTTPRequestEntityTooLarge(most, len(body))
    if not unpacker.eof or unpacker.unused_data:
        raise InputError(f"the request body is not valid {encoding}: it is cut off, or has extra bytes after its end")
    return body


def take_expectations(
    answer: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]],
) -> Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]:
    """Wrap the handler of all requests so that unknown Expect headers reach `refuse_expectations`, and not aiohttp.

    aiohttp would answer them before the access rules, in plain text, and with a 500 if they are not UTF-8.
    """

    async def answer_without(request: web.BaseRequest) -> web.StreamResponse:
        wanted = request.headers.get(hdrs.EXPECT)
        if wanted is None or wanted.strip().lower() == "100-continue":
            return await answer(request)
        others = [(name, text) for name, text in request.headers.items() if name.lower() != "expect"]
        # aiohttp encodes the headers again, and fails at surrogates, which stand for bytes that are not UTF-8
        kept = CIMultiDict((name, text.encode("utf-8", "replace").decode()) for name, text in others)
        changed = request.clone(headers=kept)
        changed[EXPECTATION] = wanted
        response = await answer(changed)
        await response.prepare(changed)
        return response

    return answer_without


@web.middleware
async def refuse_expectations(request: web.Request, handler: Handler) -> web.StreamResponse:
    """The innermost middleware. Raises InputError for an Expect header that is not 100-continue."""
    if EXPECTATION in request:
        raise InputError(f"Expect is {quoted(request[EXPECTATION])}; it must be 100-continue")
    return await handler(request)
