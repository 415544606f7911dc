"""An engine that does not come back from a frame, and one that is merely slow."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from exo_mesh.domain.runner_limits import RunnerLimits
from exo_mesh.node.node import Node
from tests.support.nodes import a_request, instances, mesh, tokens

STRICT = RunnerLimits(decode_s=0.5, prefill_s=0.5, polite_s=0.5, terminate_s=0.5)

HANGS_ONCE = """
import os, sys, time
from pathlib import Path
sys.path[:0] = {path!r}
from exo_mesh_dummy.engine import DummyStage
from exo_mesh.rings.runner.__main__ import main

forward, frames, marker = DummyStage.forward, [], Path({marker!r})

def hangs(self, stage_input):
    frames.append(1)
    if len(frames) == {frame} and not marker.exists():
        marker.touch()
        time.sleep(3600)
    return forward(self, stage_input)

DummyStage.forward = hangs
os._exit(main())
"""


def ends(node: Node) -> list[str]:
    """How the runners of a node have ended so far, in the order of their starts."""
    logs = [log.describe() for log in node._hosting.runner_history.flights.logs]
    return [entry["attrs"]["end"] for entries in logs for entry in entries if entry["phase"] == "end"]


@pytest.mark.extended
async def test_an_engine_that_hangs_in_a_frame_is_replaced_and_the_answer_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "exo_mesh.rings.hosting.supervisor")
    script = HANGS_ONCE.format(path=sys.path, marker=str(tmp_path / "marker"), frame=40)
    command = (sys.executable, "-c", script)
    async with mesh(tmp_path, 1, commands=(command,), limits=STRICT) as (node,):
        got = await tokens(node, a_request(max_tokens=60))
        assert ends(node) == ["stalled"] and (tmp_path / "marker").exists()
        assert got == await tokens(node, a_request("undisturbed", max_tokens=60))
        assert "in hangs" in caplog.text, "where it stood is in the log"
        assert len(instances(node)) == 1 and not node.observation.health().reasons, "one stall is no loop"


@pytest.mark.slow
async def test_an_engine_that_is_slow_is_left_alone(tmp_path: Path) -> None:
    """Each frame takes longer than the shortest time after which one counts as stuck."""
    async with mesh(tmp_path, 1, limits=STRICT, engine_options={"cost_ms": "700"}) as (node,):
        assert len(await tokens(node, a_request(max_tokens=14))) == 14
        assert ends(node) == []
