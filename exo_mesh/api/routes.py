"""The table of routes, from which the router, the access rules and the OpenAPI document are made.

The rows themselves are in `table`. They name handlers and structs by late references, so no handler is imported before
its first call; see `late`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Final

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler

from exo_mesh.security.api_keys import Role
from exo_mesh.settings.spelling import near_word

OPEN: Final = None
"""The role of a route that everybody may call, even on a closed mesh."""
USE, ADMIN = Role.USE, Role.ADMIN

NDJSON = "application/x-ndjson"
"""The content type of lines of JSON."""


class Route(msgspec.Struct, frozen=True):
    """One row of the table. paths: the first is the name, the others are aliases. handler: a method of the group's
    class. role: the role that a caller needs; see OPEN, USE and ADMIN.

    body, reply: msgspec structs as late references, for the document; "" means no body, or a JSON object without a
    struct. status: the status of a success. errors: further statuses of this route. query: the parameters and their
    meaning. events: a success can also be a stream of server-sent events. lines: it can also be a stream of lines of
    JSON. content_type: the type of a success. error: the struct of its error replies, as a late reference; "" means
    OpenAI's form.
    """

    method: str
    paths: tuple[str, ...]
    handler: str
    role: Role | None
    summary: str
    body: str = ""
    reply: str = ""
    status: int = 200
    errors: tuple[int, ...] = ()
    query: Mapping[str, str] = msgspec.field(default_factory=dict)
    events: bool = False
    lines: bool = False
    content_type: str = "application/json"
    error: str = ""


class RouteGroup(msgspec.Struct, frozen=True):
    """The routes that one class handles. handlers: the class as a late reference; it is built from the ApiContext."""

    handlers: str
    routes: tuple[Route, ...]


RouteTable = list[Route]

ROUTES: web.AppKey[RouteTable] = web.AppKey("routes", list)
"""The table of an application."""


class RouteRoles(msgspec.Struct, frozen=True):
    """Which role each route needs, by its method and its canonical path."""

    roles: Mapping[tuple[str, str], Role | None]

    @classmethod
    def of(cls, table: Iterable[Route]) -> RouteRoles:
        return cls({(row.method, canonical(path)): row.role for row in table for path in row.paths})

    def needed(self, method: str, path: str) -> Role | None:
        """The role that a call needs; None if everybody may make it. A call that is in no table needs USE for reading
        and ADMIN for all else."""
        asked = (("GET" if method == "HEAD" else method), path)
        if asked in self.roles:
            return self.roles[asked]
        return Role.USE if method in ("GET", "HEAD", "OPTIONS") else Role.ADMIN

    def open_paths(self) -> Iterator[str]:
        """Paths that everybody may read."""
        return (path for (method, path), role in self.roles.items() if method == "GET" and role is OPEN)


def add_routes(
    app: web.Application, groups: Iterable[RouteGroup], handler_of: Callable[[RouteGroup, Route], Handler]
) -> None:
    """Add every row to the router."""
    app[ROUTES] = []
    for group in groups:
        for row in group.routes:
            app[ROUTES].append(row)
            handler = handler_of(group, row)
            for path in row.paths:
                add = app.router.add_get if row.method == "GET" else partial(app.router.add_route, row.method)
                add(path, handler)  # add_get answers HEAD as well


def near_path(table: RouteTable, method: str, path: str) -> str:
    """A path of the table that a call with an unknown path may have meant; "" if there is none.

    It is the longest one at the path's end, because base URLs often have too much at theirs (/v1/v1/messages), or else
    one that differs by a typing error or continues the path (/completion).
    """
    plain = re.sub("/+", "/", path).rstrip("/")
    known = [one for row in table if row.method == method for one in row.paths if "{" not in one and one != "/"]
    ends = [one for one in known if plain.endswith(one)]
    return max(ends, key=len) if ends else near_word(plain, known)


def canonical(path: str) -> str:
    """The path without the patterns of its parameters: /models/{id:.+} is /models/{id}."""
    return path.replace(":.+}", "}")
