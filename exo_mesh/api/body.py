"""Reads the body of a request within deadlines and in turn, unpacks it within the size limit, counts its values before
anything is decoded, and refuses unknown Expect headers.

aiohttp would unpack a body before it checks the size: 98 KB of gzip took 96 MiB. So aiohttp leaves bodies packed here.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import TypeVar, cast

from aiohttp import hdrs, web
from aiohttp.typedefs import Handler
from multidict import CIMultiDict

from exo_mesh.api.access import CALLER
from exo_mesh.api.bodies.room import FREE_BYTES, BodyHold, BodyRooms
from exo_mesh.api.bodies.values import check_values
from exo_mesh.api.quoting import quoted
from exo_mesh.base.clock import monotonic
from exo_mesh.errors import InputError

T = TypeVar("T")

EXPECTATION = web.RequestKey("expectation", str)
"""The Expect header of a request, if it is not 100-continue."""

BODY_ROOMS = web.AppKey("body_rooms", BodyRooms)
HOLD = web.RequestKey("body_hold", BodyHold)

UNCOUNTED_BYTES = 640
"""A body this short has too few values to take room, so it is not counted."""

COUNTED_HERE_BYTES = 1 << 18
"""A longer body is counted in a thread."""

LEAST_BYTES_A_S = 1 << 16
"""Least average speed of a body that takes room; 0.5 Mbit/s."""

_GZIP, _ZLIB, _RAW_DEFLATE = 16 + zlib.MAX_WBITS, zlib.MAX_WBITS, -zlib.MAX_WBITS


async def read_body(request: web.Request, silence_s: float) -> bytes:
    """Read the whole body, unpack it, and count its values. silence_s: how long the client may pause before the end of
    the body.

    Raises InputError, BodiesWaitError, HTTPRequestTimeout or HTTPRequestEntityTooLarge.
    """
    most = request.client_max_size
    encoding = request.headers.get(hdrs.CONTENT_ENCODING, "").strip().lower()
    if encoding not in ("", "identity", "gzip", "x-gzip", "deflate"):
        raise InputError(f"Content-Encoding is {quoted(encoding)}; it must be gzip, deflate or identity")
    caller = request[CALLER]
    hold = request[HOLD] = BodyHold(request.app[BODY_ROOMS], caller.key_id or request.remote or "")
    is_packed = encoding not in ("", "identity")
    body = await _receive(request, most, silence_s, hold, is_packed=is_packed)
    if is_packed:
        body = await _unpacked_with_room(body, encoding, most, hold)
    if len(body) > UNCOUNTED_BYTES:
        count = partial(check_values, body)
        num_values = await hold.rooms.work(count) if len(body) > COUNTED_HERE_BYTES else count()
        await hold.working(len(body), num_values)
    return body


async def read_as(request: web.Request, silence_s: float, decode: Callable[[bytes], T]) -> T:
    """Read the body as `read_body`, and decode it: a large one in a thread, because that takes up to a second. Raises
    also the errors of `decode`."""
    return await run_apart(request, partial(decode, await read_body(request, silence_s)))


async def run_apart(request: web.Request, work: Callable[[], T]) -> T:
    """Run work on the body of a request: at once, or in a thread if the body is large."""
    hold = request.get(HOLD)
    return await hold.rooms.work(work) if hold is not None and hold.is_large else work()


def release_body(request: web.Request) -> None:
    """Give back the room of a body that is not needed any more. The caller must have dropped the decoded objects."""
    if (hold := request.get(HOLD)) is not None:
        hold.release()


@web.middleware
async def release_bodies(request: web.Request, handler: Handler) -> web.StreamResponse:
    """The middleware that gives back the room of a body at the end of its request."""
    try:
        return await handler(request)
    finally:
        release_body(request)


async def _receive(request: web.Request, most: int, silence_s: float, hold: BodyHold, *, is_packed: bool) -> bytes:
    """The bytes of the body. A body that takes room must also arrive at LEAST_BYTES_A_S, so that nobody keeps the room
    by sending slowly. A packed body that is not small takes the room of the largest one."""
    announced = request.content_length
    if (announced or 0) > most:
        raise web.HTTPRequestEntityTooLarge(most, announced or 0)
    has_room = (announced or 0) > FREE_BYTES
    if has_room:
        await hold.arriving(most if is_packed else announced or 0)
    body = bytearray()
    last_at = monotonic() + silence_s + most / LEAST_BYTES_A_S
    while True:
        try:
            async with asyncio.timeout(min(silence_s, last_at - monotonic())):
                chunk = await request.content.readany()
        except TimeoutError as exc:
            raise web.HTTPRequestTimeout from exc
        except web.RequestPayloadError as exc:
            raise InputError("the request body does not match its headers (length or transfer encoding)") from exc
        if not chunk:
            return cast(bytes, body)  # a copy would double the memory of a large body
        body += chunk
        if len(body) > most:
            raise web.HTTPRequestEntityTooLarge(most, len(body))
        if len(body) > FREE_BYTES and not has_room:  # its length was not announced
            has_room = True
            await hold.arriving(most)


async def _unpacked_with_room(packed: bytes, encoding: str, most: int, hold: BodyHold) -> bytes:
    """Unpack a body. A body that stays small needs no room; any other reserves the room of the largest body in
    advance."""
    with suppress(web.HTTPRequestEntityTooLarge):
        return _unpacked(packed, encoding, min(most, FREE_BYTES))
    if len(packed) <= FREE_BYTES:  # else it has that room already
        await hold.arriving(most)
    return await hold.rooms.work(partial(_unpacked, packed, encoding, most))


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
