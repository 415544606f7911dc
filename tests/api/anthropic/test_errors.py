"""Errors, lists of models and numbers of tokens, in the form of Anthropic's API."""

from __future__ import annotations

import datetime
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest

from exo_mesh.api.access import AccessPolicy
from exo_mesh.api.anthropic.failures import error_type
from exo_mesh.api.anthropic.models import models_page
from exo_mesh.api.context import ApiOptions
from exo_mesh.domain.request import GenerateRequest, Progress, TokenEvent
from exo_mesh.errors import InputError, MeshError, NotReadyError, OverloadError
from exo_mesh.models.entry import ModelEntry
from exo_mesh.security.api_keys import FILE_NAME, KeyFile, Role, new_key
from tests.api.anthropic.conftest import Asking
from tests.api.conftest import OPEN_ADMIN
from tests.api.scripted_mesh import ScriptedMesh, served

NOW = datetime.datetime(2030, 5, 1, tzinfo=datetime.UTC)
VERSION = {"anthropic-version": "2023-06-01"}


async def test_an_error_has_the_id_of_the_request(asking: Asking) -> None:
    async with asking.api.http.post("/v1/messages", json=asking.body(n=1)) as reply:
        body = await reply.json()
        assert reply.status == 400 and reply.headers["request-id"] == reply.headers["x-request-id"]
        assert body == {
            "type": "error",
            "error": {"type": "invalid_request_error", "message": "n: exo-mesh does not support this field"},
            "request_id": reply.headers["request-id"],
        }


@pytest.mark.parametrize(
    ("fields", "status", "kind", "words"),
    [
        ({"max_tokens": None}, 400, "invalid_request_error", "max_tokens"),
        ({"model": "nobody/has-it"}, 404, "not_found_error", "nobody/has-it"),
        ({"messages": [{"role": "user", "content": "word " * 5000}]}, 400, "invalid_request_error", "tokens"),
    ],
)
async def test_a_refusal_says_what_is_wrong(
    asking: Asking, fields: dict[str, Any], status: int, kind: str, words: str
) -> None:
    found, error = await asking.refusal(**fields)
    assert (found, error["type"]) == (status, kind) and words in error["message"]


@pytest.mark.parametrize(
    ("error", "status", "kind", "retry_after"),
    [
        (OverloadError("the queue is full", retry_after_s=3), 429, "rate_limit_error", "3"),
        (NotReadyError("the node drains"), 503, "overloaded_error", "2"),
    ],
)
async def test_a_mesh_that_cannot_answer_now_says_when_to_retry(
    asking: Asking, error: MeshError, status: int, kind: str, retry_after: str
) -> None:
    async def failing(request: GenerateRequest) -> AsyncGenerator[TokenEvent | Progress, None]:
        raise error
        yield

    asking.mesh.script = failing
    async with asking.api.http.post("/v1/messages", json=asking.body(stream=True)) as reply:
        assert (reply.status, reply.headers["Retry-After"]) == (status, retry_after)
        assert (await reply.json())["error"]["type"] == kind


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (409, "invalid_request_error"),
        (401, "authentication_error"),
        (403, "permission_error"),
        (413, "request_too_large"),
        (499, "api_error"),
        (500, "api_error"),
        (504, "timeout_error"),
    ],
)
def test_each_status_has_its_type(status: int, kind: str) -> None:
    assert error_type(status) == kind


@pytest.mark.parametrize("path", ["/v1/messages/batches", "/v1/messages/"])
async def test_an_unknown_path_below_messages_answers_in_the_dialect(asking: Asking, path: str) -> None:
    status, body = await asking.post(path, {})
    assert (status, body["error"]["type"]) == (404, "not_found_error")


async def test_other_routes_keep_openais_errors_without_the_version_header(asking: Asking) -> None:
    for headers, shape in (({}, {"error"}), (VERSION, {"type", "error", "request_id"})):
        async with asking.api.http.get("/v1/models/nobody", headers=headers) as reply:
            assert reply.status == 404 and (await reply.json()).keys() == shape


async def test_a_key_is_taken_from_either_header(thinking_model: Path, tmp_path: Path) -> None:
    keys = KeyFile(tmp_path / FILE_NAME)
    text, key = new_key(Role.USE, NOW)
    keys.write([key])
    options = ApiOptions(access=AccessPolicy(keys))
    async with served(ScriptedMesh(thinking_model, limit=4096), options) as api:
        asking = Asking(api)
        both = {"Authorization": "Bearer other", "x_api_key": text}
        for headers in ({"x_api_key": text}, {"Authorization": f"Bearer {text}"}, both):
            status, _ = await asking.post("/v1/messages", asking.body(), **headers)
            assert status == 200
        status, body = await asking.post("/v1/messages", asking.body(), x_api_key="wrong")
        assert (status, body["error"]["type"]) == (401, "authentication_error")


async def test_a_body_that_is_too_large_is_refused_in_the_dialect(thinking_model: Path) -> None:
    options = ApiOptions(access=OPEN_ADMIN, max_body_bytes=1000)
    async with served(ScriptedMesh(thinking_model), options) as api:
        asking = Asking(api)
        status, error = await asking.refusal(system="x" * 2000)
        assert (status, error["type"]) == (413, "request_too_large")


async def test_tokens_are_counted_as_a_message_would_use_them(asking: Asking) -> None:
    fields: dict[str, Any] = {"system": "Be brief.", "thinking": {"type": "disabled"}}
    await asking.message(**fields)
    for query in ("", "?beta=true"):
        status, body = await asking.post(f"/v1/messages/count_tokens{query}", asking.body(**fields))
        assert (status, body) == (200, {"input_tokens": len(asking.mesh.request.prompt_ids)})
    assert len(asking.mesh.requests) == 1, "counting runs nothing"


_IMAGE = {"type": "base64", "media_type": "image/png", "data": "aGVsbG8="}


async def test_counting_refuses_what_a_message_would_refuse(asking: Asking) -> None:
    body = {"messages": [{"role": "user", "content": [{"type": "image", "source": _IMAGE}]}]}
    status, reply = await asking.post("/v1/messages/count_tokens", body)
    assert status == 400 and "takes no images" in reply["error"]["message"]


async def test_models_are_listed_in_the_form_that_the_client_reads(asking: Asking) -> None:
    http = asking.api.http
    async with http.get("/v1/models", headers=VERSION) as reply:
        listed = await reply.json()
    (model,) = listed.pop("data")
    assert listed == {"has_more": False, "first_id": "exo-mesh-demo", "last_id": "exo-mesh-demo"}
    assert model == {
        "type": "model",
        "id": "exo-mesh-demo",
        "display_name": "exo-mesh-demo",
        "created_at": "2023-11-14T22:13:20Z",
        "lifecycle": "active",
        "max_input_tokens": 4096,
        "max_tokens": 4096,
    }
    async with http.get("/v1/models/exo-mesh-demo", headers=VERSION) as reply:
        assert await reply.json() == model
    async with http.get("/v1/models") as reply:
        assert (await reply.json())["object"] == "list"


@pytest.mark.parametrize(
    ("query", "names", "has_more"),
    [
        ({}, ["a", "b", "c"], False),
        ({"limit": "2"}, ["a", "b"], True),
        ({"limit": "2", "after_id": "b"}, ["c"], False),
        ({"limit": "1", "before_id": "c"}, ["b"], True),
        ({"limit": "5", "before_id": "c"}, ["a", "b"], False),
        ({"after_id": "a", "before_id": "c"}, ["b"], False),
        ({"after_id": "c"}, [], False),
    ],
)
def test_a_list_of_models_has_pages(query: dict[str, str], names: list[str], has_more: bool) -> None:
    entries = [ModelEntry(name, ("peer1",), (), 100, ()) for name in "abc"]
    page = models_page(entries, 0, query)
    assert ([model["id"] for model in page["data"]], page["has_more"]) == (names, has_more)


@pytest.mark.parametrize("query", [{"limit": "0"}, {"limit": "1001"}, {"limit": "²"}, {"after_id": "nobody"}])
def test_a_page_that_cannot_be_is_refused(query: dict[str, str]) -> None:
    with pytest.raises(InputError):
        models_page([ModelEntry("a", ("peer1",), (), 100, ())], 0, query)
