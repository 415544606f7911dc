"""What two real runners keep of ended requests is used by later ones, also after one of the runners was killed."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from exo_mesh.domain.request import TokenEvent
from exo_mesh.domain.routing.digest import kept_tokens, prompt_hashes
from exo_mesh.node.node import Node
from exo_mesh.rings.placing.spec import InstanceSpec
from exo_mesh.rings.prefix_disk.folder import stored_files
from tests.support.nodes import MODEL, a_request, mesh, until

pytestmark = pytest.mark.extended

PROMPT = tuple(3 + (11 * place) % 250 for place in range(300))
EXACT = {"mode": "deterministic"}
"""The same bits for every chunk, so that answers can be compared token by token."""


class CachedRing:
    def __init__(self, nodes: list[Node]) -> None:
        self.nodes = nodes
        self._asked = 0

    async def ask(self, prompt: tuple[int, ...] = PROMPT) -> tuple[list[int], int]:
        """The answer to a prompt, and how many of its tokens were cached."""
        self._asked += 1
        found: list[TokenEvent] = []
        async with aclosing(self.nodes[0].requests.generate(MODEL, a_request(f"r{self._asked}", 8, prompt))) as items:
            async for item in items:
                if isinstance(item, TokenEvent):
                    found.append(item)
        return [event.token_id for event in found if event.token_id is not None], found[0].cached

    def prefix(self) -> dict[str, Any]:
        """What the driver says of its cache."""
        stages = [stage for node in self.nodes for stage in node.observation.memory(whole_mesh=False)["stages"]]
        return dict(next(stage["prefix_cache"] for stage in stages if "on" in stage["prefix_cache"]))


@asynccontextmanager
async def ring(tmp_path: Path, count: int = 2, **settings: Any) -> AsyncIterator[CachedRing]:
    async with mesh(tmp_path, count, engine="numpy", engine_options=EXACT, **settings) as nodes:
        await nodes[0].instances.create(InstanceSpec(MODEL, min_peers=count))
        yield CachedRing(nodes)


async def test_a_repeated_prompt_and_the_next_turn_compute_only_what_is_new(tmp_path: Path) -> None:
    async with ring(tmp_path) as here:
        answer, cached = await here.ask()
        assert cached == 0
        assert await here.ask() == (answer, len(PROMPT) - 1)
        turn = (*PROMPT, *answer, 5, 6, 7)
        assert (await here.ask(turn))[1] == len(PROMPT) + len(answer) - 1, "the last token was not computed"
        told = here.nodes[0].observation.explanation("r3")
        assert told is not None and told.common == told.cached_tokens and told.mine == (answer[-1], 5, 6, 7)
        # a heartbeat in the middle of the last request shows its hit, and nothing kept: it has taken the memory over
        await until(lambda: here.prefix()["hits"] == 2 and here.prefix()["bytes"] > 0)
        assert here.prefix()["on"]


async def test_the_surviving_stage_keeps_what_it_holds(tmp_path: Path) -> None:
    async with ring(tmp_path) as here:
        answer, _ = await here.ask()
        (instance,) = here.nodes[0].observation.state().view.instances
        os.kill(instance.stages[0].pid, signal.SIGKILL)
        assert (await here.ask())[0] == answer
        assert await here.ask() == (answer, len(PROMPT) - 1)


async def test_a_middle_stage_that_has_lost_its_cache_shortens_the_reuse_and_the_answer_is_the_same(
    tmp_path: Path,
) -> None:
    async with ring(tmp_path, count=3) as here:
        answer, _ = await here.ask()
        (instance,) = here.nodes[0].observation.state().view.instances
        os.kill(instance.stages[1].pid, signal.SIGKILL)
        again, _ = await here.ask()
        assert again == answer
        assert await here.ask() == (answer, len(PROMPT) - 1), "every stage has it again"


@pytest.mark.parametrize("off", [0, 1])
async def test_one_node_can_switch_the_cache_of_a_ring_off(tmp_path: Path, off: int) -> None:
    each = [{"prefix_cache_bytes": 0} if index == off else {} for index in range(2)]
    async with ring(tmp_path, each=each) as here:
        answer, _ = await here.ask()
        assert await here.ask() == (answer, 0)


LONG = tuple(3 + (11 * place) % 250 for place in range(900))


@pytest.mark.parametrize("secret", ["", "k" * 40])
async def test_after_a_restart_of_all_nodes_a_prompt_is_read_from_their_disks(tmp_path: Path, secret: str) -> None:
    each = [{"prefix_disk": tmp_path / f"kv-{index}"} for index in range(2)]
    async with ring(tmp_path, each=each, secret=secret) as here:
        answer, _ = await here.ask(LONG)
        await until(lambda: (here.prefix().get("disk") or {}).get("known") == 1)
    written = [list(stored_files(tmp_path / f"kv-{index}")) for index in range(2)]
    assert [len(files) for files in written] == [1, 1], "each node has the layers of its own stage"
    assert written[0][0].stage != written[1][0].stage
    assert written[0][0].path.read_bytes().startswith(b"EXOMKV1") == bool(secret)
    async with ring(tmp_path, each=each, secret=secret) as here:
        again, cached = await here.ask(LONG)
        assert again == answer and cached == len(LONG) - 1
        await until(lambda: (here.prefix().get("disk") or {}).get("hits") == 1)


@pytest.mark.parametrize("moment_s", [0.0, 0.3, 0.9])
async def test_runners_that_are_killed_while_they_write_cost_no_answer(tmp_path: Path, moment_s: float) -> None:
    each = [{"prefix_disk": tmp_path / f"kv-{index}"} for index in range(2)]
    async with ring(tmp_path, each=each) as here:
        answer, _ = await here.ask(LONG)
        await asyncio.sleep(moment_s)  # the moment is arbitrary, and nothing is measured
        (instance,) = here.nodes[0].observation.state().view.instances
        for stage in instance.stages:
            os.kill(stage.pid, signal.SIGKILL)
        assert (await here.ask(LONG))[0] == answer
    async with ring(tmp_path, each=each) as here:
        assert (await here.ask(LONG))[0] == answer


async def test_a_prompt_that_came_in_at_another_peer_is_found(tmp_path: Path) -> None:
    async with mesh(tmp_path, 2, engine="numpy", engine_options=EXACT) as nodes:
        for here, other in (nodes, nodes[::-1]):
            await here.instances.create(InstanceSpec(MODEL, min_peers=1, exclude_peers=(other.node_id,)))
        rings = [CachedRing(nodes), CachedRing(nodes[::-1])]
        prompts = [(number + 3, *PROMPT) for number in range(6)]
        for prompt in prompts:
            await rings[0].ask(prompt)

        def are_known() -> bool:
            digests = [one for node in nodes for one in nodes[1].membership.prefixes_of(node.node_id).values()]
            return all(any(kept_tokens(one, prompt_hashes(prompt)) for one in digests) for prompt in prompts)

        await until(are_known)
        for prompt in prompts:
            assert (await rings[1].ask(prompt))[1] == len(PROMPT), "it goes where the prompt is kept"
