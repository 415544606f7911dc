"""TLS connections with junk to the control port, the data port and the file server of a closed mesh."""

from __future__ import annotations

import asyncio
import random
import ssl
from collections import Counter
from contextlib import suppress

from tools.fuzz.calls import many
from tools.fuzz.mutate import mutated
from tools.fuzz.rig import Rig

COUNT, NUM_NODES, CLOSED = 10_000, 1, True
FLAGS = ("--discovery", "none")
HTTP2 = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0"
ANSWER_S = 0.3


def client_hello() -> bytes:
    """Returns a TLS client's first message."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    with suppress(ssl.SSLWantReadError):
        context.wrap_bio(incoming, outgoing, server_hostname="mesh.exo-mesh").do_handshake()
    return outgoing.read()


async def attack(rig: Rig, rng: random.Random, count: int) -> Counter[str]:
    """Sends mutated client hellos, whole handshakes without a certificate, HTTP/2 in the clear, and noise."""
    hello = client_hello()
    data_port = int(rig.instance()["stages"][-1]["endpoint"].rpartition(":")[2])
    ports = (int(rig.control.rpartition(":")[2]), data_port, rig.files_port)
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])

    async def one(number: int) -> str:
        port = ports[number // 10 % 3]
        try:
            if number % 10 == 0:
                return await _handshake(port, context)
            opening = (mutated(rng, hello), hello + rng.randbytes(200), HTTP2, rng.randbytes(300))[number % 4]
            return await _say(port, opening)
        except OSError as exc:
            return type(exc).__name__

    return await many(count, one)


async def _handshake(port: int, context: ssl.SSLContext) -> str:
    """Does a handshake. With TLS 1.3 the server refuses a client without a certificate after the client's side has
    finished."""
    try:
        async with asyncio.timeout(5):
            reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
            writer.write(HTTP2)
            answer = await reader.read(1000)
    except (ssl.SSLError, ConnectionError):
        return "refused"
    except TimeoutError:
        return "silent"
    writer.close()
    return "ANSWERED" if answer else "closed"


async def _say(port: int, opening: bytes) -> str:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(opening)
        async with asyncio.timeout(ANSWER_S):
            answer = await reader.read(1000)
    except TimeoutError:
        return "silent"
    finally:
        writer.close()
    return "alert" if answer else "closed"
