"""The table of routes: what the router, the access rules and the OpenAPI document are made from.

Each group of handlers has a method `table` with its rows. Of two rows that match the same path, the first one answers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from aiohttp import web
from aiohttp.typedefs import Handler

from exo_mesh.security.api_keys import Role

OPEN: Final = None
"""The role of a row that everybody may call, also on a closed mesh."""
USE, ADMIN = Role.USE, Role.ADMIN

GENERATION_ERRORS = (400, 404, 408, 409, 413, 422, 429, 499, 500, 503, 504)
"""What a request that runs on the mesh can end with, besides the statuses that every route has."""


@dataclass(frozen=True, slots=True)
class Route:
    """One row. paths: the first is the name, the others are aliases. role: who may call it; see OPEN, USE and ADMIN.

    body, reply: msgspec structs, for the document; None: no body, or a JSON object that has no struct. status: of a
    success. errors: other statuses of its own. query: parameters and what they mean. events: a success can be a stream
    of server-sent events, too. content_type: of a success.
    """

    method: str
    paths: tuple[str, ...]
    handler: Handler
    role: Role | None
    summary: str
    body: Any = None
    reply: Any = None
    status: int = 200
    errors: tuple[int, ...] = ()
    query: Mapping[str, str] = field(default_factory=dict)
    events: bool = False
    content_type: str = "application/json"


RouteTable = list[Route]

ROUTES: web.AppKey[RouteTable] = web.AppKey("routes", list)
"""The table of an application."""


@dataclass(frozen=True, slots=True)
class RouteRoles:
    """Which role each route needs, by its method and its canonical path."""

    roles: Mapping[tuple[str, str], Role | None]

    @classmethod
    def of(cls, table: Iterable[Route]) -> RouteRoles:
        return cls({(row.method, canonical(path)): row.role for row in table for path in row.paths})

    def needed(self, method: str, path: str) -> Role | None:
        """The role for a call; None for what everybody may call. A route that is in no table needs the most."""
        asked = (("GET" if method == "HEAD" else method), path)
        if asked in self.roles:
            return self.roles[asked]
        return Role.USE if method in ("GET", "HEAD", "OPTIONS") else Role.ADMIN

    def open_paths(self) -> Iterator[str]:
        """Paths that everybody may read."""
        return (path for (method, path), role in self.roles.items() if method == "GET" and role is OPEN)


def add_routes(app: web.Application, table: RouteTable) -> None:
    """Put every row into the router."""
    app[ROUTES] = table
    for row in app[ROUTES]:
        for path in row.paths:
            add = app.router.add_get if row.method == "GET" else partial(app.router.add_route, row.method)
            add(path, row.handler)  # add_get answers HEAD as well


def canonical(path: str) -> str:
    """The path without the patterns of its parameters: /models/{id:.+} is /models/{id}."""
    return path.replace(":.+}", "}")
