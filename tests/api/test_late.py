"""Handlers are imported at the first call of one of their routes, in a thread."""

from __future__ import annotations

import asyncio
import inspect
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from aiohttp import web

from exo_mesh.api import app
from exo_mesh.api.context import ApiContext, ApiOptions
from exo_mesh.api.late import resolved
from exo_mesh.api.routes import OPEN, USE, Route, RouteGroup
from exo_mesh.api.table import TABLE
from tests.api.scripted_mesh import ScriptedMesh, served

HANDLERS = """
import asyncio, threading

IMPORTED_BY = threading.current_thread()
BEGUN = []

class Routes:
    def __init__(self, context):
        BEGUN.append(threading.current_thread())
        self.context = context

    async def one(self, request):
        from aiohttp import web
        return web.json_response({"loop": threading.current_thread() is BEGUN[0], "times": len(BEGUN),
                                  "apart": IMPORTED_BY is not BEGUN[0]})
"""


@pytest.mark.parametrize("group", TABLE, ids=lambda group: group.handlers)
def test_each_late_reference_of_the_table_leads_to_a_handler_or_a_type(group: RouteGroup) -> None:
    kind = resolved(group.handlers)
    assert next(iter(inspect.signature(kind).parameters.values())).annotation == ApiContext.__name__
    for row in group.routes:
        handler = getattr(kind, row.handler)
        assert inspect.iscoroutinefunction(handler)
        assert list(inspect.signature(handler).parameters) == ["self", "request"], row.paths
        for reference in filter(None, (row.body, row.reply, row.error)):
            assert isinstance(resolved(reference), type) or resolved(reference).__origin__ in (dict, list), reference


def test_a_class_has_one_group_and_each_of_its_handlers_a_row() -> None:
    names = [group.handlers for group in TABLE]
    assert len(names) == len(set(names))
    for group in TABLE:
        public = {
            name
            for name, value in vars(resolved(group.handlers)).items()
            if inspect.iscoroutinefunction(value) and "request" in inspect.signature(value).parameters
        }
        assert {name for name in public if name[0] != "_"} == {row.handler for row in group.routes}, group.handlers


@pytest.fixture
def handlers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], int]:
    """Writes the module whose handlers GET /late calls."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(
        app, "TABLE", (*TABLE, RouteGroup("late_handlers:Routes", (Route("GET", ("/late",), "one", OPEN, ""),)))
    )
    monkeypatch.delitem(sys.modules, "late_handlers", raising=False)
    return (tmp_path / "late_handlers.py").write_text


async def test_a_thread_imports_the_handlers_and_the_loop_builds_them_once(
    mesh: ScriptedMesh, handlers: Callable[[str], int]
) -> None:
    handlers(HANDLERS)
    async with served(mesh, ApiOptions()) as api:
        assert "late_handlers" not in sys.modules

        async def call() -> object:
            async with api.http.get("/late") as reply:
                return await reply.json()

        answers = await asyncio.gather(*(call() for _ in range(5)))
        assert answers == [{"loop": True, "times": 1, "apart": True}] * 5


async def test_handlers_that_cannot_be_imported_are_an_internal_error_until_they_can(
    mesh: ScriptedMesh, handlers: Callable[[str], int], caplog: pytest.LogCaptureFixture
) -> None:
    handlers("raise RuntimeError('half a file')")
    async with served(mesh, ApiOptions()) as api:
        async with api.http.get("/late") as reply:
            assert (reply.status, (await reply.json())["error"]["code"]) == (500, "internal_error")
        assert "half a file" in caplog.text
        handlers(HANDLERS + "\n# whole\n")
        async with api.http.get("/late") as reply:
            assert reply.status == 200


@pytest.mark.parametrize(("warm_after_s", "path"), [(0.0, "/healthz"), (600.0, "/v1/models")])
async def test_the_handlers_of_chats_are_imported_before_the_first_chat(
    warm_after_s: float, path: str, mesh: ScriptedMesh, handlers: Callable[[str], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    handlers(HANDLERS)
    monkeypatch.setattr(app, "CHAT", "late_handlers:Routes")
    async with served(mesh, ApiOptions(warm_after_s=warm_after_s)) as api, api.http.get(path):
        async with asyncio.timeout(5):
            while not getattr(sys.modules.get("late_handlers"), "BEGUN", ()):
                await asyncio.sleep(0)


async def test_health_checks_import_no_handlers_of_chats(
    mesh: ScriptedMesh, handlers: Callable[[str], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    handlers(HANDLERS)
    monkeypatch.setattr(app, "CHAT", "late_handlers:Routes")
    async with served(mesh, ApiOptions()) as api:
        for path in ("/healthz", "/readyz", "/health", "/metrics", "/version"):
            async with api.http.get(path):
                pass
        assert "late_handlers" not in sys.modules


async def test_health_checks_are_answered_while_all_threads_are_busy(mesh: ScriptedMesh) -> None:
    go_on = threading.Event()
    async with served(mesh, ApiOptions()) as api:
        stuck = [asyncio.create_task(asyncio.to_thread(go_on.wait, 30)) for _ in range(40)]
        await asyncio.sleep(0)
        try:
            async with asyncio.timeout(5), api.http.get("/healthz") as reply:
                assert reply.status == 200
        finally:
            go_on.set()
            await asyncio.gather(*stuck)


async def test_a_route_is_refused_by_its_role_before_its_handlers_are_imported(
    mesh: ScriptedMesh, handlers: Callable[[str], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    handlers("raise RuntimeError('nobody may import this')")
    row = Route("DELETE", ("/late",), "one", USE, "")
    monkeypatch.setattr(app, "TABLE", (*TABLE, RouteGroup("late_handlers:Routes", (row,))))
    origin = {"Origin": "http://elsewhere.example"}
    async with served(mesh, ApiOptions()) as api, api.http.delete("/late", headers=origin) as reply:
        assert reply.status == web.HTTPForbidden.status_code
