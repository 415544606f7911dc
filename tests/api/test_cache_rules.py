"""The rules of a request for the prefix cache, in every dialect that has them."""

from __future__ import annotations

from typing import Any

import pytest

from exo_mesh.api.core.cache_rules import MAX_NAME_CHARS
from tests.api.scripted_mesh import Served

PATHS = ("/v1/chat/completions", "/v1/messages")


async def ask(api: Served, path: str, **fields: Any) -> tuple[int, Any]:
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5, **fields}
    async with api.http.post(path, json=body) as reply:
        return reply.status, await reply.json()


@pytest.mark.parametrize("path", PATHS)
async def test_the_rules_reach_the_ring(api: Served, path: str) -> None:
    seen = []
    for fields in (
        {},
        {"cache": "auto"},
        {"prompt_cache_key": "a"},
        {"cache": "no-store"},
        {"cache": "session", "prompt_cache_key": "a"},
        {"cache": "session", "prompt_cache_key": "b"},
    ):
        status, _ = await ask(api, path, **fields)
        assert status == 200
        seen.append((api.mesh.request.is_kept, api.mesh.request.cache_scope))
    assert seen[:4] == [(True, b""), (True, b""), (True, b""), (False, b"")]
    assert seen[4] != seen[5] and all(kept and len(scope) == 16 for kept, scope in seen[4:])


async def test_a_salt_keeps_requests_apart(api: Served) -> None:
    scopes = []
    for salt in ("x", "y", "x", ""):
        await ask(api, PATHS[0], cache_salt=salt)
        scopes.append(api.mesh.request.cache_scope)
    assert scopes[0] == scopes[2] != scopes[1] and scopes[3] == b""


@pytest.mark.parametrize("path", PATHS)
async def test_a_wrong_rule_is_refused_by_its_name(api: Served, path: str) -> None:
    for fields, named in (
        ({"cache": "session"}, "prompt_cache_key"),
        ({"cache": "never"}, "cache"),
        ({"prompt_cache_key": "x" * (MAX_NAME_CHARS + 1)}, "prompt_cache_key"),
    ):
        status, body = await ask(api, path, **fields)
        assert status == 400 and named in body["error"]["message"]
