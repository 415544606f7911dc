"""The pictures of the documentation can be made by their command."""

from __future__ import annotations

import asyncio
from pathlib import Path

from exo_mesh.cli.client.local_mesh import local_mesh
from tests.page.chromium import needs_chromium
from tools.page_pictures import FOLDER, PICTURES, make_pictures, place

pytestmark = needs_chromium


def test_the_command_makes_the_pictures_that_the_documentation_has(tmp_path: Path) -> None:
    with local_mesh(3, ["--engine", "numpy", "--open-admin"], "pictures", api_port=0) as mesh:
        place(mesh)
        asyncio.run(make_pictures(mesh, tmp_path))
    made = {path.name for path in tmp_path.iterdir()}
    assert made == {f"{name}.webp" for name, *_ in PICTURES} == {path.name for path in FOLDER.glob("*.webp")}
