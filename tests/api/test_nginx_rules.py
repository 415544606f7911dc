"""The shipped nginx configuration before servers that misbehave: what is sent on, what is not, and what clients see."""

from __future__ import annotations

import asyncio
import http.client
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from exo_mesh.api.routes import Route, canonical
from exo_mesh.api.table import TABLE
from exo_mesh.security.api_keys import Role
from tests.support.nginx import NGINX, shipped_nginx
from tests.support.proxies import PROXIES, a_proxy
from tests.support.raw_upstream import RawUpstream, raw_upstreams

pytestmark = pytest.mark.skipif(NGINX is None, reason="not installed: nginx")

CHAT = "/v1/chat/completions"
ELSEWHERE = "127.0.0.2"
"""A caller that is not the machine of nginx itself, as nginx sees it."""

ASKED_BY_STRANGERS = [
    ("POST", CHAT, 200), ("GET", "/state", 200), ("DELETE", "/v1/streams/x", 200), ("POST", "/drain", 403),
    ("DELETE", "/instance/x", 403), ("GET", "/metrics", 403), ("GET", "/v1/keys", 403), ("POST", "/v1/join", 403),
]  # fmt: skip

NOT_FOR_STRANGERS = {"/metrics", "/v1/join"}
"""Besides what needs the role admin. A code to join is good at one node only, which is asked directly."""


@asynccontextmanager
async def proxied(
    folder: Path, *does: str, site: str = "exo-mesh.conf", local: str = "127.0.0.1"
) -> AsyncIterator[tuple[aiohttp.ClientSession, list[RawUpstream]]]:
    async with raw_upstreams(*does) as upstreams:
        with shipped_nginx(folder, [one.address for one in upstreams], site=site) as proxy:
            connector = aiohttp.TCPConnector(local_addr=(local, 0), limit=0)
            async with aiohttp.ClientSession(proxy.url, connector=connector) as web:
                yield web, upstreams


async def post(web: aiohttp.ClientSession, path: str = CHAT, **headers: str) -> tuple[int, str]:
    sent = {name.replace("_", "-"): value for name, value in headers.items()}
    async with web.post(path, data=b"{}", headers=sent) as reply:
        return reply.status, await reply.text()


@pytest.mark.parametrize("trouble", ["closes", "503"])
async def test_a_generation_goes_on_at_the_next_node_with_the_same_key(trouble: str, tmp_path: Path) -> None:
    async with proxied(tmp_path, trouble, "answers") as (web, (first, second)):
        for _ in range(2):  # by turns, so that one of them meets the first node
            assert await post(web) == (200, "halfmore")
        assert len(first.asked) == 1 and len(second.asked) == 2
        (key,) = first.headers("idempotency-key")
        assert key and len(key) == 32 and key in second.headers("idempotency-key")
        assert len(set(second.headers("idempotency-key"))) == 2, "each request has a key of its own"
        assert await post(web, Idempotency_Key="mine") == (200, "halfmore")
        assert (first.headers("idempotency-key") + second.headers("idempotency-key")).count("mine") in (1, 2)


async def test_without_added_keys_only_requests_with_a_key_of_the_client_go_on(tmp_path: Path) -> None:
    site = "exo-mesh-own-keys.conf"
    async with proxied(tmp_path, "closes", "closes", site=site) as (web, upstreams):
        assert (await post(web))[0] == 503
        assert sum(len(one.asked) for one in upstreams) == 1, "never generated a second time"
        assert (await post(web, Idempotency_Key="mine"))[0] == 503
        assert [key for one in upstreams for key in one.headers("idempotency-key")].count("mine") >= 2
    async with proxied(tmp_path / "dead", "answers", "answers", site=site) as (web, (first, second)):
        first.server.close()
        assert [await post(web) for _ in range(4)] == [(200, "halfmore")] * 4, "nothing has reached the dead node"
        assert len(second.asked) == 4


async def test_nothing_is_sent_on_after_the_first_byte(tmp_path: Path) -> None:
    async with proxied(tmp_path, "half", "half") as (web, upstreams):
        with pytest.raises(aiohttp.ClientPayloadError):
            await post(web, Idempotency_Key="mine")
        assert sum(len(one.asked) for one in upstreams) == 1


@pytest.mark.parametrize("status", ["429", "504"])
async def test_other_errors_come_from_the_node_as_they_are(status: str, tmp_path: Path) -> None:
    async with proxied(tmp_path, status, status) as (web, upstreams):
        async with web.post(CHAT, data=b"{}") as reply:
            assert reply.status == int(status) and reply.headers["Retry-After"] == "7"
            assert (await reply.json())["error"]["code"] == "said_by_the_node"
        assert sum(len(one.asked) for one in upstreams) == 1


async def test_a_post_that_is_no_generation_reaches_one_node(tmp_path: Path) -> None:
    async with proxied(tmp_path, "closes", "closes") as (web, upstreams):
        async with web.post("/tokenize", data=b"{}") as reply:
            assert reply.status == 503 and reply.headers["Retry-After"] == "2"
            assert (await reply.json())["error"]["code"] == "not_ready"
        assert sum(len(one.asked) for one in upstreams) == 1


async def test_nodes_that_failed_are_tried_again_if_nobody_else_is_left(tmp_path: Path) -> None:
    async with proxied(tmp_path, "closes", "closes", "closes") as (web, upstreams):
        for _ in range(6):
            assert (await post(web))[0] == 503
        for one in upstreams:
            one.does = "answers"
        assert [(await post(web))[0] for _ in range(6)] == [200] * 6, "at once, and not after 30 s"


async def test_headers_of_the_client_that_only_a_proxy_may_write_are_replaced(tmp_path: Path) -> None:
    me = ELSEWHERE if sys.platform == "linux" else "127.0.0.1"
    lies = {"X-Forwarded-For": "10.0.0.1", "X-Forwarded-Proto": "https", "Forwarded": "for=::1", "X-Real-IP": "::1"}
    async with proxied(tmp_path, "answers", local=me) as (web, (one,)):
        async with web.post(CHAT, data=b"{}", headers={**lies, "Authorization": "Bearer k", "x-api-key": "k"}):
            pass
        _, seen = one.asked[0]
        assert (seen["x-forwarded-for"], seen["x-real-ip"], seen["x-forwarded-proto"]) == (me, me, "http")
        assert "forwarded" not in seen and seen["host"] == f"{web._base_url.host}:{web._base_url.port}"
        assert seen["authorization"] == "bearer k" and seen["x-api-key"] == "k", "keys are passed on"
        await post(web, Last_Event_ID="7")
        assert one.headers("idempotency-key")[1] is None, "the node explains that this needs a key of the client"


def raw_status(port: int, method: str, path: str) -> int:
    """The status of a request with the path as it stands, from ELSEWHERE."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5, source_address=(ELSEWHERE, 0))
    connection.request(method, path)
    status = connection.getresponse().status
    connection.close()
    return status


def rows() -> list[Route]:
    return [row for group in TABLE for row in group.routes]


@pytest.mark.skipif(sys.platform != "linux", reason="this system has one loopback address")
async def test_strangers_get_what_clients_need_and_nothing_else(tmp_path: Path) -> None:
    """Every route of the table: a new one has to be allowed in nginx/exo-mesh.conf, or is for admins."""
    table = rows()
    async with proxied(tmp_path / "nginx", "answers", local=ELSEWHERE) as (web, (node,)):
        for row in table:
            for path in row.paths:
                plain = canonical(path).replace("{", "").replace("}", "")
                async with web.request(row.method, plain) as reply:
                    wanted = 403 if row.role is Role.ADMIN or path in NOT_FOR_STRANGERS else 200
                    assert reply.status == wanted, f"{row.method} {plain}"
        reached, port = len(node.asked), web._base_url.port  # type: ignore[union-attr]
        for path in ("/drain", "/v1/completions/../../drain", "//drain", "/%64rain", "/instance"):
            assert await asyncio.to_thread(raw_status, port, "POST", path) == 403, path
        for path in ("/v1/./keys", "/v1/k%65ys", "//metrics", "/x/../admin/log", "/admin/log?n=1"):
            assert await asyncio.to_thread(raw_status, port, "GET", path) == 403, path
        assert len(node.asked) == reached
    async with proxied(tmp_path / "near", "answers") as (web, (node,)):
        assert (await post(web, "/drain"))[0] == 200, "the machine of the proxy itself may"


async def test_too_many_requests_get_429_in_our_shape(tmp_path: Path) -> None:
    async def ask(web: aiohttp.ClientSession) -> tuple[int, str, str]:
        async with web.post(CHAT, data=b"{}") as reply:
            return reply.status, reply.headers.get("Retry-After", ""), await reply.text()

    async with proxied(tmp_path, "answers", site="exo-mesh-limits.conf") as (web, _):
        asked = [asyncio.ensure_future(ask(web)) for _ in range(40)]
        for done in asyncio.as_completed(asked):
            status, wait, text = await done
            if status == 429:
                break
        for one in asked:
            one.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
        assert (status, wait) == (429, "1") and '"code": "overloaded"' in text


async def test_a_body_that_is_too_large_gets_413_in_our_shape(tmp_path: Path) -> None:
    async with proxied(tmp_path, "answers") as (web, (node,)):
        async with web.post(CHAT, data=b"{}", headers={"Content-Length": str(21 << 20)}, skip_auto_headers=[]) as reply:
            assert reply.status == 413 and (await reply.json())["error"]["code"] == "request_too_large"
        assert not node.asked


async def test_the_status_page_counts_connections(tmp_path: Path) -> None:
    async with raw_upstreams("answers") as (one,):
        with shipped_nginx(tmp_path, [one.address]) as proxy:
            async with aiohttp.ClientSession() as web, web.get(proxy.status_url) as reply:
                assert "Active connections" in await reply.text()


@pytest.mark.extended
@pytest.mark.parametrize("kind", PROXIES)
async def test_each_proxy_passes_chunks_on_as_they_come(kind: str, tmp_path: Path) -> None:
    async with raw_upstreams("waits") as (node,):
        with a_proxy(kind, tmp_path, [node.address] * 3) as url:
            async with aiohttp.ClientSession(url) as web, web.post(CHAT, data=b"{}") as reply:
                assert await reply.content.readexactly(4) == b"half", "the second chunk has not been sent yet"
                node.release.set()
                assert await reply.content.read() == b"more"


@pytest.mark.skipif(sys.platform != "linux", reason="this system has one loopback address")
@pytest.mark.extended
@pytest.mark.parametrize("kind", PROXIES)
async def test_a_stranger_administers_nothing_through_any_proxy(kind: str, tmp_path: Path) -> None:
    async with raw_upstreams("answers") as (node,):
        with a_proxy(kind, tmp_path, [node.address] * 3) as url:
            connector = aiohttp.TCPConnector(local_addr=(ELSEWHERE, 0))
            async with aiohttp.ClientSession(url, connector=connector) as web:
                for method, path, wanted in ASKED_BY_STRANGERS:
                    async with web.request(method, path, data=b"{}" if method == "POST" else None) as reply:
                        assert reply.status == wanted, f"{method} {path}"
                        if wanted == 403:
                            assert (await reply.json())["error"]["code"] == "insufficient_permissions"
            assert node.headers("x-forwarded-for") == [ELSEWHERE] * 3
            assert "forwarded" not in node.asked[0][1]


@pytest.mark.extended
@pytest.mark.parametrize("trouble", ["closes", "503"])
async def test_haproxy_sends_a_generation_on_with_the_same_key(trouble: str, tmp_path: Path) -> None:
    async with raw_upstreams(trouble, "answers", "answers") as nodes:
        with a_proxy("haproxy", tmp_path, [one.address for one in nodes]) as url:
            async with aiohttp.ClientSession(url) as web:
                assert [await post(web) for _ in range(6)] == [(200, "halfmore")] * 6
        (key, *_) = nodes[0].headers("idempotency-key")
        elsewhere = [key for one in nodes[1:] for key in one.headers("idempotency-key")]
        assert key in elsewhere and len(set(elsewhere)) == len(elsewhere)


@pytest.mark.extended
async def test_caddy_does_not_send_a_request_again_that_has_reached_a_node(tmp_path: Path) -> None:
    async with raw_upstreams("closes", "closes", "closes") as nodes:
        with a_proxy("caddy", tmp_path, [one.address for one in nodes]) as url:
            async with aiohttp.ClientSession(url) as web:
                assert (await post(web))[0] == 502
        assert sum(len(one.asked) for one in nodes) == 1
