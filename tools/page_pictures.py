"""Makes the pictures of the page in the documentation: eight views of a real mesh of three nodes, in Chromium.

    python -m tools.page_pictures                 # writes docs/images
    python -m tools.page_pictures --folder DIR

Needs what the browser tests need (docs/tasks/page.md). The mesh is on loopback and has the demo model; nothing is
downloaded. One picture shows a takeover: a node is killed in mid-answer.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from exo_mesh.cli.client.local_mesh import LocalMesh, local_mesh
from tests.page.chromium import MODEL, PHONE, ask, open_view, page_at, until_written, whole_answer

FOLDER = Path(__file__).parents[1] / "docs" / "images"
WIDE = {"width": 1024, "height": 768}
MAX_BYTES = 60_000


async def first_look(page: Any, mesh: LocalMesh) -> None:
    """The empty chat."""
    await page.locator(".steps").wait_for()
    await page.locator(".steps", has_text="Looking for models").wait_for(state="detached")


async def chat(page: Any, mesh: LocalMesh) -> None:
    """Two answers, with who computed them."""
    for question in ("Who are you?", "Count from 3 to 40."):
        await ask(page, question)
        await whole_answer(page)


async def view(page: Any, mesh: LocalMesh, name: str) -> None:
    """Another view."""
    await open_view(page, name)
    await page.wait_for_timeout(600)  # until what it asks for itself is there, and drawn


async def takeover(page: Any, mesh: LocalMesh) -> None:
    """A stage is killed in mid-answer, and the conversation tells who took over."""
    await page.locator(".connection").wait_for(state="attached")
    await page.evaluate("location.hash = '#/chat'")
    await page.get_by_role("button", name="New conversation").first.click()
    await ask(page, "Count from 7 to 90.")
    await until_written(page, 40)
    os.killpg(mesh.children[2].pid, signal.SIGKILL)
    await page.locator(".takeover").first.wait_for(timeout=60_000)
    await page.wait_for_timeout(1500)


def of_view(name: str) -> Callable[[Any, LocalMesh], Awaitable[None]]:
    """The function that opens a view."""
    return lambda page, mesh: view(page, mesh, name)


PICTURES: list[tuple[str, str, Callable[[Any, LocalMesh], Awaitable[None]], dict[str, int]]] = [
    ("first-look", "light", first_look, WIDE),
    ("chat", "light", chat, WIDE),
    ("mesh", "light", of_view("mesh"), WIDE),
    ("models", "dark", of_view("models"), WIDE),
    ("requests", "light", of_view("requests"), WIDE),
    ("settings", "dark", of_view("settings"), WIDE),
    ("phone", "dark", of_view("mesh"), PHONE),
    ("takeover", "light", takeover, WIDE),
]
"""Name, colours, what leads to it, and size; in one page, one after the other."""


async def make_pictures(mesh: LocalMesh, folder: Path) -> None:
    """Write all pictures into an existing folder. The third node of the mesh is dead afterwards."""
    async with page_at(*mesh.api_urls, viewport=WIDE) as page:
        for name, scheme, lead, size in PICTURES:
            await page.set_viewport_size(size)
            await page.emulate_media(color_scheme=scheme)
            await lead(page, mesh)
            await take(page, folder / f"{name}.webp")


async def take(page: Any, path: Path) -> None:
    """What the browser shows, as WebP: a third of the size of a PNG. Raises ValueError for a picture that is too large
    for the documentation."""
    session = await page.context.new_cdp_session(page)
    shot = await session.send("Page.captureScreenshot", {"format": "webp", "quality": 80})
    picture = base64.b64decode(shot["data"])
    if len(picture) > MAX_BYTES:
        raise ValueError(f"{path.name} has {len(picture)} bytes, more than {MAX_BYTES}")
    await asyncio.to_thread(path.write_bytes, picture)


def place(mesh: LocalMesh) -> None:
    """Load the demo model over all three nodes."""
    mesh.wait_until_joined()
    mesh.client().post("/instance", {"model": MODEL, "min_peers": 3}, 60.0)


def main() -> None:
    """Starts the mesh and makes the pictures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where to write them (docs/images)")
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    with local_mesh(3, ["--engine", "numpy", "--open-admin"], "pictures", api_port=0) as mesh:
        place(mesh)
        asyncio.run(make_pictures(mesh, folder))


if __name__ == "__main__":
    main()
