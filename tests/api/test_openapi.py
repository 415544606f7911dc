"""The OpenAPI document says what the routes are, what they take, and how they can end."""

from __future__ import annotations

import re
from typing import Any

import pytest
from msgspec.structs import fields

from exo_mesh.api.app import build_app
from exo_mesh.api.openapi import openapi_document
from exo_mesh.api.routes import ROUTES, canonical
from exo_mesh.domain import reports
from tests.api.scripted_mesh import ScriptedMesh, Served


@pytest.fixture
async def document(mesh: ScriptedMesh) -> dict[str, Any]:
    return openapi_document(build_app(mesh.services)[ROUTES])


async def test_each_route_of_the_table_is_in_the_document(mesh: ScriptedMesh, document: dict[str, Any]) -> None:
    table = build_app(mesh.services)[ROUTES]
    expected = {(row.method.lower(), canonical(path)) for row in table for path in row.paths}
    assert {(method, path) for path, methods in document["paths"].items() for method in methods} == expected
    ids = [operation["operationId"] for methods in document["paths"].values() for operation in methods.values()]
    assert len(ids) == len(set(ids))


async def test_every_reference_of_the_document_leads_to_a_schema(document: dict[str, Any]) -> None:
    named = set(re.findall(r"#/components/schemas/([^'\"]+)", str(document)))
    assert named and named <= document["components"]["schemas"].keys()


async def test_a_body_is_described_by_the_struct_that_checks_it(document: dict[str, Any]) -> None:
    operation = document["paths"]["/v1/chat/completions"]["post"]
    assert operation["requestBody"]["content"]["application/json"]["schema"] == {
        "$ref": "#/components/schemas/ChatBody"
    }
    body = document["components"]["schemas"]["ChatBody"]
    assert body["required"] == ["messages"] and not body["additionalProperties"]
    assert {"200", "400", "401", "404", "413", "429", "503"} <= operation["responses"].keys()
    assert "text/event-stream" in operation["responses"]["200"]["content"]


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/state", "StateReport"),
        ("/v1/topology", "TopologyReport"),
        ("/health", "NodeHealth"),
        ("/readyz", "Readiness"),
    ],
)
async def test_the_reports_of_a_node_are_described_by_the_structs_that_make_them(
    document: dict[str, Any], path: str, name: str
) -> None:
    reply = document["paths"][path]["get"]["responses"]["200"]["content"]["application/json"]["schema"]
    assert reply == {"$ref": f"#/components/schemas/{name}"}
    schemas = document["components"]["schemas"]
    assert {*schemas[name]["properties"]} == {one.encode_name for one in fields(getattr(reports, name))}
    if name == "StateReport":
        assert schemas["LinkReport"]["required"] == ["from", "to", "address", "rtt_ms", "mb_per_s", "paths"]
        assert {"UNSET"}.isdisjoint(str(schemas).split("'"))


async def test_errors_are_described_in_the_dialect_of_the_route(document: dict[str, Any]) -> None:
    for path, name in (("/v1/messages", "AnthropicError"), ("/v1/chat/completions", "Error")):
        error = document["paths"][path]["post"]["responses"]["400"]["content"]["application/json"]["schema"]
        assert error == {"$ref": f"#/components/schemas/{name}"}


async def test_the_page_loads_nothing_from_elsewhere(api: Served) -> None:
    async with api.http.get("/docs") as reply:
        page = await reply.text()
        assert reply.status == 200 and reply.content_type == "text/html"
        assert "default-src 'none'" in reply.headers["Content-Security-Policy"]
    assert not re.search(r"(https?:)?//\w", page)
    async with api.http.get("/api/openapi.json") as reply:
        assert (await reply.json())["openapi"] == "3.1.0"
