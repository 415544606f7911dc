"""Builds the OpenAPI 3.1 document of the API from the table of routes and the structs that check bodies."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from exo_mesh import __version__
from exo_mesh.api.errors import REASONS
from exo_mesh.api.late import resolved
from exo_mesh.api.routes import NDJSON, OPEN, Route, canonical

_COMMON = (401, 403, 421, 500)
"""Statuses that any call can end with: no valid key, no permission, a wrong host, an internal error."""
_OF_BODIES = (400, 408, 413)

_ERROR_SCHEMA: Mapping[str, Any] = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
                "details": {"type": "object"},
            },
        }
    },
}


def openapi_document(table: Iterable[Route]) -> dict[str, Any]:
    """The document as JSON values. Imports the structs of all routes: call it in a thread."""
    rows = list(table)
    types = [resolved(kind) for row in rows for kind in (row.body, row.reply, row.error) if kind]
    schemas, components = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
    found = iter(schemas)
    paths: dict[str, dict[str, Any]] = {}
    for row in rows:
        body = next(found) if row.body else None
        reply = next(found) if row.reply else {"type": "object"}
        error = next(found) if row.error else {"$ref": "#/components/schemas/Error"}
        for index, path in enumerate(row.paths):
            operation = _operation(row, path, body, reply, error, is_alias=index > 0)
            paths.setdefault(canonical(path), {})[row.method.lower()] = operation
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "exo-mesh",
            "version": __version__,
            "description": "Runs one language model over several machines. Every peer serves this API.",
        },
        "paths": dict(sorted(paths.items())),
        "components": {
            "schemas": {**components, "Error": _ERROR_SCHEMA},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _operation(row: Route, path: str, body: Any, reply: Any, error: Any, *, is_alias: bool) -> dict[str, Any]:
    made: dict[str, Any] = {
        "operationId": _operation_id(row.method, path),
        "summary": row.summary if not is_alias else f"{row.summary} (as {row.method} {canonical(row.paths[0])})",
        "tags": [_tag(canonical(row.paths[0]))],
        "security": [{}] if row.role is OPEN else [{}, {"key": []}],
        "x-role": "open" if row.role is OPEN else str(row.role),
        "responses": _responses(row, reply, error),
    }
    if parameters := _parameters(row, path):
        made["parameters"] = parameters
    if body is not None:
        made["requestBody"] = {"required": True, "content": {"application/json": {"schema": body}}}
    return made


def _parameters(row: Route, path: str) -> list[dict[str, Any]]:
    text = {"type": "string"}
    made: list[dict[str, Any]] = [
        {"name": name, "in": "path", "required": True, "schema": text}
        for name in re.findall(r"\{(\w+)\}", canonical(path))
    ]
    return made + [
        {"name": name, "in": "query", "required": False, "description": meaning, "schema": text}
        for name, meaning in row.query.items()
    ]


def _responses(row: Route, reply: Any, error: Any) -> dict[str, Any]:
    content: dict[str, Any] = {row.content_type: {"schema": reply} if "json" in row.content_type else {}}
    if row.events:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    if row.lines:
        content[NDJSON] = {"schema": reply}
    made: dict[str, Any] = {str(row.status): {"description": row.summary, "content": content}}
    errors = {*_COMMON, *row.errors, *(_OF_BODIES if row.body else ())}
    if "{" in row.paths[0]:
        errors.add(404)
    for status in sorted(errors - {row.status}):
        made[str(status)] = {
            "description": REASONS.get(status, f"Error {status}"),
            "content": {"application/json": {"schema": error}},
        }
    return made


def _operation_id(method: str, path: str) -> str:
    return method.lower() + "_" + re.sub(r"\W+", "_", canonical(path)).strip("_")


def _tag(path: str) -> str:
    """Groups operations by the first word of their path, after the version."""
    words = [word for word in path.split("/") if word and word != "v1"]
    return words[0] if words else "node"
