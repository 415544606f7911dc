"""A real nginx on the node's machine, with the shipped configuration, and with nothing but `proxy_pass`.

To the node every client then calls from the loopback, and is no admin for that."""

from __future__ import annotations

import ssl
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp
import pytest

from exo_mesh.api.access import AccessPolicy
from exo_mesh.api.context import ApiOptions
from exo_mesh.cli.client.child_node import running_node
from exo_mesh.security.local_token import PREFIX, read_token
from exo_mesh.security.secret import new_secret, write_new
from tests.api.scripted_mesh import ScriptedMesh, served
from tests.security.test_api_tls import write_pair
from tests.support.nginx import NGINX, nginx, shipped_nginx
from tests.support.processes import clean_environ
from tests.support.raw_upstream import raw_upstreams
from tests.text.text_models import write_text_model

pytestmark = pytest.mark.skipif(NGINX is None, reason="not installed: nginx")

ELSEWHERE = "127.0.0.2"
TOKEN = PREFIX + "A" * 43
CALLS = [("GET", "/health"), ("GET", "/state"), ("POST", "/drain"), ("DELETE", "/instance/i1")]
STRANGER = {"open": [200, 200, 403, 403], "closed": [200, 401, 401, 401]}


@contextmanager
def proxied(folder: Path, upstream: str, extra: str = "") -> Iterator[str]:
    """The address of an nginx before `upstream`."""
    with nginx(folder, f"server {{ listen 127.0.0.1:PORT; location / {{ proxy_pass {upstream}; {extra} }} }}") as url:
        yield url


async def statuses(url: str, token: str = "", host: str = "", caller: str = "127.0.0.1") -> list[int]:
    """What each of CALLS gets through the proxy. caller: the address from which it is called."""
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    if host:
        headers["Host"] = host
    connector = aiohttp.TCPConnector(local_addr=(caller, 0))
    async with aiohttp.ClientSession(url, headers=headers, connector=connector) as http:
        found = []
        for method, path in CALLS:
            async with http.request(method, path, json={} if method == "POST" else None) as reply:
                found.append(reply.status)
    return found


@pytest.mark.parametrize("mesh", ["open", "closed"])
async def test_a_stranger_behind_nginx_is_no_admin(tmp_path: Path, mesh: str) -> None:
    access = AccessPolicy(needs_key=mesh == "closed", local_token=TOKEN)
    model_dir = write_text_model(tmp_path)
    async with served(ScriptedMesh(model_dir), ApiOptions(access=access)) as api:
        with proxied(tmp_path / "plain", api.url) as url:
            assert await statuses(url) == STRANGER[mesh]
            assert not api.mesh.draining and api.mesh.instances
            assert await statuses(url, TOKEN) == [200, 200, 200, 200]
        with proxied(tmp_path / "host", api.url, "proxy_set_header Host $host;") as url:
            assert await statuses(url, host="mesh.example.org") == [421] * 4
            assert await statuses(url, TOKEN, host="mesh.example.org") == [200, 200, 200, 404]


@pytest.mark.skipif(sys.platform != "linux", reason="this system has one loopback address")
@pytest.mark.parametrize("mesh", ["open", "closed"])
async def test_a_stranger_behind_the_shipped_nginx_is_no_admin(mesh: str, tmp_path: Path) -> None:
    access = AccessPolicy(needs_key=mesh == "closed", local_token=TOKEN)
    async with served(ScriptedMesh(write_text_model(tmp_path)), ApiOptions(access=access)) as api:
        with shipped_nginx(tmp_path / "nginx", [urlsplit(api.url).netloc]) as proxy:
            assert await statuses(proxy.url, caller=ELSEWHERE) == [200, {"open": 200, "closed": 401}[mesh], 403, 403]
            assert await statuses(proxy.url, TOKEN, caller=ELSEWHERE) == [200, 200, 403, 403], "whatever token it shows"
            assert await statuses(proxy.url) == STRANGER[mesh], "nginx's own machine has no rights on the node either"
            assert not api.mesh.draining and api.mesh.instances
            name = "mesh.example.org"
            assert await statuses(proxy.url, host=name) == [421] * 4, "the node sees the name that the client used"
            assert await statuses(proxy.url, TOKEN) == [200, 200, 200, 200]


@pytest.mark.extended
@pytest.mark.parametrize("mesh", ["open", "closed"])
async def test_a_stranger_behind_nginx_is_no_admin_of_a_real_node(tmp_path: Path, mesh: str) -> None:
    home = tmp_path / "home"
    write_new(tmp_path / "secret", new_secret())
    secret = ["--secret-file", str(tmp_path / "secret")] if mesh == "closed" else []
    with running_node(home, ["--engine", "dummy", *secret], clean_environ(home)) as node:
        api_url = node.ready["api_url"]
        assert urlsplit(api_url).hostname == "127.0.0.1"
        with shipped_nginx(tmp_path / "nginx", [urlsplit(api_url).netloc]) as proxy:
            assert await statuses(proxy.url) == STRANGER[mesh]
            assert await statuses(proxy.url, read_token(home)) == [200, 200, 200, 404]


async def test_the_tls_variant_tells_nodes_that_the_client_used_https(tmp_path: Path) -> None:
    certificate, key = write_pair(tmp_path, "mesh.example.org")
    certificate.rename(tmp_path / "fullchain.pem")
    key.rename(tmp_path / "privkey.pem")
    anybody = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    anybody.check_hostname, anybody.verify_mode = False, ssl.CERT_NONE
    async with raw_upstreams("answers") as (node,), aiohttp.ClientSession() as http:
        with shipped_nginx(tmp_path, [node.address], site="exo-mesh-tls.conf") as proxy:
            url = proxy.url.replace("http:", "https:")
            async with http.get(f"{url}/state", ssl=anybody) as reply:
                assert reply.status == 200 and await reply.text() == "halfmore"
            assert node.headers("x-forwarded-proto") == ["https"]
            plain = proxy.status_url.removesuffix("/stub_status")
            headers = {"Host": "mesh.example.org"}
            async with http.post(f"{plain}/v1/completions?a=1", headers=headers, allow_redirects=False) as reply:
                assert reply.status == 308
                assert reply.headers["Location"] == "https://mesh.example.org/v1/completions?a=1"
