"""Several answers to one request, and what a model says of a prompt, over two nodes with real runners."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from exo_mesh.domain.frame import Row
from exo_mesh.domain.request import (
    FinishReason,
    GenerateRequest,
    PromptLogprob,
    PromptLogprobs,
    RequestEvent,
    TokenEvent,
)
from exo_mesh.engine.contract import StageInput
from exo_mesh.node.node import Node
from exo_mesh.rings.placing.spec import InstanceSpec
from exo_mesh.rings.serving.choices import fan_out
from tests.support.nodes import MODEL, a_request, mesh, tokens, until
from tests.support.questions import shipped
from tests.support.serving import load_stages

pytestmark = pytest.mark.extended

LONG = tuple(3 + (11 * place) % 250 for place in range(300))
PROMPT = LONG[:60]
NUM_TOKENS = 12
EXACT = {"mode": "deterministic"}
"""The same bits for every batch and chunk, so that answers can be compared token by token."""


class Ring:
    def __init__(self, nodes: list[Node]) -> None:
        self.nodes = nodes

    def kill(self, stage: int) -> None:
        """The runner of a stage, at once."""
        (instance,) = self.nodes[0].observation.state().view.instances
        os.kill(instance.stages[stage].pid, signal.SIGKILL)

    def counted(self, name: str) -> float:
        """The sum of a metric over both nodes."""
        samples = (
            sample for node in self.nodes for family in node.metrics.registry.collect() for sample in family.samples
        )
        return sum(sample.value for sample in samples if sample.name == f"exo_mesh_{name}")


@asynccontextmanager
async def ring(tmp_path: Path, **settings: Any) -> AsyncIterator[Ring]:
    """Two stages, which keep nothing of requests that have ended."""
    async with mesh(tmp_path, 2, engine="numpy", engine_options=EXACT, prefix_cache_bytes=0, **settings) as nodes:
        await nodes[0].instances.create(InstanceSpec(MODEL, min_peers=2))
        yield Ring(nodes)


def choices(count: int = 4) -> list[GenerateRequest]:
    request = a_request("r", NUM_TOKENS, PROMPT)
    return fan_out(dataclasses.replace(request, sampling=replace(request.sampling, temperature=1.0, seed=11)), count)


async def test_four_answers_cost_one_prefill_and_are_those_of_four_requests(tmp_path: Path) -> None:
    async with ring(tmp_path) as here:
        alone = [
            await tokens(here.nodes[0], dataclasses.replace(one, request_id=f"alone-{one.request_id}"))
            for one in choices()
        ]
        assert len(set(map(tuple, alone))) == 4
        assert here.counted("prefill_shared_tokens_total") == 0
        assert await asyncio.gather(*(tokens(here.nodes[0], one) for one in choices())) == alone
        await until(lambda: here.counted("prefill_shared_tokens_total") == 3 * (len(PROMPT) - 1))
        await until(lambda: here.counted("stage_sequences") == 0)
        check_scores(await scores(here.nodes[1]))


@pytest.mark.parametrize("stage", [0, pytest.param(1, marks=pytest.mark.slow)])
async def test_a_stage_that_is_killed_changes_nothing(tmp_path: Path, stage: int) -> None:
    async with ring(tmp_path) as here:
        wanted = await asyncio.gather(*(tokens(here.nodes[0], one) for one in choices()))
        came = asyncio.Event()
        tasks = [asyncio.create_task(_noting(here.nodes[0], one, came)) for one in choices()]
        await came.wait()
        here.kill(stage)
        assert await asyncio.gather(*tasks) == wanted
        check_scores(await scores(here.nodes[0], lambda: here.kill(stage)))


async def _noting(node: Node, request: GenerateRequest, came: asyncio.Event) -> list[int]:
    """The token ids of a request; sets the event when some have come."""
    found: list[int] = []
    async with aclosing(node.requests.generate(MODEL, request)) as items:
        async for item in items:
            if isinstance(item, TokenEvent) and item.token_id is not None:
                found.append(item.token_id)
                if len(found) == 3:
                    came.set()
    return found


async def scores(node: Node, on_first: Callable[[], object] = lambda: None) -> list[PromptLogprob]:
    """What a request that draws nothing is told of LONG; checks that it ends well."""
    entries: list[PromptLogprob] = []
    last: RequestEvent | None = None
    async with aclosing(
        node.requests.generate(MODEL, dataclasses.replace(a_request("s", 0, LONG), prompt_logprobs=3))
    ) as items:
        async for last in items:
            if isinstance(last, PromptLogprobs):
                if not entries:
                    on_first()
                entries += last.entries
    assert last == TokenEvent(0, None, finish=FinishReason.LENGTH)
    return entries


def check_scores(entries: Sequence[PromptLogprob]) -> None:
    """Each comes once, and is the model's to 1e-3."""
    places = np.arange(1, len(LONG))
    assert [entry.index for entry in entries] == places.tolist()
    expected = oracle(LONG)
    want = expected[places - 1, np.array(LONG)[places]]
    assert np.abs(want - [entry.logprob for entry in entries]).max() < 1e-3
    best = np.sort(expected[places - 1])[:, ::-1][:, :3]
    assert np.abs(best - [[top.logprob for top in entry.top] for entry in entries]).max() < 1e-3


def oracle(prompt: tuple[int, ...]) -> np.ndarray:
    """Float64 `[len(prompt), vocab]`: log-softmax of the whole model's logits in one piece, by NumPy."""
    (stage,) = load_stages("numpy", shipped(), ())
    stage.insert(1, len(prompt))
    output = stage.forward(StageInput((Row(1, 0, len(prompt), len(prompt)),), prompt, {}))
    assert output.logits is not None
    logits = output.logits.astype(np.float64)
    shifted = logits - logits.max(1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(1, keepdims=True))
