"""Reads the body of a request within deadlines and in turn, unpacks it within the size limit, counts its values while
it arrives, and refuses unknown Expect headers.

aiohttp would unpack a body before it checks the size: 98 KB of gzip took 96 MiB. So aiohttp leaves bodies packed here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from traceback import clear_frames
from typing import TypeVar, cast

from aiohttp import StreamReader, hdrs, web
from aiohttp.typedefs import Handler
from multidict import CIMultiDict

from exo_mesh.api.access import CALLER
from exo_mesh.api.bodies.room import FREE_BYTES, BodyHold, BodyRooms
from exo_mesh.api.bodies.unpacking import Unpacker
from exo_mesh.api.bodies.values import check_values
from exo_mesh.api.errors import quoted
from exo_mesh.base.clock import monotonic
from exo_mesh.base.tasks import Turns
from exo_mesh.domain.bounded_json import ValueCounter
from exo_mesh.errors import InputError

T = TypeVar("T")

EXPECTATION = web.RequestKey("expectation", str)
"""The Expect header of a request, if it is not 100-continue."""

BODY_ROOMS = web.AppKey("body_rooms", BodyRooms)
HOLD = web.RequestKey("body_hold", BodyHold)

LEAST_BYTES_A_S = 1 << 16
"""Least average speed of a body that takes room; 0.5 Mbit/s."""

DISCARD_S = 10.0
DISCARDED_SIZES = 4
"""How long, and for how many bytes in sizes of the largest body, the rest of a refused body is read."""

MAX_CHAINED = 8
"""Most errors of a chain of causes whose variables are cleared."""


async def read_body(request: web.Request, silence_s: float, *, is_json: bool = True) -> bytes:
    """Read the whole body, unpack it, and count its values if it is JSON. silence_s: how long the client may pause
    before the end of the body.

    Raises InputError, BodiesWaitError, HTTPRequestTimeout or HTTPRequestEntityTooLarge.
    """
    encoding = request.headers.get(hdrs.CONTENT_ENCODING, "").strip().lower()
    if encoding not in ("", "identity", "gzip", "x-gzip", "deflate"):
        raise InputError(f"Content-Encoding is {quoted(encoding)}; it must be gzip, deflate or identity")
    caller = request[CALLER]
    hold = request[HOLD] = BodyHold(request.app[BODY_ROOMS], caller.key_id or request.remote or "")
    values = ValueCounter() if is_json else None
    body = await _receive(
        request, silence_s, hold, values, None if encoding in ("", "identity") else Unpacker(encoding)
    )
    await hold.working(len(body), 0 if values is None else values.count)
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
    """The middleware that gives back the room of a body at the end of its request, and its memory after an error."""
    try:
        return await handler(request)
    except Exception as exc:
        _drop_variables(exc)
        raise
    finally:
        release_body(request)


def _drop_variables(error: BaseException) -> None:
    """Clear the variables of the functions that an error has left. It keeps them, with the whole body, until the next
    full garbage collection if one of them is the error itself."""
    chained: BaseException | None = error
    for _ in range(MAX_CHAINED):
        if chained is None:
            return
        clear_frames(chained.__traceback__)
        chained = chained.__cause__ or chained.__context__


async def _receive(
    request: web.Request, silence_s: float, hold: BodyHold, values: ValueCounter | None, unpacker: Unpacker | None
) -> bytes:
    """The bytes of the body. Nothing more is read from the client's socket while the body waits for its room or for its
    turn. A packed body that is not small takes the room of the largest one.

    A body that takes room must also arrive at LEAST_BYTES_A_S, so that nobody keeps the room by sending slowly.
    """
    most, announced = request.client_max_size, request.content_length or 0
    if announced > most:
        raise web.HTTPRequestEntityTooLarge(most, announced)
    has_room = announced > FREE_BYTES
    if has_room:
        await hold.arriving(announced if unpacker is None else most)
    body = bytearray()
    last_at = monotonic() + silence_s + most / LEAST_BYTES_A_S
    while chunk := await _next_chunk(request, min(silence_s, last_at - monotonic())):
        for part in (chunk,) if unpacker is None else unpacker.parts(chunk):
            size = len(body) + len(part)
            if size > most:
                raise web.HTTPRequestEntityTooLarge(most, size)
            if size > FREE_BYTES:
                if not has_room:  # its length was not announced
                    has_room = True
                    await hold.arriving(most)
                await hold.rooms.reading.take()
            body += part
            if values is not None:
                values.add(part)
                check_values(values.count)
    if unpacker is not None:
        unpacker.end()
    return cast(bytes, body)  # a copy would double the memory of a large body


async def _next_chunk(request: web.Request, limit_s: float) -> bytes:
    """The next bytes of the body as they were sent; b"" at its end."""
    try:
        async with asyncio.timeout(limit_s):
            return await request.content.readany()
    except TimeoutError as exc:
        raise web.HTTPRequestTimeout from exc
    except web.RequestPayloadError as exc:
        raise InputError("the request body does not match its headers (length or transfer encoding)") from exc


@web.middleware
async def discard_rests(request: web.Request, handler: Handler) -> web.StreamResponse:
    """The middleware that answers before the whole body has arrived, and then discards the rest of it, in turns: many
    clients read the answer only after they have sent everything."""
    response = await handler(request)
    if not request.content.is_eof():
        await response.prepare(request)
        await response.write_eof()
        await _discard(request.content, request.app[BODY_ROOMS].discarding, DISCARDED_SIZES * request.client_max_size)
    return response


async def _discard(content: StreamReader, turns: Turns, most: int) -> None:
    """Read bytes until the end of the body, or until there are too many or the time is over; aiohttp then closes the
    connection."""
    num_bytes = 0
    with suppress(TimeoutError, ConnectionError, web.RequestPayloadError):
        async with asyncio.timeout(DISCARD_S):
            while num_bytes <= most and (chunk := await content.readany()):
                num_bytes += len(chunk)
                await turns.take()


def take_expectations(
    answer: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]],
) -> Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]:
    """Wrap the handler of all requests so that unknown Expect headers reach `refuse_expectations`, and not aiohttp.

    aiohttp would answer them before the access rules, in plain text, and with a 500 if they are not UTF-8. If the
    client has left before it gets its `100 Continue`, aiohttp would log that as our error.
    """

    async def answer_unless_left(request: web.BaseRequest) -> web.StreamResponse:
        try:
            return await answer_without(request)
        except ConnectionError:
            if request.transport is not None and not request.transport.is_closing():
                raise
            return web.Response(status=499)  # nobody gets it

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

    return answer_unless_left


@web.middleware
async def refuse_expectations(request: web.Request, handler: Handler) -> web.StreamResponse:
    """The innermost middleware. Raises InputError for an Expect header that is not 100-continue."""
    if EXPECTATION in request:
        raise InputError(f"Expect is {quoted(request[EXPECTATION])}; it must be 100-continue")
    return await handler(request)
