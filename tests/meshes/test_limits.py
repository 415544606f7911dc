"""Every limit of a request is reached by a stage that stands still in its phase; afterwards the ring serves on.

Nodes in this process, runners of their own; a stage stands still because its process is stopped.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest

from exo_mesh.domain.request import FinishReason, Progress, TokenEvent
from exo_mesh.errors import DeadlineError, MeshError, OverloadError, StageLostError
from exo_mesh.node.node import Node
from exo_mesh.rings.placing.spec import InstanceSpec
from tests.support.nodes import MODEL, a_request, mesh, tokens, until

LONG_PROMPT = tuple(range(3, 203)) * 8
RUNNING = 32
"""What a driver runs at once."""


class Ring:
    """Two stages; each frame takes 10 ms in each, so that a phase lasts long enough to be met."""

    def __init__(self, nodes: list[Node], pids: list[int]) -> None:
        self.nodes, self._pids = nodes, pids

    @contextmanager
    def standing_still(self, stage: int) -> Iterator[None]:
        os.kill(self._pids[stage], signal.SIGSTOP)
        try:
            yield
        finally:
            with suppress(ProcessLookupError):  # its node has ended it: the test says why
                os.kill(self._pids[stage], signal.SIGCONT)

    async def serves_on(self) -> None:
        await until(lambda: all(free(node) for node in self.nodes))
        assert len(await tokens(self.nodes[0], a_request("next"))) == 12


def free(node: Node) -> bool:
    beats = node.observation.state().stages_here.values()
    return len(node._serving.journal) == 0 and bool(beats) and all(beat.sequences + beat.queued == 0 for beat in beats)


@asynccontextmanager
async def ring(tmp_path: Path, **settings: Any) -> AsyncIterator[Ring]:
    cost = {"cost_ms": "10"}
    async with mesh(tmp_path, 2, engine_options=cost, silence_s=60.0, max_resumes=0, **settings) as nodes:
        instance = await nodes[0].instances.create(InstanceSpec(MODEL, min_peers=2))
        yield Ring(nodes, [stage.pid for stage in instance.stages])


class Asking:
    """A request in a task of its own. items: all that it was told."""

    def __init__(self, node: Node, name: str, max_tokens: int = 200, prompt: tuple[int, ...] = (5, 6, 7)) -> None:
        self.items: list[TokenEvent | Progress] = []
        self.task = asyncio.create_task(self._read(node, name, max_tokens, prompt))

    async def _read(self, node: Node, name: str, max_tokens: int, prompt: tuple[int, ...]) -> None:
        async with aclosing(node.requests.generate(MODEL, a_request(name, max_tokens, prompt))) as items:
            async for item in items:
                self.items.append(item)

    async def until(self, condition: Callable[[TokenEvent | Progress], bool]) -> None:
        """It was told something of which the condition holds, and lives."""
        await until(lambda: self.task.done() or any(map(condition, self.items)))
        assert not self.task.done(), self.task.exception()

    async def error(self) -> MeshError:
        """What it ended with."""
        with pytest.raises(MeshError) as caught:
            await asyncio.wait_for(self.task, 20)
        return caught.value


def is_token(item: TokenEvent | Progress) -> bool:
    return isinstance(item, TokenEvent)


def in_phase(phase: str) -> Callable[[TokenEvent | Progress], bool]:
    return lambda item: isinstance(item, Progress) and item.phase == phase


@pytest.mark.extended
@pytest.mark.parametrize("stage", [0, 1])
async def test_prefill_that_makes_no_progress_is_a_deadline(tmp_path: Path, stage: int) -> None:
    """Before the ring counts as lost: a driver that stands still for 2 s is, and so is a stage after 5 s."""
    async with ring(tmp_path, prefill_timeout=1) as here:
        asking = Asking(here.nodes[0], "r", prompt=LONG_PROMPT)
        await asking.until(in_phase("prefill"))
        with here.standing_still(stage):
            error = await asking.error()
        assert isinstance(error, DeadlineError) and "silent for 1 s" in str(error)
        assert not any(map(is_token, asking.items))
        await here.serves_on()


@pytest.mark.extended
async def test_silence_between_tokens_is_a_lost_stage(tmp_path: Path) -> None:
    async with ring(tmp_path, token_timeout=2) as here:
        asking = Asking(here.nodes[1], "r")
        await asking.until(is_token)
        with here.standing_still(0):
            error = await asking.error()
        assert isinstance(error, StageLostError) and "silent for 2 s" in str(error)


@pytest.mark.extended
@pytest.mark.parametrize(
    "stands",
    [
        pytest.param(False, id="the ring moves on", marks=pytest.mark.slow),
        pytest.param(True, id="the ring stands still"),
    ],
)
async def test_a_turn_that_does_not_come_is_an_overload(tmp_path: Path, stands: bool) -> None:
    async with ring(tmp_path, queue_timeout=3) as here:
        running = [Asking(here.nodes[n % 2], f"r{n}", max_tokens=1500) for n in range(RUNNING)]
        for one in running:
            await one.until(is_token)
        waiting = Asking(here.nodes[0], "late")
        await waiting.until(in_phase("queued"))
        with here.standing_still(1) if stands else nullcontext():
            error = await waiting.error()
        assert isinstance(error, OverloadError) and error.retry_after_s == 3, error
        assert {(one.phase, one.done, one.total) for one in waiting.items} == {("queued", 1, 1)}
        assert not any(one.task.done() for one in running), "they go on"
        for one in running:
            one.task.cancel()
        await asyncio.gather(*(one.task for one in running), return_exceptions=True)
        await here.serves_on()


@pytest.mark.slow
async def test_a_whole_answer_that_takes_too_long_ends_with_what_it_has(tmp_path: Path) -> None:
    """The stage stands still, and no other limit is reached."""
    async with ring(tmp_path, response_timeout=3) as here:
        asking = Asking(here.nodes[1], "r")
        await asking.until(is_token)
        with here.standing_still(0):
            await asyncio.wait_for(asking.task, 20)
        last = asking.items[-1]
        assert isinstance(last, TokenEvent) and (last.token_id, last.finish) == (None, FinishReason.LENGTH)
        await here.serves_on()
