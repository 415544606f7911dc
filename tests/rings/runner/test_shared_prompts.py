"""Requests that share a prompt compute it once, and get the text that each gets alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from exo_mesh.domain.frame import NO_COPY, Copy, Frame, Insert, Remove
from exo_mesh.domain.request import GenerateRequest, SamplingParams
from exo_mesh.engine.contract import StageInput, StageOutput, copy_defect
from exo_mesh.errors import EngineError
from exo_mesh.rings.runner.stage import Stage
from exo_mesh.rings.serving.choices import fan_out
from tests.rings.runner.test_change_of_plan import CountingEngine, LosingRing
from tests.rings.runner.test_stage_and_driver import BALLOT, VOCAB, Caller, ids, request

PROMPT = list(range(3, 33))
STAGES = 3
SPREAD = SamplingParams(temperature=1.0, seed=7)


class CopyingEngine(CountingEngine):
    """Copies sequences; its logits are spread, so that the seeds of choices matter."""

    only_as_it_is = False

    def forward(self, stage_input: StageInput) -> StageOutput:
        output = super().forward(stage_input)
        if output.logits is None:
            return output
        return replace_logits(output, np.cos(np.arange(VOCAB) * (1.0 + output.logits.argmax(1)[:, None])))

    def copy(self, source: int, sequence: int, upto: int, max_tokens: int) -> None:
        held = self.kv.get(source)
        defect = copy_defect(source, None if held is None else len(held), upto, max_tokens)
        if defect is None and self.only_as_it_is and held is not None and len(held) != upto:
            defect = "it cannot be cut back"
        if defect or held is None:
            raise EngineError(defect)
        self.kv[sequence] = held[:upto]


def replace_logits(output: StageOutput, logits: np.ndarray) -> StageOutput:
    return StageOutput(output.tensors, logits.astype(np.float32), output.faults)


class SharingRing(LosingRing):
    engine: type[CountingEngine] = CopyingEngine

    def __init__(self, num_stages: int = STAGES, **limits: float) -> None:
        super().__init__(num_stages, **limits)
        for index in range(num_stages):
            self.replace(index, CopyingEngine)

    def replace(self, index: int, kind: type[CountingEngine]) -> None:
        last = len(self.stages) - 1
        self.engines[index] = kind(index == 0, index == last)
        self.stages[index] = Stage(self.engines[index], index)

    @property
    def saved(self) -> int:
        return self.driver.beginnings.shared.saved_tokens


def choices(num: int, tokens: int = 8, prompt: Sequence[int] = PROMPT, **changes: object) -> list[GenerateRequest]:
    return fan_out(request("r", prompt, tokens, sampling=SPREAD, **changes), num)


async def answers(ring: SharingRing, requests: Sequence[GenerateRequest], laps_between: int = 0) -> list[list[int]]:
    callers = [submit(ring, one, laps_between) for one in requests]
    ring.run()
    return [ids(await caller.collect()) for caller in callers]


def submit(ring: SharingRing, one: GenerateRequest, laps: int = 0) -> Caller:
    caller = Caller()
    ring.driver.submit(one, caller.mailbox)
    for _ in range(laps):
        if ring.sent:
            ring.lap()
    return caller


async def alone(one: GenerateRequest) -> list[int]:
    return (await answers(SharingRing(), [replace(one, share_id="")]))[0]


def nothing_left(ring: SharingRing) -> bool:
    driver, shared = ring.driver, ring.driver.beginnings.shared
    return not (ring.kv_rows or driver.num_running or driver.num_waiting or shared._made or driver._live)


@pytest.mark.parametrize("laps_between", [0, 1, 2, 6])
async def test_four_answers_cost_one_prefill_and_are_those_of_four_requests(laps_between: int) -> None:
    ring, wanted = SharingRing(prefill_chunk=8), choices(4)
    texts = await answers(ring, wanted, laps_between)
    assert texts == [await alone(one) for one in wanted]
    assert len(set(map(tuple, texts))) == 4, "each choice has a seed of its own"
    assert ring.counts() == [len(PROMPT) - 1 + 4 * 8] * STAGES
    assert ring.saved == 3 * (len(PROMPT) - 1)
    assert nothing_left(ring)


async def test_a_state_that_cannot_be_cut_back_is_copied_where_it_is() -> None:
    ring, wanted = SharingRing(prefill_chunk=8), choices(4)
    for engine in ring.engines:
        engine.only_as_it_is = True  # type: ignore[attr-defined]
    assert await answers(ring, wanted) == [await alone(one) for one in wanted]
    assert ring.counts() == [len(PROMPT) - 1 + 4 * 8] * STAGES


@pytest.mark.parametrize("stage", range(STAGES))
async def test_where_a_stage_cannot_copy_each_computes_its_prompt(stage: int) -> None:
    """As where an engine copies nothing, and where a late choice finds a state that has gone on."""

    class Plain(CopyingEngine):
        copy = None  # type: ignore[assignment]

    ring, wanted = SharingRing(prefill_chunk=8), choices(4)
    ring.replace(stage, Plain)
    assert await answers(ring, wanted, laps_between=2) == [await alone(one) for one in wanted]
    assert ring.saved == 0
    assert nothing_left(ring)


async def test_other_prompts_and_requests_without_a_share_id_share_nothing() -> None:
    ring = SharingRing()
    other = replace(choices(2)[1], request_id="x", prompt_ids=(9, *PROMPT[1:]))
    lone = replace(choices(1)[0], request_id="y")
    wanted = [*choices(2)[:1], other, lone]
    assert await answers(ring, wanted) == [await alone(one) for one in wanted]
    assert ring.saved == 0


async def test_if_the_first_is_cancelled_the_next_computes_the_prompt() -> None:
    ring, wanted = SharingRing(prefill_chunk=8), choices(4)
    first, *rest = [submit(ring, one) for one in wanted]
    ring.lap()
    ring.driver.cancel("r", first.mailbox)
    ring.run()
    assert [ids(await caller.collect()) for caller in rest] == [await alone(one) for one in wanted[1:]]
    assert nothing_left(ring)


async def test_a_choice_that_waits_can_be_cancelled() -> None:
    ring, wanted = SharingRing(prefill_chunk=8), choices(3)
    callers = [submit(ring, one) for one in wanted]
    ring.driver.cancel("r-1", callers[1].mailbox)
    ring.run()
    assert ids(await callers[2].collect()) == await alone(wanted[2])
    assert nothing_left(ring)


async def test_copies_of_a_sequence_with_a_fault_are_computed_again() -> None:
    ring, wanted = SharingRing(), choices(3)
    callers = [submit(ring, one) for one in wanted]
    assert any(isinstance(op, Copy) for frame in ring.sent for op in frame.ops), "the copies are on their way"
    ring.engines[1].refuse.add(1)
    ring.run()
    await callers[0].collect()
    assert callers[0].error == "bad_row"
    assert [ids(await caller.collect()) for caller in callers[1:]] == [await alone(one) for one in wanted[1:]]
    assert nothing_left(ring)


@pytest.mark.parametrize("lost", [0, 1, 2])
@pytest.mark.parametrize("laps_before", [0, 1, 2, 3, 5, 9])
async def test_every_answer_is_the_same_whichever_stage_is_lost(lost: int, laps_before: int) -> None:
    ring, wanted = SharingRing(prefill_chunk=8), choices(4)
    callers = [submit(ring, one) for one in wanted]
    ring.lose(laps_before=laps_before, kept_from=lost + 1)
    ring.replace(lost, CopyingEngine)
    ring.run()
    assert [ids(await caller.collect()) for caller in callers] == [await alone(one) for one in wanted]
    assert nothing_left(ring)


async def test_choices_that_outgrow_the_kv_pool_take_turns() -> None:
    ring, wanted = SharingRing(prefill_chunk=8, max_tokens=90), choices(6, tokens=12)
    assert await answers(ring, wanted) == [await alone(one) for one in wanted]
    assert ring.driver.evictions
    assert nothing_left(ring)


async def test_every_sequence_that_begins_at_a_stage_ends_there() -> None:
    ring, wanted = SharingRing(prefill_chunk=8, max_tokens=90), choices(6, tokens=12)
    frames = []
    callers = [submit(ring, one) for one in wanted]
    while ring.sent:
        frames.append(ring.sent[0])
        ring.lap()
    for caller in callers:
        await caller.collect()
    began = [op.sequence for frame in frames for op in frame.ops if isinstance(op, Insert | Copy)]
    ended = [op.sequence for frame in frames for op in frame.ops if isinstance(op, Remove)]
    assert sorted(began) == sorted(ended)


def test_a_rank_refuses_a_copy_like_the_others_and_ends_with_any_other_error() -> None:
    """All ranks of a group hold the same, so what one cannot copy none can."""
    frame = Frame(BALLOT, 1, ops=(Insert(1, 9), Copy(2, 1, 5, 9)))
    engine = CopyingEngine(True, True)
    rank = Stage(engine, 4, is_rank=True)
    (fault,) = rank.process(frame).frame.faults
    assert (fault.sequence, fault.stage, fault.code) == (2, 4, NO_COPY)
    assert "holds 0" in fault.message
    assert engine.kv == {1: [], 2: []}, "it has begun, empty"
    engine.kv[1] = [3, 4, 5, 6, 7]
    assert not rank.process(frame).frame.faults
    assert engine.kv[2] == engine.kv[1]
    engine.kv[1] = None  # type: ignore[assignment]
    engine.copy = None  # type: ignore[assignment, method-assign]
    with pytest.raises(TypeError):
        rank.process(frame)
    assert Stage(engine, 4).process(frame).frame.faults, "a stage that is no rank lets the driver prefill"
