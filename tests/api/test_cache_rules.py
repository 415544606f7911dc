"""The rules of a request for the prefix cache in every dialect that has them, and why a prompt was computed again."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from exo_mesh.api.core.keeping import MAX_NAME_CHARS
from exo_mesh.domain.request import GenerateRequest, PrefixReport
from exo_mesh.rings.runner.prefix.cache import LEAST_COMMON
from exo_mesh.rings.serving.explanations import MAX_KEPT, Explanations, explain
from exo_mesh.rings.serving.history import RequestOutcome
from tests.api.scripted_mesh import Served

PATHS = ("/v1/chat/completions", "/v1/messages", "/v1/responses")


async def ask(api: Served, path: str, **fields: Any) -> tuple[int, Any]:
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5, **fields}
    if path == "/v1/responses":
        body = {"input": "Hi", **fields}
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


def remember(api: Served, request_id: str, key_id: str = "") -> None:
    prompt = tuple(api.mesh.text.encode_text("It is 14:02 on Monday"))
    request = GenerateRequest(request_id, prompt, 4, key_id=key_id)
    theirs = tuple(api.mesh.text.encode_text("9"))
    ended = RequestOutcome(request_id, "exo-mesh-demo", "stop", 6, 4, 0.5, 1.0, cached_tokens=1)
    api.mesh.explanations.add(explain(request, "exo-mesh-demo", PrefixReport(2, theirs, True), ended), ("x-1",))


async def test_an_admin_sees_where_a_prompt_parted_from_what_was_kept(api: Served) -> None:
    remember(api, "r-1")
    for name in ("r-1", "x-1"):
        async with api.http.get(f"/v1/requests/{name}/prefix") as reply:
            found = await reply.json()
        assert (found["request_id"], found["common_tokens"], found["cached_tokens"]) == ("r-1", 2, 1)
        assert found["computed_tokens"] == found["prompt_tokens"] - 1
        shown = found["text_before"] + found["text_here"]
        assert shown and "It is 14:02 on Monday".startswith(shown)
        assert found["text_there"] == "9"
    async with api.http.get("/v1/requests/r-2/prefix") as reply:
        assert reply.status == 404
        message = (await reply.json())["error"]["message"]
    assert f"another node or long ago, its prompt is too short to be kept (up to {LEAST_COMMON} tokens)" in message


def test_only_the_key_of_a_request_finds_its_explanation_and_all_is_bounded() -> None:
    known, request = Explanations(), GenerateRequest("r", tuple(range(100)), 1, key_id="mine")
    ended = RequestOutcome("r", "m", "stop", 100, 1, None, 1.0)
    for number in range(3 * MAX_KEPT):
        known.add(explain(replace(request, request_id=f"r{number}"), "m", PrefixReport(50), ended), ())
    last = f"r{3 * MAX_KEPT - 1}"
    assert known.find(last, "mine") == known.find(last) is not None
    assert known.find(last, "other") is known.find(last, "") is known.find("r0") is None
    found = known.find(last)
    assert found is not None and (found.before, found.mine) == (tuple(range(34, 50)), tuple(range(50, 66)))
