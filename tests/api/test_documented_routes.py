"""docs/reference/api.md names every route, with the role that it needs."""

from __future__ import annotations

import re
from pathlib import Path

from exo_mesh.api.app import build_app
from exo_mesh.api.routes import ROUTES, RouteRoles
from tests.api.scripted_mesh import ScriptedMesh

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "api.md"


async def test_every_route_has_a_row_with_its_role(mesh: ScriptedMesh) -> None:
    documented = {}
    for paths, role in re.findall(r"^\| (`[A-Z]+ /.*?) \| (\w+) \|", PAGE.read_text(), re.MULTILINE):
        method = paths.split()[0].strip("`")
        documented.update({(method, path): role for path in re.findall(r"(/[^`]*)`", paths)})
    roles = RouteRoles.of(build_app(mesh.services)[ROUTES]).roles
    assert documented == {route: str(role or "open") for route, role in roles.items()}, "docs/reference/api.md"
