"""Bodies of requests: packed ones, malformed ones, ones that never end, and the Expect header."""

from __future__ import annotations

import asyncio
import gzip
import json
import socket
import tracemalloc
import zlib
from contextlib import suppress
from typing import Any

import pytest

from exo_mesh.api.access import AccessPolicy
from exo_mesh.api.context import ApiOptions
from tests.api.scripted_mesh import ScriptedMesh, Served, served

PATH = "/v1/chat/completions"
BODY = json.dumps({"messages": [{"role": "user", "content": "Hi"}]}).encode()
BARE = zlib.compressobj(wbits=-15)
BARE_DEFLATE = BARE.compress(BODY) + BARE.flush()
MIB = 2**20


async def send(api: Served, body: bytes, **headers: str) -> tuple[int, Any]:
    named = {name.replace("_", "-"): text for name, text in headers.items()}
    async with api.http.post(PATH, data=body, headers={"Content-Type": "application/json", **named}) as reply:
        return reply.status, await reply.json()


@pytest.mark.parametrize(
    ("encoding", "body"),
    [("gzip", gzip.compress(BODY, mtime=0)), ("x-gzip", gzip.compress(BODY, mtime=0)), ("deflate", zlib.compress(BODY)),
     ("Deflate", BARE_DEFLATE), ("identity", BODY)],
    ids=["gzip", "x-gzip", "zlib", "bare deflate", "identity"],
)  # fmt: skip
async def test_a_packed_body_is_unpacked(api: Served, encoding: str, body: bytes) -> None:
    status, reply = await send(api, body, Content_Encoding=encoding)
    assert (status, reply["choices"][0]["message"]["content"]) == (200, "Hello, world!")


@pytest.mark.parametrize(
    ("encoding", "body", "words"),
    [
        ("gzip", BODY, "not valid gzip"),
        ("gzip", gzip.compress(BODY, mtime=0)[:-3], "cut off"),
        ("gzip", gzip.compress(BODY, mtime=0) + b"more", "extra bytes"),
        ("deflate", b"\x00" * 20, "not valid deflate"),
        ("br", BODY, '"br"'),
        ("gzip, gzip", BODY, "must be gzip, deflate or identity"),
    ],
)
async def test_a_malformed_body_is_a_400(
    api: Served, encoding: str, body: bytes, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    status, reply = await send(api, body, Content_Encoding=encoding)
    assert (status, reply["error"]["code"]) == (400, "invalid_request")
    assert words in reply["error"]["message"]
    assert not [record for record in caplog.records if record.exc_info], "no traceback"


async def test_a_bomb_is_refused_while_it_is_unpacked(api: Served) -> None:
    bomb = gzip.compress(b" " * (96 * MIB))
    assert len(bomb) < 200_000
    tracemalloc.start()
    status, reply = await send(api, bomb, Content_Encoding="gzip")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (status, reply["error"]["code"]) == (413, "request_too_large")
    assert peak < 48 * MIB, "the limit of 16 MiB, and what zlib copies while it grows"


async def test_a_body_that_never_comes_is_a_408(mesh: ScriptedMesh) -> None:
    async with served(mesh, ApiOptions(body_silence_s=0.05)) as api:
        head = f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n"
        status, reply = await raw(api, head.encode() + b"{")
    assert (status, reply["error"]["code"]) == (408, "request_timeout")


@pytest.mark.parametrize("expect", [b"200-ok", b"\xff\xfe", b"100-continue, x"])
@pytest.mark.parametrize("path", [PATH, "/nowhere"])
async def test_an_odd_expectation_is_a_400_in_our_shape(mesh: ScriptedMesh, path: str, expect: bytes) -> None:
    head = b"POST %s HTTP/1.1\r\nHost: localhost\r\nX-Odd: \xff\r\nExpect: %s\r\nContent-Length: 2\r\n\r\n{}"
    async with served(mesh, ApiOptions()) as api:
        status, reply = await raw(api, head % (path.encode(), expect))
    assert (status, reply["error"]["code"]) == (400, "invalid_request"), reply
    assert "100-continue" in reply["error"]["message"]


async def test_a_client_that_waits_for_100_continue_gets_it(api: Served) -> None:
    async with api.http.post(PATH, data=BODY, expect100=True) as reply:
        assert reply.status == 200


@pytest.mark.parametrize("expect", [b"100-continue", b"200-ok"])
async def test_a_client_that_leaves_before_it_may_continue_is_no_error_of_the_node(
    api: Served, caplog: pytest.LogCaptureFixture, expect: bytes
) -> None:
    head = b"POST %s HTTP/1.1\r\nHost: localhost\r\nExpect: %s\r\nContent-Length: 2\r\n\r\n"
    for path in (PATH, "/nowhere"):
        with socket.create_connection(("127.0.0.1", int(api.url.rpartition(":")[2]))) as client:
            client.sendall(head % (path.encode(), expect))
            client.shutdown(socket.SHUT_WR)
            with suppress(ConnectionError):
                await asyncio.to_thread(client.recv, 1)  # the node ends the connection as well
    assert (await send(api, BODY))[0] == 200
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []


@pytest.mark.parametrize("header", [b"Content-Encoding: gzip", b"Expect: \xff"])
async def test_who_may_not_ask_gets_a_401_whatever_they_send(mesh: ScriptedMesh, header: bytes) -> None:
    head = b"POST %s HTTP/1.1\r\nHost: localhost\r\n%s\r\nContent-Length: 2\r\n\r\n{}"
    policy = AccessPolicy(needs_key=True)
    async with served(mesh, ApiOptions(access=policy)) as api:
        status, reply = await raw(api, head % (PATH.encode(), header))
    assert (status, reply["error"]["code"]) == (401, "invalid_api_key")


async def test_a_host_that_is_no_text_is_answered_without_it(mesh: ScriptedMesh) -> None:
    head = b"GET / HTTP/1.1\r\nHost: 127.0\xae0.1\r\nAuthorization: Bearer local\r\n\r\n"
    async with served(mesh, ApiOptions(access=AccessPolicy(local_token="local"))) as api:
        status, reply = await raw(api, head)
    assert status == 200 and "127.0\ufffd0.1" in reply["openai_base_url"]


async def raw(api: Served, request: bytes) -> tuple[int, Any]:
    """Status and body of the answer to bytes that no client would send."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(api.url.rpartition(":")[2]))
    async with asyncio.timeout(10):
        writer.write(request)
        head = await reader.readuntil(b"\r\n\r\n")
        length = next(line for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:"))
        body = await reader.readexactly(int(length.partition(b":")[2]))
    writer.close()
    return int(head.split()[1]), json.loads(body)
