"""A request to the driver may come from any peer: nonsense is refused before it can reach the frames of others."""

from __future__ import annotations

import math
from typing import Any

import pytest

from exo_mesh.domain.plan import Ballot, Plan, PlanInputs, StagePlan
from exo_mesh.domain.request import (
    GenerateRequest,
    GrammarSpec,
    PromptLogprob,
    PromptLogprobs,
    SamplingParams,
    ThinkingBudget,
    TokenEvent,
    TokenLogprob,
)
from exo_mesh.domain.shard import Shard
from exo_mesh.wire.driver_codec import (
    event_from_proto,
    event_to_proto,
    prompt_from_proto,
    prompt_to_proto,
    request_from_proto,
    request_to_proto,
)
from exo_mesh.wire.incoming import read_message
from exo_mesh.wire.proto import driver_pb2 as pb

STAGE = StagePlan("p", "e", Shard("m", 0, 1, 1), 0)
PLAN = Plan("i", Ballot(1, "me"), "m", "digest", (STAGE,), 512, PlanInputs((), "memory", 1))


def sent(request: GenerateRequest) -> GenerateRequest:
    return request_from_proto(request_to_proto(PLAN, request))


def test_a_request_arrives_as_it_was_sent() -> None:
    sampling = SamplingParams(0.7, 5, 0.9, 0.1, 1.25, 0.5, -0.5, ((3, -1.5),), 2**64 - 1, 20, 64)
    request = GenerateRequest("r", (1, 2), 9, sampling, frozenset({4}), True, 2, (7, 8), share_id="s")
    assert sent(request) == request
    for prompt_logprobs in (0, 20):
        scored = GenerateRequest("r", (1, 2), 0, prompt_logprobs=prompt_logprobs)
        assert sent(scored) == scored
    ruled = GenerateRequest("r", (1, 2), 9, is_kept=False, cache_scope=b"s" * 16)
    assert sent(ruled) == ruled
    event = TokenEvent(0, 5, cached=200)
    assert event_from_proto(event_to_proto(event)) == event


def test_log_probabilities_of_a_prompt_arrive_as_they_were_sent() -> None:
    entries = (PromptLogprob(1, -0.5, (TokenLogprob(3, -0.25),)), PromptLogprob(2, -math.inf))
    assert prompt_from_proto(prompt_to_proto(entries)) == PromptLogprobs(entries)


def test_more_alternatives_than_can_be_told_are_refused() -> None:
    with pytest.raises(ValueError, match="prompt_logprobs"):
        sent(GenerateRequest("r", (1, 2), 0, prompt_logprobs=21))


@pytest.mark.parametrize(
    "wrong",
    [
        {"min_p": 2.0},
        {"top_p": -0.1},
        {"temperature": math.nan},
        {"temperature": -1.0},
        {"repetition_penalty": 0.0},
        {"presence_penalty": math.inf},
        {"logit_bias": ((1, math.inf),)},
        {"logprobs": 10_000},
    ],
    ids=str,
)
def test_sampling_that_the_sampler_cannot_do_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="(?i)" + next(iter(wrong)).replace("_", "_?")):
        sent(GenerateRequest("r", (1,), 9, SamplingParams(**wrong)))


@pytest.mark.parametrize("ids", [{"prompt_ids": (1, 2**31)}, {"prompt_ids": (1,), "resume_ids": (2**32 - 1,)}], ids=str)
def test_token_ids_that_no_vocabulary_has_are_refused(ids: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=list(ids)[-1]):
        sent(GenerateRequest(request_id="r", max_tokens=9, **ids))


def test_a_grammar_is_neither_cut_nor_made_printable_on_its_way() -> None:
    grammar = GrammarSpec("lark", "start: a\n" + 'a: "\t\u2028x"\n' * 500)
    request = GenerateRequest("r", (1,), 1, grammar=grammar)
    message = read_message(pb.GenerateRequest, request_to_proto(PLAN, request).SerializeToString())
    assert request_from_proto(message).grammar == grammar


def test_what_holds_the_output_arrives_as_it_was_sent() -> None:
    grammar, thinking = GrammarSpec("lark", 'start: "a"\n'), ThinkingBudget((5, 6), 0, (4,))
    request = GenerateRequest("r", (1, 2), 9, grammar=grammar, thinking=thinking)
    assert sent(request) == request


@pytest.mark.parametrize(
    "wrong",
    [
        pb.GenerateRequest(prompt_ids=[1], max_tokens=1, grammar=pb.Grammar(kind="gbnf", text=b"root ::= x")),
        pb.GenerateRequest(prompt_ids=[1], max_tokens=1, thinking=pb.ThinkingBudget(tokens=3)),
        pb.GenerateRequest(prompt_ids=[1], max_tokens=1, thinking=pb.ThinkingBudget(end_ids=[2**31])),
        pb.GenerateRequest(prompt_ids=[1], max_tokens=1, thinking=pb.ThinkingBudget(end_ids=range(300))),
    ],
    ids=["kind", "no end", "large id", "long marker"],
)
def test_what_cannot_hold_an_output_is_refused(wrong: pb.GenerateRequest) -> None:
    wrong.sampling.repetition_penalty = 1.0
    with pytest.raises(ValueError):
        request_from_proto(wrong)
