"""The conversation tells of takeovers, in Chromium on real nodes: a stage stops in mid-answer, then the entry peer."""

from __future__ import annotations

import os
import signal
from typing import Any

from exo_mesh.cli.client.local_mesh import LocalMesh, local_mesh
from tests.page.chromium import MODEL, ask, needs_chromium, page_at, until_written, whole_answer

pytestmark = needs_chromium
SLOW = ["--engine", "dummy", "--open-admin", "--engine-option", "cost_ms=15"]


async def test_the_conversation_tells_who_took_over_and_keeps_it() -> None:
    from playwright.async_api import expect

    with local_mesh(4, SLOW, "takeover", api_port=0) as mesh:
        mesh.wait_until_joined()
        place(mesh, {"peer-2": [0, 4], "peer-3": [4, 8]})
        async with page_at(*mesh.api_urls) as page:
            await ask(page, "Count from 7 to 90.", Token_limit="300")
            await until_written(page, 30)
            await expect(page.locator(".computed-by")).to_have_text("peer-2 0–3 peer-3 4–7", use_inner_text=True)
            os.killpg(mesh.children[2].pid, signal.SIGKILL)
            story = page.locator(".takeover")
            await expect(story).to_contain_text("peer-3 stopped; ", timeout=40_000)
            await expect(story).to_contain_text("took over layers 4–7 after ")
            os.killpg(mesh.children[0].pid, signal.SIGKILL)
            await expect(story.last).to_contain_text("peer-1 stopped; ", timeout=40_000)
            await expect(story.last).to_contain_text("sends the rest of the answer after ")
            answer = await whole_answer(page)
            assert len(answer["work"]["changes"]) == await story.count()
            assert answer["work"]["stages"][0]["names"] == ["peer-2"]


def place(mesh: LocalMesh, layers: dict[str, list[int]]) -> dict[str, Any]:
    """Place the model over these peers."""
    ids = {one["name"]: one["id"] for one in mesh.client().get("/state")["view"]["peers"]}
    placed: dict[str, Any] = mesh.client().post(
        "/instance", {"model": MODEL, "pins": {ids[name]: cut for name, cut in layers.items()}}, 60.0
    )
    return placed
