"""Log-probabilities of prompts: right however the prompt is cut, told once, and bounded in memory."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from exo_mesh.domain.frame import Frame
from exo_mesh.domain.request import GenerateRequest, SamplingParams
from exo_mesh.errors import EngineError
from exo_mesh.rings.runner.sampling import prompt_logprobs
from exo_mesh.rings.runner.sampling.prompt_logprobs import MAX_LOGITS_BYTES, max_logit_rows, score
from exo_mesh.rings.runner.scheduling.pace import Pace
from exo_mesh.rings.runner.scheduling.scheduler import LOGIT_ROWS_BESIDE
from tests.rings.runner.test_shared_prompts import CopyingEngine, SharingRing, alone, choices, nothing_left, submit
from tests.rings.runner.test_stage_and_driver import VOCAB, Caller, ids, request

PROMPT = [3 + (7 * place) % 40 for place in range(40)]
STAGES = 3


def oracle(prompt: list[int] = PROMPT) -> list[float]:
    """What SharingRing's model says of each prompt token but the first, by hand."""
    found = []
    for place in range(1, len(prompt)):
        value = (sum(prompt[:place]) + STAGES) % VOCAB
        logits = [math.cos(token * (1.0 + value)) for token in range(VOCAB)]
        found.append(logits[prompt[place]] - math.log(sum(map(math.exp, logits))))
    return found


def wanted(tokens: int = 4, top: int = 3, **changes: object) -> GenerateRequest:
    return request(
        "r", PROMPT, tokens, sampling=SamplingParams(temperature=1.0, seed=7), prompt_logprobs=top, **changes
    )


def told(caller: Caller) -> list[float]:
    entries = [entry for message in caller.messages for entry in message.prompt]
    assert [entry.index for entry in entries] == list(range(1, len(entries) + 1)), "each once and in order"
    return [entry.logprob for entry in entries]


async def run(ring: SharingRing, *requests: GenerateRequest) -> list[Caller]:
    callers = [submit(ring, one) for one in requests]
    ring.run()
    for caller in callers:
        await caller.collect()
    assert nothing_left(ring)
    return callers


@pytest.mark.parametrize("chunk", [3, 16, 512])
async def test_every_prompt_token_but_the_first_has_its_logprob(chunk: int) -> None:
    (caller,) = await run(SharingRing(prefill_chunk=chunk), wanted())
    assert told(caller) == pytest.approx(oracle(), abs=1e-5)
    entries = [entry for message in caller.messages for entry in message.prompt]
    for entry in entries:
        likeliest = [top.logprob for top in entry.top]
        assert len(likeliest) == 3
        assert likeliest == sorted(likeliest, reverse=True)
        assert likeliest[0] >= entry.logprob - 1e-6
    assert ids([event for message in caller.messages for event in message.events]) == await alone(
        replace(wanted(), prompt_logprobs=None)
    )


async def test_a_request_for_the_prompt_alone_draws_nothing() -> None:
    ring = SharingRing()
    (caller,) = await run(ring, wanted(tokens=0, top=0))
    assert told(caller) == pytest.approx(oracle(), abs=1e-5)
    (end,) = [event for message in caller.messages for event in message.events]
    assert (end.index, end.HasField("token_id"), end.finish) == (0, False, "length")
    assert ring.counts() == [len(PROMPT) - 1] * STAGES, "the last token is not computed"
    assert ring.driver.outputs.tokens == 0


@pytest.mark.parametrize("changes", [{"prompt_logprobs": None}, {"prompt_ids": (5,)}])
async def test_where_nothing_is_wanted_the_request_ends_at_once(changes: dict[str, object]) -> None:
    ring = SharingRing()
    (caller,) = await run(ring, replace(wanted(tokens=0), **changes))
    assert caller.messages[-1].events[-1].finish == "length"
    assert ring.counts() == [0] * STAGES


async def test_logits_of_a_frame_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever else is in the frame: two prompts share the bound, and one without the wish is not held up by it."""
    monkeypatch.setattr(prompt_logprobs, "MAX_LOGITS_BYTES", 4 * VOCAB * 5)
    ring = SharingRing()
    ring.driver._scheduler.max_logit_rows = 5
    frames: list[Frame] = []
    callers = [submit(ring, one) for one in (wanted(), replace(wanted(), request_id="s"), request("t", PROMPT, 4))]
    while ring.sent:
        frames.append(ring.sent[0])
        ring.lap()
    for caller in callers:
        await caller.collect()
    logits = [sum(row.num_logits for row in frame.rows) for frame in frames if any(row.n > 1 for row in frame.rows)]
    assert max(logits) == 5
    assert [told(caller) for caller in callers[:2]] == [pytest.approx(oracle(), abs=1e-5)] * 2
    assert max(row.n for frame in frames for row in frame.rows if not row.num_logits) == len(PROMPT) - 1


async def test_streams_are_not_held_up_by_many_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    ring = SharingRing()
    ring.driver._scheduler.max_logit_rows = 110
    monkeypatch.setattr(Pace, "prefilled", lambda *_args: None)  # a busy machine would make chunks smaller
    stream = submit(ring, request("stream", PROMPT[:2], 30), laps=3)
    scored = submit(ring, replace(wanted(), prompt_ids=tuple(PROMPT * 5)))
    logits = []
    while ring.sent:
        logits.append(sum(row.num_logits for row in ring.sent[0].rows if row.n > 1))
        ring.lap()
    assert max(logits) == LOGIT_ROWS_BESIDE
    for caller in (stream, scored):
        await caller.collect()
    assert len(told(scored)) == 199


def test_the_bound_is_64_mib() -> None:
    assert max_logit_rows(151_936) * 151_936 * 4 <= MAX_LOGITS_BYTES == 64 * 2**20
    assert max_logit_rows(151_936) == 110
    assert max_logit_rows() == 16
    assert max_logit_rows(2**30) == 1


async def test_messages_are_bounded() -> None:
    long = replace(wanted(tokens=1, top=20), prompt_ids=tuple(PROMPT * 20))
    (caller,) = await run(SharingRing(), long)
    assert len(told(caller)) == 799
    assert max(message.ByteSize() for message in caller.messages) < 128 * 1024
    assert max(len(message.prompt) for message in caller.messages) <= 2 * prompt_logprobs.AT_ONCE


@pytest.mark.parametrize("lost", [0, 1, 2])
@pytest.mark.parametrize("laps_before", [1, 2, 4, 8])
async def test_after_a_loss_nothing_is_told_twice_and_nothing_is_missing(lost: int, laps_before: int) -> None:
    ring = SharingRing(prefill_chunk=8)
    caller = submit(ring, wanted())
    ring.lose(laps_before=laps_before, kept_from=lost + 1)
    ring.replace(lost, CopyingEngine)
    ring.run()
    text = ids(await caller.collect())
    assert told(caller) == pytest.approx(oracle(), abs=1e-5)
    assert text == await alone(replace(wanted(), prompt_logprobs=None))
    assert nothing_left(ring)


async def test_the_first_of_several_choices_tells_of_the_prompt() -> None:
    made = [replace(one, prompt_logprobs=2 if not index else None) for index, one in enumerate(choices(3))]
    ring = SharingRing(prefill_chunk=8)
    callers = await run(ring, *made)
    assert [len(told(caller)) for caller in callers] == [29, 0, 0]
    assert ring.saved == 2 * 29, "copies of it share its prefill"


def test_logits_that_are_no_numbers_are_an_error() -> None:
    logits = np.zeros((1, 5), np.float32)
    for value in (np.nan, np.inf):
        logits[0, 2] = value
        with pytest.raises(EngineError, match="prompt token 7"):
            score(logits, [1], 7, 0)
    with pytest.raises(EngineError, match="5 tokens"):
        score(np.zeros((1, 5), np.float32), [5], 7, 0)


def test_a_token_that_is_impossible_has_no_probability() -> None:
    logits = np.array([[0.0, -np.inf]], np.float32)
    assert score(logits, [1], 1, 0)[0].logprob == -math.inf


@pytest.mark.parametrize("size", [5, 300, 1024, 5000])
@pytest.mark.parametrize("levels", [3, 10_000], ids=["many ties", "hardly any"])
def test_the_likeliest_are_those_of_the_whole_vocabulary(size: int, levels: int) -> None:
    logits = np.random.default_rng(size).integers(0, levels, size).astype(np.float32)
    for count in (0, 1, 2, 20):
        found = [(top.token_id, top.logprob) for top in score(logits[None], [0], 1, count)[0].top]
        order = sorted(range(size), key=lambda token: (-logits[token], token))[:count]
        assert [token for token, _ in found] == order
