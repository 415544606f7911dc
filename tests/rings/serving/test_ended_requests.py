"""How the end of a request is recorded."""

from __future__ import annotations

from pathlib import Path

import pytest

from exo_mesh.rings.serving.request_run import RequestRun
from tests.support.nodes import a_request, mesh, tokens


async def test_a_mistake_of_our_own_is_recorded_as_an_error_and_not_as_a_cancelled_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def step(run: RequestRun) -> None:
        raise KeyError("zebra")

    monkeypatch.setattr(RequestRun, "step", step)
    async with mesh(tmp_path, 1) as (node,):
        with pytest.raises(KeyError):
            await tokens(node, a_request())
        (shown,) = node.observation.recent_requests(1)
        found = (shown["outcome"], shown["status"], shown["error_message"])
        assert found == ("internal_error", "error", "internal error (KeyError)")
        assert node.observation.request_stats()["errors"] == 1
