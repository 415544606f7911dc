"""Who may call what over HTTP."""

from __future__ import annotations

import asyncio
import datetime
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import aiohttp
import openai
import pytest
from aiohttp import web
from aiohttp.test_utils import make_mocked_request

from exo_mesh.api.access import OPEN_PATHS, USE_ROUTES, AccessPolicy, _is_loopback, is_exempt, needed_role
from exo_mesh.api.app import build_app
from exo_mesh.api.context import ApiOptions
from exo_mesh.security.api_keys import FILE_NAME, KeyFile, Role, new_key
from tests.api.scripted_mesh import ScriptedMesh, Served, served
from tests.text.text_models import write_text_model

NOW = datetime.datetime(2030, 5, 1, tzinfo=datetime.UTC)
ADMIN_ROUTES = {
    ("POST", "/instance"),
    ("DELETE", "/instance/{id}"),
    ("POST", "/drain"),
    ("DELETE", "/drain"),
    ("DELETE", "/v1/diagnostics/node/quarantine"),
}
CHAT = {"messages": [{"role": "user", "content": "Hi"}]}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text_model(tmp_path_factory.mktemp("text-model"))


class Keys:
    """One key of each role, and the file that has them."""

    def __init__(self, directory: Path) -> None:
        self.file = KeyFile(directory / FILE_NAME)
        made = {role: new_key(role, NOW) for role in Role}
        self.file.write([key for _, key in made.values()])
        self.use, self.admin = made[Role.USE][0], made[Role.ADMIN][0]


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    return Keys(tmp_path)


@asynccontextmanager
async def serving(model_dir: Path, **policy: Any) -> AsyncIterator[Served]:
    """A server that the tests, which are on this machine, call like strangers unless loopback_exemption is given."""
    access = AccessPolicy(**{"loopback_exemption": False, **policy})
    async with served(ScriptedMesh(model_dir), ApiOptions(access=access)) as api:
        yield api


async def routes(model_dir: Path) -> list[tuple[str, str]]:
    """The whole route table."""
    app = build_app(ScriptedMesh(model_dir))
    return [(route.method, route.resource.canonical) for route in app.router.routes() if route.resource]


async def call(api: Served, method: str, path: str, key: str = "", **headers: str) -> tuple[int, dict[str, Any]]:
    given = {name.replace("_", "-"): value for name, value in headers.items()}
    if key:
        given["Authorization"] = f"Bearer {key}"
    path = path.replace("{id}", "i1").replace("{id:.+}", "exo-mesh-demo")
    async with api.http.request(method, path, headers=given, json=CHAT if method == "POST" else None) as reply:
        body = await reply.json() if reply.content_type == "application/json" and method != "HEAD" else {}
        return reply.status, body


async def test_every_route_that_changes_something_has_a_role_on_purpose(model_dir: Path) -> None:
    """A new route that is no GET must be named in USE_ROUTES, or here as one for admins."""
    table = {(method, path) for method, path in await routes(model_dir) if method not in ("GET", "HEAD")}
    assert table == USE_ROUTES | ADMIN_ROUTES, "name it in USE_ROUTES of api/access.py, or in ADMIN_ROUTES above"
    assert {path for method, path in await routes(model_dir)} >= OPEN_PATHS
    assert all(needed_role(method, path) is Role.ADMIN for method, path in ADMIN_ROUTES)


@pytest.mark.parametrize("policy", ["a key file", "a secret", "both"])
async def test_without_a_key_every_route_but_the_open_ones_is_401(model_dir: Path, keys: Keys, policy: str) -> None:
    access = {"keys": None if policy == "a secret" else keys.file, "needs_key": policy != "a key file"}
    table = await routes(model_dir)
    assert len(table) > 20
    async with serving(model_dir, **access) as api:
        for method, path in table:
            status, body = await call(api, method, path)
            if path in OPEN_PATHS:
                assert status == 200, path
                continue
            assert status == 401, (method, path)
            if method != "HEAD":
                assert body["error"]["code"] == "invalid_api_key"
                assert body["error"].keys() == {"message", "type", "param", "code"}
        assert api.mesh.requests == [] and len(api.mesh.instances) == 1
        assert (await call(api, "POST", "/nothing"))[0] == 401, "what exists is nobody's business"


@pytest.mark.parametrize("path", ["/health", "/readyz"])
async def test_without_a_key_health_tells_no_names(model_dir: Path, keys: Keys, path: str) -> None:
    async with serving(model_dir, keys=keys.file) as api:
        api.mesh.status = "starting"
        for key, told in ((None, {"code": "starting", "level": ""}), (keys.use, api.mesh.health()["reasons"][0])):
            headers = {"Authorization": f"Bearer {key}"} if key else {}
            async with api.http.get(path, headers=headers) as reply:
                body = await reply.json()
            assert body["status"] == "starting" and body["reasons"] == [told]


async def test_a_key_with_the_role_use_may_chat_and_read_but_not_change(model_dir: Path, keys: Keys) -> None:
    async with serving(model_dir, keys=keys.file) as api:
        for method, path in await routes(model_dir):
            status, body = await call(api, method, path, keys.use)
            if (method, path) in ADMIN_ROUTES:
                assert (status, body["error"]["code"]) == (403, "insufficient_permissions"), path
            else:
                assert status not in (401, 403), path
        assert len(api.mesh.instances) == 1
        assert api.mesh.requests


async def test_an_admin_may_do_everything(model_dir: Path, keys: Keys) -> None:
    async with serving(model_dir, keys=keys.file) as api:
        for method, path in await routes(model_dir):
            status = (await call(api, method, path, keys.admin))[0]
            assert status not in (401, 403), path
            assert status != 500, f"{path}: give tests/api/scripted_mesh.py the method that it calls"


@pytest.mark.parametrize("given", ["", "x", "xm-00000000-" + "A" * 43, "Bearer", "\tü"])
async def test_a_wrong_key_is_no_key(model_dir: Path, keys: Keys, given: str) -> None:
    async with serving(model_dir, keys=keys.file) as api:
        assert (await call(api, "GET", "/state", given))[0] == 401
        assert (await call(api, "GET", "/state", x_api_key=given.strip()))[0] == 401


async def test_the_key_may_come_in_any_of_the_usual_headers(model_dir: Path, keys: Keys) -> None:
    async with serving(model_dir, keys=keys.file) as api:
        for headers in ({"Authorization": f"bearer {keys.use}"}, {"x_api_key": keys.use}):
            assert (await call(api, "GET", "/state", **headers))[0] == 200
        assert (await call(api, "GET", "/state", Authorization="Basic eDp5", x_api_key=keys.use))[0] == 200


async def test_the_openai_client_is_told_what_is_wrong(model_dir: Path, keys: Keys) -> None:
    async with serving(model_dir, keys=keys.file) as api:
        with pytest.raises(openai.AuthenticationError) as refused:
            await api.openai.models.list()
        assert refused.value.code == "invalid_api_key"
        allowed = api.openai.with_options(api_key=keys.use)
        assert [model.id for model in (await allowed.models.list()).data] == ["exo-mesh-demo"]


async def test_this_machine_needs_no_key_and_headers_do_not_make_anybody_this_machine(
    model_dir: Path, keys: Keys
) -> None:
    async with serving(model_dir, keys=keys.file, loopback_exemption=True) as api:
        assert (await call(api, "POST", "/instance"))[0] != 401
        assert (await call(api, "GET", "/state", "not-a-key"))[0] == 200
    policy = AccessPolicy(keys=keys.file)
    forged = {
        "X-Forwarded-For": "127.0.0.1",
        "X-Real-IP": "127.0.0.1",
        "Forwarded": "for=127.0.0.1",
        "Host": "127.0.0.1",
    }
    for remote, exempt in [("192.168.1.5", False), ("127.0.0.1", True), ("127.8.9.9", True), ("::1", True)]:
        assert is_exempt(from_address(remote, forged), policy) is exempt, remote
    assert not is_exempt(from_address("127.0.0.1", forged), AccessPolicy(keys=keys.file, loopback_exemption=False))


def from_address(remote: str, headers: dict[str, str]) -> web.Request:
    transport = mock.Mock()
    transport.get_extra_info.side_effect = lambda name, default=None: (remote, 4) if name == "peername" else default
    return make_mocked_request("POST", "/instance", headers=headers, transport=transport)


@pytest.mark.parametrize(
    ("address", "loopback"),
    [
        ("127.0.0.1", True),
        ("127.255.0.3", True),
        ("::1", True),
        ("::ffff:127.0.0.1", True),
        ("::ffff:10.0.0.1", False),
        ("0.0.0.0", False),
        ("fe80::1%eth0", False),
        ("10.0.0.1", False),
        ("", False),
        (None, False),
        ("/run/exo.sock", False),
    ],
)
def test_what_is_a_loopback_address(address: str | None, loopback: bool) -> None:
    assert _is_loopback(address) is loopback


async def test_a_page_that_rebinds_its_name_to_this_machine_is_not_exempt(model_dir: Path, keys: Keys) -> None:
    async with serving(model_dir, keys=keys.file, loopback_exemption=True) as api:
        for host, status in [("evil.example:52415", 401), ("127.0.0.1:1", 200), ("localhost", 200), ("[::1]:5", 200)]:
            assert (await call(api, "GET", "/state", Host=host))[0] == status, host
    async with serving(model_dir) as api:
        evil = {"Host": "evil.example:1", "Origin": "http://evil.example:1"}
        assert (await call(api, "POST", "/v1/chat/completions", **evil))[0] == 403
        local = {"Host": "studio.local:1", "Origin": "http://studio.local:1"}
        assert (await call(api, "POST", "/v1/chat/completions", **local))[0] == 200


@pytest.mark.parametrize(
    ("headers", "allowed"),
    [
        ({}, True),
        ({"Origin": "https://evil.example"}, False),
        ({"Origin": "null"}, False),
        ({"Origin": "http://127.0.0.1:1"}, False),
        ({"Origin": "SELF"}, True),
        ({"Sec-Fetch-Site": "cross-site"}, False),
        ({"Sec-Fetch-Site": "same-site"}, False),
        ({"Sec-Fetch-Site": "same-origin"}, True),
        ({"Sec-Fetch-Site": "none"}, True),
    ],
)
async def test_a_page_of_another_origin_changes_nothing(
    model_dir: Path, headers: dict[str, str], allowed: bool
) -> None:
    async with serving(model_dir, loopback_exemption=True) as api:
        given = {name: api.url if value == "SELF" else value for name, value in headers.items()}
        for method, path in sorted(USE_ROUTES | ADMIN_ROUTES):
            status, body = await call(api, method, path, **given)
            assert (status == 403) is not allowed, (path, status)
            if not allowed:
                assert body["error"]["code"] == "cross_site_refused"
        assert bool(api.mesh.requests) is allowed
        assert (await call(api, "GET", "/state", **given))[0] == 200, "an open API; no page can read the answer"


async def test_cors_is_closed_by_default_and_opened_for_named_origins_only(model_dir: Path, keys: Keys) -> None:
    app, evil = "https://chat.example.org", "https://evil.example"
    asking = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}

    async def preflight(http: aiohttp.ClientSession, origin: str) -> tuple[int, str | None]:
        async with http.options("/v1/chat/completions", headers={**asking, "Origin": origin}) as reply:
            return reply.status, reply.headers.get("Access-Control-Allow-Origin")

    async with serving(model_dir, keys=keys.file) as api:
        status, allowed = await preflight(api.http, app)
        assert status >= 400 and allowed is None
    async with serving(model_dir, keys=keys.file, cors_origins=frozenset({app})) as api:
        assert await preflight(api.http, app) == (204, app)
        status, allowed = await preflight(api.http, evil)
        assert status >= 400 and allowed is None
        assert (await call(api, "POST", "/v1/chat/completions", keys.use, Origin=app))[0] == 200
        assert (await call(api, "POST", "/v1/chat/completions", Origin=app))[0] == 401, "an origin is no key"
        assert (await call(api, "POST", "/v1/chat/completions", keys.use, Origin=evil))[0] == 403
        headers = {"Authorization": f"Bearer {keys.use}", "Origin": app}
        async with api.http.post("/v1/chat/completions", json={**CHAT, "stream": True}, headers=headers) as reply:
            assert reply.headers["Access-Control-Allow-Origin"] == app
            assert "Origin" in reply.headers["Vary"]
            assert b"[DONE]" in await reply.read()


@pytest.mark.parametrize(
    "text", ["[", "[::1", "http://[", "http://[::1%", "//", "http://a:b:c", "::", "%", "@", "a" * 5000]
)
async def test_malformed_headers_of_a_stranger_are_refused_and_make_no_noise(
    model_dir: Path, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(model_dir, loopback_exemption=True) as api:
        assert (await call(api, "POST", "/v1/completions", Origin=text))[0] in (400, 403)
    policy = AccessPolicy(needs_key=True)
    for host in (text, "", ".", ".."):
        is_exempt(from_address("127.0.0.1", {"Host": host, "Origin": text}), policy)
    assert not is_exempt(from_address("127.0.0.1", {"Host": "["}), policy)
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


async def test_opening_cors_to_all_does_not_open_the_exemption_to_them(model_dir: Path, keys: Keys) -> None:
    page = {"Origin": "https://evil.example"}
    for origins, status in [({"*"}, 401), ({"https://evil.example"}, 200)]:
        async with serving(model_dir, keys=keys.file, loopback_exemption=True, cors_origins=frozenset(origins)) as api:
            assert (await call(api, "POST", "/v1/chat/completions", **page))[0] == status
            assert (await call(api, "GET", "/state", **page))[0] == status
            assert (await call(api, "GET", "/state"))[0] == 200


async def test_only_its_owner_or_an_admin_cancels_by_x_request_id(model_dir: Path, keys: Keys) -> None:
    text, key = new_key(Role.USE, NOW)
    keys.file.write([*keys.file.read(), key])
    async with serving(model_dir, keys=keys.file) as api:
        begun = asyncio.Event()

        async def forever(request: Any) -> AsyncIterator[Any]:
            begun.set()
            await api.mesh.running[request.request_id].wait()
            for event in api.mesh.events([1], request):
                yield event

        api.mesh.script = forever  # type: ignore[assignment]
        for canceller, status in [(text, 404), (keys.use, 200)]:
            begun.clear()
            chat = asyncio.create_task(call(api, "POST", "/v1/chat/completions", keys.use, x_request_id="mine"))
            await asyncio.wait_for(begun.wait(), 10)
            assert (await call(api, "POST", "/v1/cancel/mine", canceller))[0] == status
            if status == 404:
                assert (await call(api, "POST", "/v1/cancel/mine", keys.admin))[0] == 200
            assert (await chat)[1]["error"]["code"] == "cancelled"
