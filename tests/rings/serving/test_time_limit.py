"""A request that takes longer than it may."""

from __future__ import annotations

from pathlib import Path

import pytest

from exo_mesh.errors import DeadlineError
from exo_mesh.rings.placing.spec import InstanceSpec
from tests.support.nodes import MODEL, a_request, mesh, tokens, until


@pytest.mark.extended
async def test_an_answer_under_way_ends_where_it_is_and_its_stage_forgets_it(tmp_path: Path) -> None:
    slow = {"cost_ms": "20"}
    async with mesh(tmp_path, 1, engine_options=slow, response_timeout=1) as (node,):
        await node.instances.create(InstanceSpec(MODEL))  # first: loading it does not count
        start = await tokens(node, a_request("short", 2))
        got = await tokens(node, a_request("long", 1500))
        assert 2 < len(got) < 1500 and got[:2] == start
        await until(lambda: not any(stage.beat.sequences for stage in node._hosting.host.beats()))
        assert [(one["outcome"], one["output_tokens"]) for one in node.observation.recent_requests(1)] == [
            ("length", len(got))
        ]


@pytest.mark.extended
async def test_without_a_token_it_is_an_error(tmp_path: Path) -> None:
    async with mesh(tmp_path, 1, engine_options={"load_ms": "4000"}, response_timeout=1) as (node,):
        with pytest.raises(DeadlineError, match="within the 1 s"):
            await tokens(node, a_request())
        assert node.observation.recent_requests(1)[0]["outcome"] == DeadlineError.code
        assert node.observation.queue().entered == 0
