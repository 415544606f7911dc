"""Who may call what over HTTP."""

from __future__ import annotations

import asyncio
import datetime
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import msgspec
import openai
import pytest

from exo_mesh.api.access import (
    ANY_ADMIN,
    ANYBODY,
    HEALTH_PATHS,
    LOCAL,
    METRICS_PATHS,
    STRANGER,
    AccessPolicy,
    Caller,
)
from exo_mesh.api.context import ApiOptions
from exo_mesh.base.telemetry.metrics import Metrics
from exo_mesh.security.api_keys import FILE_NAME, KeyFile, Role, new_key
from exo_mesh.security.local_token import PREFIX
from exo_mesh.settings.table import SETTINGS
from tests.api.scripted_mesh import ScriptedMesh, Served, served
from tests.text.text_models import write_text_model

NOW = datetime.datetime(2030, 5, 1, tzinfo=datetime.UTC)
TOKEN = PREFIX + "A" * 43
CHAT = {"messages": [{"role": "user", "content": "Hi"}]}
PAGE = "http://chat.example.org"


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
    """A server on the loopback, which gives its callers no rights."""
    access = AccessPolicy(**{"local_token": TOKEN, **policy})
    async with served(ScriptedMesh(model_dir), ApiOptions(access=access)) as api:
        yield api


async def call(api: Served, method: str, path: str, key: str = "", **headers: str) -> tuple[int, dict[str, Any]]:
    given = {name.replace("_", "-"): value for name, value in headers.items()}
    if key:
        given["Authorization"] = f"Bearer {key}"
    path = path.replace("{id}", "i1").replace("{id:.+}", "exo-mesh-demo")
    async with api.http.request(method, path, headers=given, json=CHAT if method == "POST" else None) as reply:
        body = await reply.json() if reply.content_type == "application/json" and method != "HEAD" else {}
        return reply.status, body


@pytest.mark.parametrize("path", ["/health", "/readyz"])
async def test_without_a_key_health_tells_no_names(model_dir: Path, keys: Keys, path: str) -> None:
    async with serving(model_dir, keys=keys.file) as api:
        api.mesh.status = "starting"
        full = msgspec.to_builtins(api.mesh.services.observation.health().reasons[0])
        for key, told in ((None, {"code": "starting", "level": full["level"]}), (keys.use, full)):
            headers = {"Authorization": f"Bearer {key}"} if key else {}
            async with api.http.get(path, headers=headers) as reply:
                body = await reply.json()
            assert body["status"] == "starting" and body["reasons"] == [told]


@pytest.mark.parametrize("given", ["", "x", "xm-00000000-" + "A" * 43, "Bearer", "\tü", PREFIX, PREFIX + "B" * 43])
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


@pytest.mark.parametrize("needs_key", [False, True])
async def test_headers_and_addresses_make_nobody_local(model_dir: Path, needs_key: bool) -> None:
    forged = {"X-Forwarded-For": "127.0.0.1", "X-Real-IP": "127.0.0.1", "Forwarded": "for=127.0.0.1"}
    async with serving(model_dir, needs_key=needs_key) as api:
        for host in ("127.0.0.1", "localhost", "[::1]:5", "0.0.0.0"):
            status, body = await call(api, "POST", "/drain", Host=host, **forged)
            assert status == (401 if needs_key else 403), body
        assert not api.mesh.draining


async def test_without_a_token_in_the_home_no_text_is_one(model_dir: Path) -> None:
    async with serving(model_dir, local_token="", needs_key=True) as api:
        for text in ("", " ", PREFIX, TOKEN):
            assert (await call(api, "GET", "/state", Authorization=f"Bearer {text}"))[0] == 401


async def test_an_open_mesh_says_what_its_refusal_can_be_lifted_with(model_dir: Path) -> None:
    async with serving(model_dir) as api:
        status, body = await call(api, "POST", "/drain")
        assert (status, body["error"]["code"]) == (403, "insufficient_permissions")
        for remedy in ("--open-admin", "exo-mesh key new", "local_token", "exo-mesh on the node's own machine"):
            assert remedy in body["error"]["message"]
        assert (await call(api, "POST", "/drain", TOKEN))[0] == 200
    async with serving(model_dir, open_admin=True) as api:
        assert (await call(api, "POST", "/drain"))[0] == 200


LOCAL_HOSTS = [
    "127.0.0.1:1",
    "localhost",
    "[::1]:5",
    "[fe80::1%eth0]:5",
    "192.168.7.9:52415",
    "studio",
    "studio.local:1",
]
OTHER_HOSTS = ["evil.example:52415", "evil.example", "127.0.0.1.evil.example", "", ".", "[", "localhost.evil.example"]


@pytest.mark.parametrize("needs_key", [False, True])
async def test_a_page_that_rebinds_its_name_reads_nothing(model_dir: Path, keys: Keys, needs_key: bool) -> None:
    async with serving(model_dir, keys=keys.file, needs_key=needs_key) as api:
        for host in OTHER_HOSTS:
            for path in ("/state", "/health", "/"):
                status, body = await call(api, "GET", path, Host=host)
                assert (status, body["error"]["code"]) == (421, "misdirected_request"), host
            assert (await call(api, "POST", "/v1/chat/completions", Host=host, Origin=f"http://{host}"))[0] == 421
        assert "--allowed-hosts" in body["error"]["message"]
        assert not api.mesh.requests
        for host in LOCAL_HOSTS:
            assert (await call(api, "GET", "/health", Host=host))[0] == 200, host


async def test_names_that_were_allowed_and_calls_with_a_key_may_come_by_any_host(model_dir: Path, keys: Keys) -> None:
    async with serving(model_dir, keys=keys.file) as api:
        for key in (TOKEN, keys.use):
            assert (await call(api, "GET", "/state", key, Host="mesh.example.org"))[0] == 200
    for allowed in ({"mesh.example.org"}, {"*"}):
        async with serving(model_dir, allowed_hosts=frozenset(allowed)) as api:
            for host in ("mesh.example.org", "MESH.example.org.:8080"):
                assert (await call(api, "GET", "/state", Host=host))[0] == 200
            status = (await call(api, "GET", "/state", Host="evil.example"))[0]
            assert status == (200 if "*" in allowed else 421)
    async with serving(model_dir, cors_origins=frozenset({PAGE})) as api:
        assert (await call(api, "GET", "/state", Host="chat.example.org"))[0] == 200


async def test_a_program_that_sends_no_host_is_no_browser(model_dir: Path) -> None:
    async with serving(model_dir) as api:
        address = urlsplit(api.url)
        reader, writer = await asyncio.open_connection(address.hostname, address.port)
        writer.write(b"GET /state HTTP/1.0\r\n\r\n")
        assert (await reader.readline()).split()[1] == b"200"
        writer.close()
        await writer.wait_closed()


CHANGES = [("POST", "/v1/chat/completions"), ("POST", "/v1/cancel/{id}"), ("POST", "/drain"), ("DELETE", "/drain")]
COSTLY = ["/v1/diagnostics/cluster", "/v1/diagnostics/cluster/timeline", "/instance/previews?model=m", "/v1/traces"]


@pytest.mark.parametrize(
    ("headers", "may_change", "may_read"),
    [
        ({}, True, True),
        ({"Origin": "https://evil.example"}, False, False),
        ({"Origin": "null"}, False, False),
        ({"Origin": "http://127.0.0.1.evil.example"}, False, False),
        ({"Origin": "http://localhost:3000"}, True, True),
        ({"Origin": "SELF"}, True, True),
        ({"Sec-Fetch-Site": "cross-site"}, False, False),
        ({"Sec-Fetch-Site": "same-site"}, False, True),
        ({"Sec-Fetch-Site": "same-origin"}, True, True),
        ({"Sec-Fetch-Site": "none"}, True, True),
        ({"Sec-Fetch-Site": "cross-site", "Origin": PAGE}, True, True),
    ],
)
async def test_a_page_of_another_origin_changes_nothing_and_reads_nothing_costly(
    model_dir: Path, headers: dict[str, str], may_change: bool, may_read: bool
) -> None:
    async with serving(model_dir, open_admin=True, cors_origins=frozenset({PAGE})) as api:
        given = {name: api.url if value == "SELF" else value for name, value in headers.items()}
        for method, path in CHANGES:
            status, body = await call(api, method, path, **given)
            assert (status == 403) is not may_change, (path, status)
            if not may_change:
                assert body["error"]["code"] == "cross_site_refused"
        assert bool(api.mesh.requests) is may_change
        for path in COSTLY:
            assert (await call(api, "GET", path, **given))[0] == (200 if may_read else 403), path
        for path in ("/", "/version", *HEALTH_PATHS, *METRICS_PATHS):
            assert (await call(api, "GET", path, **given))[0] == 200, path


async def preflight(http: aiohttp.ClientSession, origin: str, wanted: str = "authorization,x-mine") -> dict[str, str]:
    """What a browser is told that asks whether a page of this origin may call; empty for a refusal."""
    asking = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": wanted, "Origin": origin}
    async with http.options("/v1/chat/completions", headers=asking) as reply:
        assert (reply.status == 204) is ("Access-Control-Allow-Origin" in reply.headers)
        return {name.lower(): value for name, value in reply.headers.items()} if reply.status == 204 else {}


@pytest.mark.parametrize(
    "origin", ["http://localhost:3000", "https://localhost", "http://127.0.0.1:1", "http://[::1]:2"]
)
async def test_pages_of_localhost_may_call_with_the_rights_of_anybody(model_dir: Path, origin: str) -> None:
    async with serving(model_dir) as api:
        told = await preflight(api.http, origin)
        assert told["access-control-allow-origin"] == origin
        assert "DELETE" in told["access-control-allow-methods"]
        for header in ("Authorization", "Content-Type", "Idempotency-Key", "Last-Event-ID", "x-mine"):
            assert header in told["access-control-allow-headers"]
        assert "access-control-allow-credentials" not in told
        async with api.http.post("/v1/chat/completions", json=CHAT, headers={"Origin": origin}) as reply:
            assert (reply.status, reply.headers["Access-Control-Allow-Origin"]) == (200, origin)
        assert (await call(api, "POST", "/drain", Origin=origin))[0] == 403
        assert (await call(api, "POST", "/drain", TOKEN, Origin=origin))[0] == 200


@pytest.mark.parametrize(
    "origin", ["https://chat.example.org", "null", "app://localhost", "http://localhost.evil.example"]
)
async def test_cors_is_closed_to_all_other_pages(model_dir: Path, origin: str) -> None:
    async with serving(model_dir) as api:
        assert await preflight(api.http, origin) == {}
        assert (await call(api, "POST", "/v1/chat/completions", Origin=origin))[0] == 403
        assert not api.mesh.requests


DESKTOP = ["app://obsidian.md", "tauri://localhost", "chrome-extension://abcdefgh", "capacitor://localhost", "file://",
           "moz-extension://1b2f-33", "vscode-webview://0a1b2c"]  # fmt: skip


@pytest.mark.parametrize("origin", [*DESKTOP, "https://Chat.example.org:8443"])
async def test_a_page_is_refused_with_the_setting_that_allows_it(model_dir: Path, origin: str) -> None:
    async with serving(model_dir) as api:
        status, body = await call(api, "POST", "/v1/chat/completions", Origin=origin)
        named = re.search(r"--cors-origin '(.+?)'", body["error"]["message"])
        assert status == 403
        assert named
    allowed = SETTINGS["cors_origin"].from_texts([named[1]])
    async with serving(model_dir, cors_origins=frozenset(allowed)) as api:
        assert (await preflight(api.http, origin))["access-control-allow-origin"] == origin
        assert (await call(api, "POST", "/v1/chat/completions", Origin=origin))[0] == 200
        assert (await call(api, "POST", "/v1/chat/completions", Origin="app://other.example"))[0] == 403


async def test_the_name_of_a_desktop_program_is_no_name_of_the_node(model_dir: Path) -> None:
    async with serving(model_dir, cors_origins=frozenset({"app://obsidian.md"})) as api:
        assert (await call(api, "GET", "/state", Host="obsidian.md"))[0] == 421


async def test_a_page_without_an_origin_is_not_offered_a_setting_that_is_refused(model_dir: Path) -> None:
    async with serving(model_dir) as api:
        message = (await call(api, "POST", "/v1/completions", Origin="null"))[1]["error"]["message"]
    assert "--cors-origin '*'" in message
    for text in ("null", "https://*", "app:", "obsidian.md", "https://a/b", "://a"):
        with pytest.raises(ValueError, match="an origin such as"):
            SETTINGS["cors_origin"].from_texts([text])
    same = SETTINGS["cors_origin"].from_texts(["HTTPS://Chat.example.org:443/, app://*"])
    assert same == ("https://chat.example.org", "app://*")


async def test_cors_is_opened_for_named_origins_and_an_origin_is_no_key(model_dir: Path, keys: Keys) -> None:
    evil = "https://evil.example"
    async with serving(model_dir, keys=keys.file, cors_origins=frozenset({PAGE})) as api:
        assert (await preflight(api.http, PAGE))["access-control-allow-origin"] == PAGE
        assert await preflight(api.http, evil) == {}
        assert (await call(api, "POST", "/v1/chat/completions", keys.use, Origin=PAGE))[0] == 200
        assert (await call(api, "POST", "/v1/chat/completions", Origin=PAGE))[0] == 401, "an origin is no key"
        assert (await call(api, "POST", "/v1/chat/completions", keys.use, Origin=evil))[0] == 403
        headers = {"Authorization": f"Bearer {keys.use}", "Origin": PAGE}
        async with api.http.post("/v1/chat/completions", json={**CHAT, "stream": True}, headers=headers) as reply:
            assert reply.headers["Access-Control-Allow-Origin"] == PAGE
            assert "Origin" in reply.headers["Vary"]
            assert b"[DONE]" in await reply.read()
        async with api.http.post("/v1/chat/completions", json={**CHAT, "max_tokens": 10**6}, headers=headers) as reply:
            ours = {name.lower() for name in reply.headers if name.lower().startswith("x-exo-mesh")}
            assert "x-exo-mesh-max-tokens" in ours
            assert ours <= set(reply.headers["Access-Control-Expose-Headers"].split(", "))
    async with serving(model_dir, keys=keys.file, cors_origins=frozenset({"*"})) as api:
        assert (await call(api, "POST", "/v1/chat/completions", Origin=evil))[0] == 401
        assert (await call(api, "GET", "/state", Origin=evil))[0] == 401


@pytest.mark.parametrize(
    "text", ["[", "[::1", "http://[", "http://[::1%", "//", "http://a:b:c", "::", "%", "@", "a" * 5000]
)
async def test_malformed_headers_of_a_stranger_are_refused_and_make_no_noise(
    model_dir: Path, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(model_dir) as api:
        assert (await call(api, "POST", "/v1/completions", Origin=text))[0] in (400, 403)
        assert (await call(api, "GET", "/state", Host=text))[0] in (200, 400, 421)
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


async def test_metrics_tell_strangers_no_names(model_dir: Path, keys: Keys) -> None:
    metrics = Metrics()
    metrics.set_round_trips({"sec1": 0.1})
    metrics.runner_started("llama-1", "llama-1-a")
    metrics.disk_free.labels("/home/somebody").set(1)
    metrics.download_failures.labels("fetch_failed").inc()
    metrics.recovery.observe(0.1)
    told = {}
    for policy in ({"keys": keys.file}, {}):
        access = AccessPolicy(**policy, local_token=TOKEN)  # type: ignore[arg-type]
        async with served(ScriptedMesh(model_dir), ApiOptions(registry=lambda: metrics.registry, access=access)) as api:
            for key in ("", keys.use, TOKEN):
                headers = {"Authorization": f"Bearer {key}"} if key else {}
                async with api.http.get("/metrics", headers=headers) as reply:
                    told[bool(policy), key] = await reply.text()
    stranger = told.pop((True, ""))
    for name in ("sec1", "llama-1", "somebody"):
        assert name not in stranger
        assert all(name in text for text in told.values())
    for shown in (
        'failures_total{type="fetch_failed"} 1.0',
        "nodes_active 0.0",
        'recovery_seconds_bucket{le="0.1"} 1.0',
    ):
        assert shown in stranger


async def test_health_and_metrics_may_be_closed_as_well(model_dir: Path) -> None:
    for closed_paths, statuses in ((METRICS_PATHS, (200, 401)), (HEALTH_PATHS, (401, 200))):
        async with serving(model_dir, needs_key=True, closed_paths=closed_paths) as api:
            for paths, status in zip((HEALTH_PATHS, METRICS_PATHS), statuses, strict=True):
                for path in paths:
                    assert (await call(api, "GET", path))[0] == status, path
                    assert (await call(api, "GET", path, TOKEN))[0] == 200
            assert (await call(api, "GET", "/version"))[0] == 200


@pytest.mark.parametrize(
    ("caller", "may"),
    [
        (LOCAL, True),
        (ANY_ADMIN, True),
        (Caller("00000000", Role.ADMIN), True),
        (Caller("00000000", Role.USE), True),
        (ANYBODY, False),
        (STRANGER, False),
    ],
)
def test_who_may_start_a_download_by_a_chat(caller: Caller, may: bool) -> None:
    assert caller.may_download is may


def another_use_key(keys: Keys) -> str:
    text, key = new_key(Role.USE, NOW)
    keys.file.write([*keys.file.read(), key])
    return text


def run_until_cancelled(mesh: ScriptedMesh) -> asyncio.Event:
    """Requests to the mesh run until they are cancelled. The event is set when one has begun."""
    begun = asyncio.Event()

    async def forever(request: Any) -> AsyncIterator[Any]:
        begun.set()
        await mesh.running[request.request_id].wait()
        for event in mesh.events([1], request):
            yield event

    mesh.script = forever  # type: ignore[assignment]
    return begun


@pytest.mark.parametrize("wanted", ["x-request-id", "id of the reply"])
async def test_only_its_owner_or_an_admin_cancels(model_dir: Path, keys: Keys, wanted: str) -> None:
    other = another_use_key(keys)
    async with serving(model_dir, keys=keys.file) as api:
        begun = run_until_cancelled(api.mesh)
        for canceller, status in [(other, 404), (keys.use, 200)]:
            begun.clear()
            chat = asyncio.create_task(call(api, "POST", "/v1/chat/completions", keys.use, x_request_id="mine"))
            await asyncio.wait_for(begun.wait(), 10)
            target = "mine" if wanted == "x-request-id" else api.mesh.request.request_id
            refusal = await call(api, "POST", f"/v1/cancel/{target}", canceller)
            assert refusal[0] == status
            if status == 404:
                unknown = await call(api, "POST", "/v1/cancel/none", canceller)
                assert str(unknown[1]).replace("none", target) == str(refusal[1]), "as for an id that nobody has"
                assert (await call(api, "POST", f"/v1/cancel/{target}", keys.admin))[0] == 200
            assert (await chat)[1]["error"]["code"] == "cancelled"


async def test_one_idempotency_key_of_two_api_keys_is_two_requests(model_dir: Path, keys: Keys) -> None:
    other = another_use_key(keys)
    async with serving(model_dir, keys=keys.file) as api:
        for key in (keys.use, other, keys.use):
            assert (await call(api, "POST", "/v1/chat/completions", key, Idempotency_Key="1"))[0] == 200
        first, second, again = api.mesh.requests
        assert (first.key_hash, first.request_id, first.sampling.seed) == (
            again.key_hash, again.request_id, again.sampling.seed,
        )  # fmt: skip
        assert first.key_hash != second.key_hash and first.request_id != second.request_id
        assert first.sampling.seed != second.sampling.seed


async def test_callers_without_a_key_share_their_idempotency_keys(model_dir: Path) -> None:
    async with serving(model_dir) as api:
        for _ in range(2):
            assert (await call(api, "POST", "/v1/chat/completions", Idempotency_Key="1"))[0] == 200
        assert len({request.key_hash for request in api.mesh.requests}) == 1


TRACED = f"00-{'5' * 32}-{'7' * 16}-01"


async def test_a_use_key_is_shown_no_ids_of_others(model_dir: Path, keys: Keys) -> None:
    other = another_use_key(keys)
    async with serving(model_dir, keys=keys.file) as api:
        _, reply = await call(api, "POST", "/v1/chat/completions", keys.use, traceparent=TRACED)
        shown_to = {"owner": keys.use, "another": other, "admin": keys.admin}
        for path, told in [
            ("/requests/recent", reply["id"]),
            ("/v1/traces", "5" * 32),
            (f"/v1/traces/{'5' * 32}", "5" * 32),
        ]:
            bodies = {who: str((await call(api, "GET", path, key))[1]) for who, key in shown_to.items()}
            assert told in bodies["owner"] and told in bodies["admin"], path
            assert reply["id"] not in bodies["another"], path
        assert (await call(api, "GET", f"/v1/traces/{'5' * 32}", other))[0] == 404
        for path in ("/v1/diagnostics/node", "/v1/diagnostics/cluster", "/v1/diagnostics/cluster/peer1"):
            bodies = {who: str((await call(api, "GET", path, key))[1]) for who, key in shown_to.items()}
            assert reply["id"] in bodies["admin"] and reply["id"] not in bodies["another"], path
