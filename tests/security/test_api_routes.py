"""Who may call each route of the API: the whole table, each caller, each kind of mesh."""

from __future__ import annotations

import datetime
from pathlib import Path

import pytest

from exo_mesh.api.access import HEALTH_PATHS, METRICS_PATHS, AccessPolicy
from exo_mesh.api.app import build_app
from exo_mesh.api.context import ApiOptions
from exo_mesh.security.api_keys import FILE_NAME, KeyFile, Role, new_key
from exo_mesh.security.local_token import PREFIX
from tests.api.scripted_mesh import ScriptedMesh, Served, served
from tests.text.text_models import write_text_model

NOW = datetime.datetime(2030, 5, 1, tzinfo=datetime.UTC)
TOKEN = PREFIX + "A" * 43

OPEN = {
    "/",
    "/dashboard",
    "/service-worker.js",
    "/page/{version}/{file}",
    "/page/languages",
    "/page/languages/{tag}",
    "/version",
    "/docs",
    "/api/openapi.json",
    "/openapi.json",
    "/health",
    "/healthcheck",
    "/healthz",
    "/readyz",
    "/metrics",
    "/ollama",
    "/api/version",
    "/ollama/api/version",
}
READ = {
    "/v1/models",
    "/models",
    "/v1/models/{id}",
    "/models/{id}",
    "/state",
    "/metrics/snapshot",
    "/v1/prometheus/targets",
    "/metrics/stream",
    "/dashboard/metrics",
    "/v1/topology",
    "/topology",
    "/drain",
    "/queue",
    "/requests/recent",
    "/requests/stats",
    "/v1/tracing",
    "/v1/traces",
    "/v1/traces/{id}",
    "/v1/traces/{id}/stats",
    "/v1/traces/{id}/raw",
    "/v1/traces/cluster",
    "/v1/traces/cluster/{id}",
    "/v1/traces/cluster/{id}/stats",
    "/v1/traces/cluster/{id}/raw",
    "/events",
    "/v1/diagnostics/node",
    "/v1/diagnostics/cluster",
    "/v1/diagnostics/cluster/timeline",
    "/v1/diagnostics/cluster/{id}",
    "/memory",
    "/memory/live",
    "/instance/previews",
    "/instance/placement",
    "/v1/streams",
    "/v1/streams/{id}",
    "/v1/requests/{id}/prefix",
    "/v1/requests/{id}/stages",
    "/v1/responses/{id}",
    "/v1/responses/{id}/input_items",
    "/node_id",
    "/node/identity",
    "/instance/{id}",
    "/v1/invite",
    "/config",
    "/v1/logging",
    "/models/search",
    "/v1/download/progress",
    "/store/storage",
    "/store/health",
    "/store/registry",
    "/store/downloads",
    "/store/models/{id}/download/status",
    "/initial_models",
    "/modelpool",
    "/images/{id}",
    "/filesystem/browse",
    "/api/tags",
    "/api/ps",
    "/ollama/api/tags",
    "/ollama/api/ps",
}
OLLAMA_CHAT = ("chat", "generate", "show", "create", "copy", "push", "embed", "embeddings")
CHAT = {
    "/v1/chat/completions",
    "/chat/completions",
    "/v1/completions",
    "/completions",
    "/bench/chat/completions",
    "/bench/completions",
    "/v1/cancel/{id}",
    "/v1/responses",
    "/responses",
    "/v1/responses/input_tokens",
    "/v1/responses/{id}/cancel",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/embeddings",
    "/embeddings",
    "/v1/rerank",
    "/v2/rerank",
    "/rerank",
    "/tokenize",
    "/v1/tokenize",
    "/detokenize",
    "/v1/detokenize",
    "/v1/chat/token/encode",
    "/chat/token/encode",
    "/apply-template",
    "/v1/images/generations",
    "/v1/images/edits",
    "/bench/images/generations",
    "/bench/images/edits",
    *(f"{prefix}/api/{name}" for prefix in ("", "/ollama") for name in OLLAMA_CHAT),
}
ROUTES: dict[tuple[str, str], str] = {
    **{(method, path): "open" for path in OPEN for method in ("GET", "HEAD")},
    **{(method, path): "read" for path in READ for method in ("GET", "HEAD")},
    **{("POST", path): "chat" for path in CHAT},
    **{("POST", f"/v1/tools/{name}"): "browse" for name in ("web_search", "open_url", "extract_page")},
    ("POST", "/v1/tools/pdf_text"): "chat",
    ("POST", "/instance"): "change",
    ("POST", "/api/pull"): "change",
    ("POST", "/ollama/api/pull"): "change",
    ("DELETE", "/api/delete"): "change",
    ("DELETE", "/ollama/api/delete"): "change",
    ("DELETE", "/v1/streams/{id}"): "chat",
    ("DELETE", "/v1/responses/{id}"): "chat",
    ("POST", "/place_instance"): "change",
    ("POST", "/model/load"): "change",
    ("POST", "/model/unload"): "change",
    ("POST", "/model/gc"): "change",
    ("DELETE", "/instance/{id}"): "change",
    ("POST", "/models/add"): "change",
    ("DELETE", "/models/custom/{id}"): "change",
    ("DELETE", "/models/{id}"): "change",
    ("DELETE", "/v1/models/{id}"): "change",
    ("POST", "/download/start"): "change",
    ("POST", "/download"): "change",
    ("DELETE", "/download/{node}/{model}"): "change",
    ("POST", "/store/models/{id}/download"): "change",
    ("DELETE", "/store/models/{id}"): "change",
    ("POST", "/store/purge-staging"): "change",
    ("POST", "/drain"): "change",
    ("DELETE", "/drain"): "change",
    ("POST", "/quit"): "change",
    ("POST", "/admin/stop"): "change",
    ("POST", "/admin/restart"): "change",
    ("POST", "/admin/drain"): "change",
    ("DELETE", "/admin/drain"): "change",
    ("POST", "/admin/sleep"): "change",
    ("POST", "/admin/awake"): "change",
    ("POST", "/admin/wake"): "change",
    ("GET", "/admin/log"): "change",
    ("HEAD", "/admin/log"): "change",
    ("DELETE", "/v1/diagnostics/node/quarantine"): "change",
    ("PUT", "/v1/tracing"): "change",
    ("POST", "/v1/traces/delete"): "change",
    ("POST", "/v1/diagnostics/node/capture"): "change",
    ("POST", "/v1/diagnostics/cluster/{id}/capture"): "change",
    ("POST", "/v1/diagnostics/node/runners/{runner}/cancel"): "change",
    ("POST", "/v1/diagnostics/cluster/{id}/runners/{runner}/cancel"): "change",
    ("DELETE", "/v1/invite"): "change",
    ("PUT", "/config"): "change",
    ("PUT", "/v1/logging"): "change",
    ("GET", "/v1/keys"): "change",
    ("HEAD", "/v1/keys"): "change",
    ("POST", "/v1/keys"): "keys",
    ("DELETE", "/v1/keys/{id}"): "keys",
    ("POST", "/v1/invite"): "invite",
    ("POST", "/v1/session"): "session",
    ("POST", "/v1/join"): "join",
}
"""Every route, and what calling it means."""

LIMITED = {"invite": 403, "keys": 403, "session": 403}
EVERYTHING = {"open": 0, "read": 0, "chat": 0, "browse": 0, "change": 0, "join": 0, **LIMITED}
OWNS = {**EVERYTHING, "invite": 0, "keys": 0}
LOCALLY = {**OWNS, "session": 0}
USES = {**EVERYTHING, "change": 403}
ANYBODY = {**USES, "browse": 403}
NOTHING = {**dict.fromkeys(EVERYTHING, 401), "open": 0, "join": 0}
KEYS = {"stranger": NOTHING, "wrong": NOTHING, "use": USES, "admin": OWNS, "token": LOCALLY}
EXPECTED = {
    "open": {**dict.fromkeys(("stranger", "wrong", "use", "admin"), ANYBODY), "token": LOCALLY},
    "open-admin": {**dict.fromkeys(("stranger", "wrong", "use", "admin"), EVERYTHING), "token": LOCALLY},
    "closed": {"stranger": NOTHING, "wrong": NOTHING, "use": NOTHING, "admin": NOTHING, "token": LOCALLY},
    "closed, with keys": KEYS,
    "keys, no secret": KEYS,
}
"""The refusal that a caller gets, by the mesh and what the call means; 0: none. On an open mesh there are no keys."""


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text_model(tmp_path_factory.mktemp("text-model"))


async def test_every_route_is_in_the_table(model_dir: Path) -> None:
    """A new route must be named above, with what calling it means."""
    routes = build_app(ScriptedMesh(model_dir).services).router.routes()
    assert {(route.method, route.resource.canonical) for route in routes if route.resource} == ROUTES.keys()
    assert HEALTH_PATHS | METRICS_PATHS <= OPEN


@pytest.mark.parametrize("mesh", EXPECTED)
async def test_who_may_call_what(model_dir: Path, tmp_path: Path, mesh: str) -> None:
    keys = KeyFile(tmp_path / FILE_NAME)
    made = {str(role): new_key(role, NOW) for role in Role}
    if "keys" in mesh:
        keys.write([key for _, key in made.values()])
    shown = {"stranger": "", "wrong": PREFIX + "B" * 43, "token": TOKEN, **{role: key[0] for role, key in made.items()}}
    access = AccessPolicy(keys, mesh.startswith("closed"), TOKEN, mesh == "open-admin")
    async with served(ScriptedMesh(model_dir), ApiOptions(access=access)) as api:
        for caller, expected in EXPECTED[mesh].items():
            for (method, path), meaning in ROUTES.items():
                status = await status_of(api, method, path, shown[caller])
                refusal = status if status in (401, 403) else 0
                assert refusal == expected[meaning], (caller, method, path, status)
                assert status != 500, f"{path}: give tests/api/scripted_mesh.py the method that it calls"
            changed = api.mesh.draining or len(api.mesh.instances) != 1
            assert changed is (expected["change"] == 0), "those who may change nothing come first"
        if not mesh.startswith("open"):
            assert await status_of(api, "POST", "/nothing", "") == 401, "what exists is nobody's business"


async def status_of(api: Served, method: str, path: str, key: str) -> int:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    chat = {"messages": [{"role": "user", "content": "Hi"}]}
    path = path.replace("{id}", "i1").replace("{runner}", "i1").replace("{node}/{model}", "peer1/m")
    async with api.http.request(method, path, headers=headers, json=chat if method == "POST" else None) as reply:
        if reply.content_type != "text/event-stream" or method == "POST":  # the live data never ends
            await reply.read()
        return reply.status
