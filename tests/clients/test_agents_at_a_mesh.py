"""Conversations of coding agents at a mesh of two peers: each request computes only what the last one had not."""

from __future__ import annotations

import aiohttp
import pytest

from tests.api.agents.replay import FOLDER, Replay, sequence

pytestmark = [pytest.mark.extended, pytest.mark.timeout(600)]
AGENTS = sorted(path.stem for path in FOLDER.glob("*.json"))
LEAST_SHARE = 0.95
SHORT = 16
"""Tokens of an answer: they are not looked at, because the demo model was not trained for these tools."""


@pytest.mark.parametrize("agent", AGENTS)
async def test_a_mesh_computes_the_new_part_of_a_conversation_only(agent: str, url: str) -> None:
    recorded = sequence(agent)
    limit = "max_output_tokens" if agent == "codex" else "max_tokens"
    before = 0
    async with aiohttp.ClientSession(url) as http:
        replay = Replay(http, recorded, is_scripted=False, **{limit: SHORT})
        for turn in recorded["turns"]:
            reply = await replay.send(turn)
            print(f"{agent}: {reply.num_cached} of {reply.num_prompt} tokens were cached; {before} before")
            assert reply.num_cached >= LEAST_SHARE * before
            before = reply.num_prompt
    assert before > 2000
