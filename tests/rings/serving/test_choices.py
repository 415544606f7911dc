"""Several answers to one request."""

from __future__ import annotations

import dataclasses

import pytest
from msgspec.structs import replace

from exo_mesh.domain.request import GenerateRequest, SamplingParams
from exo_mesh.rings.serving.choices import best_choices, choice_seed, fan_out

REQUEST = GenerateRequest("r", (1, 2, 3), 8, SamplingParams(seed=5), key_hash=b"k" * 32, prompt_logprobs=2)


def test_one_choice_is_the_request() -> None:
    assert fan_out(REQUEST, 1) == [REQUEST]
    with pytest.raises(ValueError, match="0 choices"):
        fan_out(REQUEST, 0)


def test_choice_0_yields_what_the_request_yields_alone() -> None:
    first = fan_out(REQUEST, 4)[0]
    assert dataclasses.replace(first, share_id="") == REQUEST


def test_choices_differ_in_ids_seeds_and_keys_and_in_nothing_else_that_draws() -> None:
    made = fan_out(REQUEST, 16)
    assert {one.share_id for one in made} == {"r"}
    for name in ("request_id", "key_hash"):
        assert len({getattr(one, name) for one in made}) == 16
    assert len({one.sampling.seed for one in made}) == 16
    assert {replace(one.sampling, seed=0) for one in made} == {SamplingParams(seed=0)}
    assert [one.prompt_logprobs for one in made] == [2, *[None] * 15], "the prompt is the same for all"
    assert fan_out(REQUEST, 4) == made[:4], "more choices do not change the first ones"
    assert {len(one.key_hash) for one in made} == {32}
    assert {one.key_hash for one in fan_out(dataclasses.replace(REQUEST, key_hash=b""), 3)} == {b""}


def test_seeds_of_choices_are_64_bits_and_stay_as_they_are() -> None:
    assert choice_seed(5, 0) == 5
    assert choice_seed(5, 1) != choice_seed(6, 1)
    assert all(0 <= choice_seed(2**64 - 1, index) < 2**64 for index in range(9))


def test_the_best_answers_have_the_highest_mean_logprob() -> None:
    logprobs = [[-1.0, -1.0], [-0.5], [-0.1, -0.1, -3.0], [], [-0.5, -0.5]]
    assert best_choices(logprobs, 3) == [1, 4, 0]
    assert best_choices(logprobs, 5) == [1, 4, 0, 2, 3]
