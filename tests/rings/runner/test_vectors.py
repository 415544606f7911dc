"""Requests for one vector of a prompt: every kind of pooling, however the prompt is cut, beside streams, and once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from exo_mesh.domain.embedding import EmbedSpec
from exo_mesh.domain.frame import Row
from exo_mesh.domain.plan import Ballot
from exo_mesh.domain.request import GenerateRequest
from exo_mesh.engine.contract import StageInput, StageOutput
from exo_mesh.rings.runner.scheduling.limits import SchedulerLimits
from exo_mesh.rings.runner.scheduling.pace import Pace
from exo_mesh.rings.runner.scheduling.scheduler import Scheduler
from exo_mesh.rings.runner.scheduling.sequence import Sequence as Scheduled
from exo_mesh.rings.runner.scheduling.sequence import Work
from exo_mesh.rings.runner.stage import Stage
from tests.rings.runner.ring_model import RingModel
from tests.rings.runner.test_stage_and_driver import Caller, Ring, TinyEngine, expected, ids, request

STAGES = 3
PROMPTS = [[3, 1, 4], [1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9], [7], [2] * 30]


class HiddenEngine(TinyEngine):
    """Its final hidden state of a token is (sum of the ids up to it, the id), as the running sum of TinyEngine."""

    is_numbers = True

    def forward(self, stage_input: StageInput) -> StageOutput:
        output = super().forward(stage_input)
        if not self.last:
            return output
        states, start = [], 0
        for row in stage_input.rows:
            known = self.kv.get(row.sequence, [])
            for place in range(row.n - row.num_hidden, row.n):
                total = float(sum(known[: row.pos0 + place + 1])) if self.is_numbers else np.inf
                states.append((total, stage_input.token_ids[start + place]))
            start += row.n
        hidden = np.array(states, np.float32).reshape(-1, 2)
        return StageOutput(output.tensors, output.logits, output.faults, hidden if len(states) else None)


class HiddenRing(Ring):
    def __init__(self, num_stages: int = STAGES, **limits: float) -> None:
        super().__init__(num_stages, **limits)
        for index in range(num_stages):
            self.engines[index] = HiddenEngine(index == 0, index == num_stages - 1)
            self.stages[index] = Stage(self.engines[index], index)


def wanted(name: str, prompt: Sequence[int], **spec: object) -> GenerateRequest:
    return request(name, prompt, 0, embed=EmbedSpec(**{"normalise": False, **spec}))  # type: ignore[arg-type]


def oracle(prompt: Sequence[int], pooling: str) -> list[float]:
    states = np.stack([np.cumsum(prompt), prompt], axis=1).astype(np.float64)
    by_name = {"mean": states.mean(0), "max": states.max(0), "first": states[0], "last": states[-1]}
    return list(by_name[pooling])


def submit(ring: Ring, one: GenerateRequest) -> Caller:
    caller = Caller()
    ring.driver.submit(one, caller.mailbox)
    return caller


async def vector_of(caller: Caller) -> list[float]:
    (event,) = await caller.collect()
    assert (event.index, event.HasField("token_id"), event.finish) == (0, False, "stop")
    return np.frombuffer(event.vector, "<f4").tolist()


@pytest.mark.parametrize("chunk", [2, 5, 512])
@pytest.mark.parametrize("pooling", ["mean", "max", "first", "last"])
async def test_each_pooling_is_right_for_any_chunks(pooling: str, chunk: int) -> None:
    ring = HiddenRing(prefill_chunk=chunk)
    callers = [submit(ring, wanted(f"r{i}", prompt, pooling=pooling)) for i, prompt in enumerate(PROMPTS)]
    ring.run()
    for caller, prompt in zip(callers, PROMPTS, strict=True):
        assert await vector_of(caller) == pytest.approx(oracle(prompt, pooling), rel=1e-6)
    assert ring.kv_rows == 0
    assert (ring.driver.num_running, ring.driver.num_waiting, ring.driver.outputs.tokens) == (0, 0, 0)


async def test_a_vector_is_cut_and_then_scaled_to_length_one() -> None:
    ring = HiddenRing()
    whole = submit(ring, wanted("whole", [3, 4], pooling="last", normalise=True))
    short = submit(ring, wanted("short", [3, 4], pooling="last", normalise=True, dimensions=1))
    ring.run()
    assert await vector_of(whole) == pytest.approx([7 / 65**0.5, 4 / 65**0.5])
    assert await vector_of(short) == [1.0]


async def test_streams_beside_vectors_get_the_text_that_they_get_alone() -> None:
    ring = HiddenRing(prefill_chunk=4)
    streams = [submit(ring, request(f"s{i}", prompt)) for i, prompt in enumerate(PROMPTS)]
    vectors = [submit(ring, wanted(f"v{i}", prompt)) for i, prompt in enumerate(PROMPTS)]
    ring.run()
    for stream, vector, prompt in zip(streams, vectors, PROMPTS, strict=True):
        assert ids(await stream.collect()) == expected(prompt, 8, STAGES)
        assert await vector_of(vector) == pytest.approx(oracle(prompt, "mean"), rel=1e-6)


@pytest.mark.parametrize("kept_from", [0, 1, STAGES])
@pytest.mark.parametrize("laps", [0, 1, 2, 4])
async def test_a_ring_that_changes_in_between_gives_the_same_vector(laps: int, kept_from: int) -> None:
    ring = HiddenRing(prefill_chunk=4)
    caller = submit(ring, wanted("r", PROMPTS[3]))
    for _ in range(laps):
        ring.lap()
    ring.sent.clear()
    for index in range(kept_from):
        ring.engines[index].kv.clear()
    if kept_from == STAGES:
        for engine in ring.engines:
            engine.kv.clear()
    ring.driver.change(Ballot(2, "test"), SchedulerLimits(STAGES, prefill_chunk=4), kept_from)
    ring.run()
    assert await vector_of(caller) == pytest.approx(oracle(PROMPTS[3], "mean"), rel=1e-6)


async def test_states_that_are_no_numbers_are_an_error_and_no_vector() -> None:
    ring = HiddenRing()
    ring.engines[-1].is_numbers = False  # type: ignore[attr-defined]
    caller = submit(ring, wanted("r", [1, 2, 3]))
    ring.run()
    await caller.collect()
    assert caller.error == "engine_error"
    assert ring.kv_rows == 0


async def test_an_engine_without_hidden_states_is_named_in_the_error() -> None:
    ring = Ring(STAGES)
    caller = submit(ring, wanted("r", [1, 2, 3]))
    ring.run()
    await caller.collect()
    assert caller.error == "invalid_request"
    assert "does not give hidden states" in caller.messages[-1].error_message
    assert (ring.kv_rows, ring.driver.num_running) == (0, 0)


def scheduled(number: int, size: int, *, is_whole: bool = True) -> Scheduled:
    return Scheduled(number, [1] * size, draws=False, scores=size, embeds=True, is_whole=is_whole)


class Flood(RingModel):
    """Whenever a text for a vector is done, the next one comes."""

    done = 0

    def _came_round(self, travel: Any) -> None:
        for row in travel.work.rows:
            if self.live[row.sequence][0].embeds and row.pos0 + row.n == len(self.live[row.sequence][0].tokens):
                self.scheduler.remove(row.sequence)
                self.live[1000 + self.done] = self.live.pop(row.sequence)
                self.done += 1
                self.live[1000 + self.done - 1][0].computed = 0
                again = scheduled(1000 + self.done - 1, 64, is_whole=False)
                self.live[again.id] = again, 0
                assert self.scheduler.submit(again)
        super()._came_round(travel)


def tokens_per_s(vectors: int, num_stages: int) -> tuple[float, int]:
    """The speed of one stream beside so many texts that never end, and how many of them were done in 60 s."""

    def cost(work: Work) -> float:
        return 0.01 + 0.001 * len(work.token_ids)

    ring = Flood([cost] * num_stages, 0.001)
    ring.submit(Scheduled(1, [1] * 4), 10**9)
    for number in range(vectors):
        ring.submit(scheduled(100 + number, 64, is_whole=False), 0)
    ring.run(until=60)
    return len([at for at in ring.drawn[1] if at > 10]) / 50, ring.done


@pytest.mark.parametrize("num_stages", [1, 2, 4])
def test_a_flood_of_texts_leaves_a_stream_most_of_its_speed(num_stages: int) -> None:
    alone, _ = tokens_per_s(0, num_stages)
    beside, done = tokens_per_s(16, num_stages)
    assert beside > 0.78 * alone
    _, most = tokens_per_s(16, 1)
    assert done > most / 2, "the texts are not held up much longer than on one stage"


def test_a_text_that_must_be_in_one_row_is_in_one_row() -> None:
    """Also if it is longer than a chunk; the rest of a chunk goes to texts that fit whole."""
    scheduler = Scheduler(SchedulerLimits(4, prefill_chunk=8), Pace(4))
    for number, size in enumerate((5, 20, 3, 2), 1):
        assert scheduler.submit(scheduled(number, size))
    list(scheduler.admit())
    frames: list[list[Row]] = []
    while (work := scheduler.next_work()) is not None:
        frames.append([Row(row.sequence, row.pos0, row.n, num_hidden=row.num_hidden) for row in work.rows])
        assert list(work.rows) == frames[-1]
        scheduler.came_round(work)
    rows = [row for frame in frames for row in frame]
    assert sorted((row.sequence, row.pos0, row.n) for row in rows) == [(1, 0, 5), (2, 0, 20), (3, 0, 3), (4, 0, 2)]
    assert [sum(row.n for row in frame) for frame in frames] == [7, 20, 3]


@pytest.mark.parametrize("chunk", [2, 512])
@pytest.mark.parametrize("choice", [(7,), (7, 9), (9, 7)])
async def test_a_score_is_the_difference_of_two_logits_after_the_prompt(choice: tuple[int, ...], chunk: int) -> None:
    """TinyEngine's logits are 1 for the sum of all ids and the number of stages, and 0 for any other token."""
    ring = HiddenRing(prefill_chunk=chunk)
    prompts = [[1, 3], [1, 1, 1, 3], [2, 2], [4]]
    callers = [
        submit(ring, wanted(f"r{i}", prompt, pooling="score", choice=choice)) for i, prompt in enumerate(prompts)
    ]
    stream = submit(ring, request("s", [5, 6]))
    ring.run()
    for caller, prompt in zip(callers, prompts, strict=True):
        likely = sum(prompt) + STAGES
        assert await vector_of(caller) == [float(likely == choice[0]) - float(likely in choice[1:])]
    assert ids(await stream.collect()) == expected([5, 6], 8, STAGES)
    assert ring.kv_rows == 0


async def test_a_choice_that_the_model_does_not_have_is_refused() -> None:
    ring = HiddenRing()
    caller = submit(ring, wanted("r", [1, 2], pooling="score", choice=(50,)))
    ring.run()
    await caller.collect()
    assert (caller.error, ring.kv_rows) == ("invalid_request", 0)
