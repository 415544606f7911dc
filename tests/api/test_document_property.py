"""Whatever fits the OpenAPI document is answered with a status that the document names, and never with a 5xx."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from exo_mesh.api.app import build_app
from exo_mesh.api.context import ApiOptions
from exo_mesh.api.openapi import openapi_document
from exo_mesh.api.routes import ROUTES
from tests.api.conftest import OPEN_ADMIN
from tests.api.scripted_mesh import ScriptedMesh, served
from tests.text.text_models import write_text_model

Call = Callable[[str, str, dict[str, str], Any], tuple[int, bool]]

WORDS = st.sampled_from(["", "a", "exo-mesh-demo", "i1", "peer1", "1", "loaded", "user", "ä", "a/b", "x" * 99])
NUMBERS = st.sampled_from([0, 1, -1, 2, 7, 100, 2**31, 2**63, 0.5, -3.5, 1e300])
ENDLESS = {"/v1/download/progress", "/metrics/stream", "/dashboard/metrics", "/api/pull", "/ollama/api/pull"}


@pytest.fixture(scope="module")
def documented(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[dict[str, Any], Call]]:
    """The document, and a way to call its routes from outside the loop; whether the body was JSON."""
    directory: Path = write_text_model(tmp_path_factory.mktemp("documented"))
    with asyncio.Runner() as runner:

        async def document() -> dict[str, Any]:
            return openapi_document(build_app(ScriptedMesh(directory).services)[ROUTES])

        found = runner.run(document())
        context = served(ScriptedMesh(directory), ApiOptions(access=OPEN_ADMIN))
        server = runner.run(context.__aenter__())

        async def call(method: str, path: str, query: dict[str, str], body: Any) -> tuple[int, bool]:
            data = None if body is None else json.dumps(body)
            async with server.http.request(method, path, params=query, data=data) as reply:
                content = await reply.read()
                return reply.status, reply.content_type == "application/json" and json.loads(content) is not None

        yield found, lambda *args: runner.run(call(*args))
        runner.run(context.__aexit__(None, None, None))


def values(schema: dict[str, Any], document: dict[str, Any], depth: int = 0) -> st.SearchStrategy[Any]:
    """JSON values that fit a schema of the document."""
    if "$ref" in schema:
        return values(document["components"]["schemas"][schema["$ref"].rsplit("/", 1)[1]], document, depth)
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    if "anyOf" in schema:
        return st.one_of([values(one, document, depth) for one in schema["anyOf"]])
    match schema.get("type"):
        case "string":
            return WORDS
        case "integer":
            return NUMBERS.filter(lambda value: isinstance(value, int))
        case "number":
            return NUMBERS
        case "boolean":
            return st.booleans()
        case "null":
            return st.none()
        case "array":
            if "prefixItems" in schema:
                return st.tuples(*(values(item, document, depth + 1) for item in schema["prefixItems"])).map(list)
            items = schema.get("items") or {}
            return st.lists(values(items, document, depth + 1), max_size=0 if depth > 4 else 2)
        case "object":
            return objects(schema, document, depth)
    return st.one_of(WORDS, NUMBERS, st.none())


def objects(schema: dict[str, Any], document: dict[str, Any], depth: int) -> st.SearchStrategy[Any]:
    """Required properties, and at most three others, so that not every body is refused for something."""
    known, required = schema.get("properties", {}), schema.get("required", [])
    if not known:
        return st.dictionaries(WORDS, WORDS, max_size=2)
    must = {name: values(known[name], document, depth + 1) for name in required}
    if depth > 4:
        return st.fixed_dictionaries(must)
    others = st.lists(st.sampled_from(sorted(known.keys() - set(required))), max_size=3, unique=True)
    if not known.keys() - set(required):
        return st.fixed_dictionaries(must)
    return others.flatmap(
        lambda names: st.fixed_dictionaries({**must, **{n: values(known[n], document, depth + 1) for n in names}})
    )


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(data=st.data())
def test_every_call_that_fits_the_document_ends_as_documented(
    documented: tuple[dict[str, Any], Call], data: st.DataObject
) -> None:
    document, call = documented
    path = data.draw(st.sampled_from([path for path in document["paths"] if path not in ENDLESS]))
    method = data.draw(st.sampled_from(sorted(document["paths"][path])))
    operation = document["paths"][path][method]
    url, query = path, {}
    for parameter in operation.get("parameters", ()):
        if parameter["in"] == "path":
            url = url.replace(f"{{{parameter['name']}}}", data.draw(WORDS.filter(bool)))
        elif data.draw(st.booleans()):
            query[parameter["name"]] = data.draw(WORDS)
    body = None
    if "requestBody" in operation:
        schema = operation["requestBody"]["content"]["application/json"]["schema"]
        body = data.draw(values(schema, document))
    status, is_json = call(method.upper(), url, query, body)
    assert str(status) in operation["responses"], (method, url, query, body)
    assert status < 500 or status in (501, 503), (method, url, query, body)
    kinds = operation["responses"][str(status)]["content"]
    assert is_json or "application/json" not in kinds or {"text/event-stream", "application/x-ndjson"} & kinds.keys()
