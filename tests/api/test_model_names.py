"""A request names a model; a path is taken from an admin only, and only for a model that the node lists."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from exo_mesh.api.access import AccessPolicy
from exo_mesh.api.context import ApiOptions, RequestDefaults
from exo_mesh.models.cards.profile import CapabilityProfile
from exo_mesh.models.entry import ModelEntry
from exo_mesh.security.api_keys import FILE_NAME, KeyFile, Role, new_key
from tests.api.scripted_mesh import ScriptedMesh, Served, served

NOW = datetime.datetime(2030, 5, 1, tzinfo=datetime.UTC)
CHAT = [{"role": "user", "content": "Hi"}]


def requests_for(model: str) -> list[tuple[str, str, dict[str, Any] | None]]:
    """Every way to name a model in a request."""
    return [
        ("POST", "/v1/chat/completions", {"model": model, "messages": CHAT}),
        ("POST", "/v1/completions", {"model": model, "prompt": "Hi"}),
        ("POST", "/instance", {"model": model}),
        ("GET", f"/instance/previews?model={quote(model, safe='')}", None),
        ("GET", f"/v1/models/{quote(model, safe='')}", None),
    ]


async def call(api: Served, key: str, method: str, path: str, body: Any) -> tuple[int, dict[str, Any]]:
    async with api.http.request(method, path, json=body, headers={"Authorization": f"Bearer {key}"}) as reply:
        return reply.status, await reply.json()


async def test_an_admin_may_give_the_directory_of_a_listed_model(api: Served, model_dir: Path) -> None:
    """In this server anybody is one."""
    for method, path, body in requests_for(str(model_dir)):
        status, answer = await call(api, "", method, path, body)
        assert status in (200, 201), answer
        assert str(model_dir) not in str(answer)
    assert [spec.model for spec in api.mesh.specs] == ["exo-mesh-demo"] * 2


@pytest.mark.parametrize(
    "name", ["/etc", "/", "/etc\0", "/a" * 5000, "~", "./x", "../../etc", "..", "x\0", "x" * 100_000]
)
async def test_what_is_no_listed_model_is_not_found(api: Served, name: str) -> None:
    for method, path, body in requests_for(name)[:2]:
        status, answer = await call(api, "", method, path, body)
        assert (status, answer["error"]["code"], answer["error"]["param"]) == (404, "model_not_found", "model"), answer


HI = {"messages": CHAT}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", HI),
        ("/v1/completions", {"prompt": "Hi"}),
        ("/v1/responses", {"input": "Hi"}),
        ("/v1/responses/input_tokens", {"input": "Hi"}),
        ("/v1/messages", {"max_tokens": 5, **HI}),
        ("/v1/messages/count_tokens", HI),
        ("/api/chat", {"stream": False, **HI}),
        ("/api/generate", {"stream": False, "prompt": "Hi"}),
        ("/tokenize", {"prompt": "Hi"}),
        ("/detokenize", {"tokens": [5]}),
        ("/apply-template", HI),
        ("/v1/chat/token/encode", HI),
    ],
)
async def test_an_empty_name_of_a_model_counts_as_none(api: Served, path: str, body: dict[str, Any]) -> None:
    status, plain = await call(api, "", "POST", path, body)
    assert status == 200, plain
    status, answer = await call(api, "", "POST", path, {"model": "", **body})
    assert (status, answer.get("model")) == (200, plain.get("model")), answer


async def test_who_is_no_admin_may_name_no_path_and_learns_nothing_of_it(model_dir: Path, tmp_path: Path) -> None:
    keys = KeyFile(tmp_path / FILE_NAME)
    text, key = new_key(Role.USE, NOW)
    keys.write([key])
    access = AccessPolicy(keys=keys)
    async with served(ScriptedMesh(model_dir), ApiOptions(access=access)) as api:
        for name in (str(model_dir), "/nowhere"):
            for method, path, body in requests_for(name):
                status, answer = await call(api, text, method, path, body)
                if path == "/instance":
                    assert status == 403, answer
                else:
                    assert (status, answer["error"]["code"]) == (404, "model_not_found"), answer
                    assert "is a path" in answer["error"]["message"]
        assert not api.mesh.specs and not api.mesh.requests


async def test_unusable_models_are_listed_apart_from_those_that_can_be_used(api: Served) -> None:
    api.mesh.unusable["broken"] = "broken: config.json has no model_type"
    listed = (await call(api, "", "GET", "/v1/models", None))[1]
    assert [entry["id"] for entry in listed["data"]] == ["exo-mesh-demo"]
    listed = (await call(api, "", "GET", "/v1/models?status=unusable", None))[1]
    reason = "broken: config.json has no model_type"
    assert listed["data"] == [{"id": "broken", "object": "model", "status": "unusable", "reason": reason}]


async def test_the_list_says_that_models_are_still_being_read_and_which_are_partial(api: Served) -> None:
    assert (await call(api, "", "GET", "/v1/models", None))[1]["is_reading"] is False
    api.mesh.is_reading = True
    listed = (await call(api, "", "GET", "/v1/models?status=downloaded", None))[1]
    assert listed["is_reading"] is True and [one["status"] for one in listed["data"]] == ["downloaded"]
    assert (await call(api, "", "GET", "/v1/models?status=partial", None))[1]["data"] == []


@pytest.mark.parametrize("named_by", ["name", "path"])
async def test_a_request_that_names_no_model_gets_the_default_one(model_dir: Path, named_by: str) -> None:
    """A default that is a path is the operator's word, so it serves callers who may name none."""
    keys = KeyFile(model_dir.parent / FILE_NAME)
    text, key = new_key(Role.USE, NOW)
    keys.write([key])
    mesh = ScriptedMesh(model_dir, names=("first", "second"))
    default = "second" if named_by == "name" else str(model_dir)
    options = ApiOptions(access=AccessPolicy(keys=keys), defaults=lambda: RequestDefaults(model=default))
    async with served(mesh, options) as api:
        for path, body in (("chat/completions", {"messages": CHAT}), ("completions", {"prompt": "Hi"})):
            status, answer = await call(api, text, "POST", f"/v1/{path}", body)
            assert (status, answer["model"]) == (200, "second" if named_by == "name" else "first"), answer
            status, answer = await call(api, text, "POST", f"/v1/{path}", {**body, "model": "first"})
            assert (status, answer["model"]) == (200, "first"), answer


async def test_models_are_listed_with_their_aliases_and_what_they_can_do(api: Served) -> None:
    profile = CapabilityProfile("qwen", supports_thinking=True, supports_image_input=True)
    api.mesh.services.models.all = lambda: [  # type: ignore[method-assign]
        ModelEntry("Qwen/Qwen3-8B", ("p",), (), 4096, (), aliases=("qwen3:8b",), profile=profile),
        ModelEntry("unknown", ("p",), (), 4096, ()),
    ]
    known, unknown = (await call(api, "", "GET", "/v1/models", None))[1]["data"]
    assert known["aliases"] == ["qwen3:8b"] and known["context_length"] == 4096
    assert known["capabilities"]["family"] == "qwen" and known["capabilities"]["thinking"]["supported"] is True
    assert known["capabilities"]["modalities"]["input"] == ["text", "image"]
    assert unknown["aliases"] == [] and unknown["capabilities"] is None
