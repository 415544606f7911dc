"""The sampler: hand-computed numbers, then what must hold for any logits."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from exo_mesh.domain.request import GenerateRequest, SamplingParams
from exo_mesh.errors import EngineError, InputError
from exo_mesh.rings.runner.sampling.sampler import Sampler, largest, nucleus
from exo_mesh.rings.runner.sampling.weights_of_logits import uniform

LOGITS = hnp.arrays(np.float32, st.integers(1, 600), elements=st.floats(-30, 30, width=32))


def logits_of(*probabilities: float) -> np.ndarray:
    return np.log(np.array(probabilities, np.float64)).astype(np.float32)


def sampler(prompt: tuple[int, ...] = (), *, stop_ids: Any = (), min_tokens: int = 0, **params: Any) -> Sampler:
    sampling = SamplingParams(**params)
    return Sampler(GenerateRequest("r", prompt or (0,), 99, sampling, frozenset(stop_ids), min_tokens=min_tokens))


def shares(logits: np.ndarray, draws: int = 4000, **params: Any) -> dict[int, float]:
    """How often each token is drawn, over seeds 0..draws."""
    counts = Counter(sampler(seed=seed, **params).draw(logits, 7).token_id for seed in range(draws))
    return {token_id: count / draws for token_id, count in counts.items()}


def greedy(*, logits: np.ndarray, **arguments: Any) -> int:
    return sampler(temperature=0.0, **arguments).draw(logits, 0).token_id


def test_greedy_takes_the_largest_and_the_lowest_of_equals() -> None:
    assert greedy(logits=np.array([0.0, 3.0, 1.0, 3.0], np.float32)) == 1


def test_bias_moves_the_choice() -> None:
    logits = np.array([0.0, 3.0], np.float32)
    assert greedy(logits=logits, logit_bias=((0, 3.5),)) == 0
    assert greedy(logits=logits, logit_bias=((1, -100.0),)) == 0
    assert list(logits) == [0.0, 3.0]


def test_bias_on_a_token_that_does_not_exist_is_refused() -> None:
    with pytest.raises(InputError, match="token 2, but the model has 2 tokens"):
        greedy(logits=np.zeros(2, np.float32), logit_bias=((2, 1.0),))


def test_repetition_penalty_divides_positive_and_multiplies_negative_logits_of_prompt_and_output() -> None:
    # 4 / 2 = 2 < 3, and -1 * 2 = -2 < -1.5
    assert greedy(logits=np.array([4.0, 3.0], np.float32), prompt=(0,), repetition_penalty=2.0) == 1
    assert greedy(logits=np.array([-1.0, -1.5], np.float32), prompt=(0,), repetition_penalty=2.0) == 1
    drawer = sampler(prompt=(3,), temperature=0.0, repetition_penalty=2.0)
    logits = np.array([4.0, 3.0, 0.0, 0.0], np.float32)
    assert [drawer.draw(logits, i).token_id for i in range(3)] == [0, 1, 0]


def test_a_window_lets_the_repetition_penalty_forget_older_tokens_of_prompt_and_output() -> None:
    logits = np.array([4.0, 3.0, 2.5, 0.0], np.float32)
    assert greedy(logits=logits, prompt=(0, 3), repetition_penalty=2.0, repetition_window=1) == 0
    assert greedy(logits=logits, prompt=(0, 3), repetition_penalty=2.0, repetition_window=2) == 1
    drawer = sampler(prompt=(3,), temperature=0.0, repetition_penalty=2.0, repetition_window=1)
    assert [drawer.draw(logits, i).token_id for i in range(4)] == [0, 1, 0, 1]
    drawer = sampler(prompt=(3,), temperature=0.0, repetition_penalty=2.0, repetition_window=2)
    assert [drawer.draw(logits, i).token_id for i in range(4)] == [0, 1, 2, 0]


def test_presence_counts_once_and_frequency_every_time_and_the_prompt_never() -> None:
    logits = np.array([1.0, 0.0], np.float32)
    presence = sampler(prompt=(0, 0, 0), temperature=0.0, presence_penalty=0.6)
    assert [presence.draw(logits, i).token_id for i in range(3)] == [0, 0, 0]
    frequency = sampler(prompt=(0, 0, 0), temperature=0.0, frequency_penalty=0.6)
    # 1; 0.4; -0.2 < 0; then 1 has -0.6
    assert [frequency.draw(logits, i).token_id for i in range(4)] == [0, 0, 1, 0]


def test_stop_ids_cannot_be_drawn_before_min_tokens() -> None:
    drawer = sampler(temperature=0.0, stop_ids={1, 999}, min_tokens=2)
    logits = np.array([0.0, 5.0], np.float32)
    assert [drawer.draw(logits, i).token_id for i in range(3)] == [0, 0, 1]


def test_top_k_keeps_k_and_the_lowest_of_equals() -> None:
    assert set(shares(logits_of(0.2, 0.3, 0.3, 0.2), 300, top_k=3)) == {0, 1, 2}
    assert set(shares(logits_of(0.2, 0.3, 0.3, 0.2), 50, top_k=1)) == {1}


def test_top_p_keeps_the_smallest_set_that_reaches_it() -> None:
    logits = logits_of(0.1, 0.5, 0.15, 0.25)
    assert set(shares(logits, 300, top_p=0.49)) == {1}
    assert set(shares(logits, 300, top_p=0.6)) == {1, 3}
    assert set(shares(logits, 300, top_p=0.8)) == {1, 2, 3}


def test_top_p_applies_to_what_top_k_left() -> None:
    # top_k leaves 0.4 and 0.3, renormalised 0.571 and 0.429: 0.55 is reached by the first alone.
    assert set(shares(logits_of(0.4, 0.3, 0.2, 0.1), 300, top_k=2, top_p=0.55)) == {0}


def test_min_p_is_relative_to_the_likeliest() -> None:
    assert set(shares(logits_of(0.5, 0.3, 0.15, 0.05), 400, min_p=0.25)) == {0, 1, 2}


def test_temperature_comes_before_truncation() -> None:
    # At temperature 0.5 the shares are squared: 0.36 and 0.16 of 0.52, so 0.69 reaches 0.65 alone.
    assert set(shares(logits_of(0.6, 0.4), 300, temperature=0.5, top_p=0.65)) == {0}
    assert set(shares(logits_of(0.6, 0.4), 300, top_p=0.65)) == {0, 1}


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_follow_the_distribution(temperature: float) -> None:
    probabilities = np.array([0.5, 0.2, 0.15, 0.1, 0.05])
    expected = probabilities ** (1 / temperature)
    expected /= expected.sum()
    draws = 4000
    seen = shares(logits_of(*probabilities), draws, temperature=temperature)
    chi_square = sum(draws * (seen.get(i, 0.0) - p) ** 2 / p for i, p in enumerate(expected))
    assert chi_square < 18.5  # 4 degrees of freedom: exceeded once in a thousand; the seeds are fixed


def test_positions_of_one_seed_are_independent_draws() -> None:
    numbers = np.array([uniform(5, position) for position in range(4000)])
    assert len(set(numbers)) == 4000
    assert abs(numbers.mean() - 0.5) < 0.02
    assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.05


def test_the_random_numbers_are_pinned() -> None:
    """A journal written by one version must replay in the next: these are Philox 4x64-10 and must not change."""
    assert [uniform(0, 0), uniform(1, 2), uniform(2**64 - 1, 9)] == [
        0.011546754286331562,
        0.9456775220595027,
        0.9721420143315033,
    ]


def test_logprobs_are_of_the_raw_distribution() -> None:
    draw = sampler(temperature=0.0, logprobs=2, logit_bias=((2, 100.0),)).draw(logits_of(0.5, 0.3, 0.2), 0)
    assert draw.token_id == 2
    assert draw.logprob == pytest.approx(math.log(0.2), abs=1e-6)
    assert [t.token_id for t in draw.top] == [0, 1]
    assert [t.logprob for t in draw.top] == pytest.approx([math.log(0.5), math.log(0.3)], abs=1e-6)
    assert sampler(logprobs=0).draw(logits_of(1.0), 0).top == ()
    assert sampler().draw(logits_of(1.0), 0).logprob is None


@pytest.mark.parametrize(
    ("bad", "message"),
    [([0.0, math.nan], "NaN"), ([math.inf, 0.0], r"\+inf"), ([-math.inf, -math.inf], "all -inf")],
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_broken_logits_are_an_engine_error(bad: list[float], message: str, temperature: float) -> None:
    with pytest.raises(EngineError, match=message):
        sampler(temperature=temperature).draw(np.array(bad, np.float32), 0)


def test_logits_of_a_wrong_shape_are_an_engine_error() -> None:
    with pytest.raises(EngineError, match="shape"):
        sampler().draw(np.zeros((1, 4), np.float32), 0)


def test_a_mask_that_leaves_nothing_is_an_engine_error() -> None:
    with pytest.raises(EngineError, match="min_tokens are all -inf"):
        sampler(stop_ids={0}, min_tokens=1).draw(np.zeros(1, np.float32), 0)


def test_tiny_temperatures_do_not_overflow() -> None:
    with np.errstate(all="raise", under="ignore", over="ignore"):
        assert sampler(temperature=1e-300).draw(np.array([1.0, 50.0, -1e30], np.float32), 0).token_id == 1


@settings(max_examples=60, deadline=None)
@given(
    logits=LOGITS,
    seed=st.integers(0, 2**64 - 1),
    position=st.integers(0, 2**31),
    temperature=st.floats(0.05, 2.0),
    top_k=st.integers(0, 700),
    top_p=st.floats(0.01, 1.0),
    min_p=st.floats(0.0, 1.0),
)
def test_any_draw_is_a_token_that_the_truncation_allows(
    logits: np.ndarray, seed: int, position: int, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    params = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p, "seed": seed}
    token_id = sampler(**params).draw(logits, position).token_id
    assert sampler(**params).draw(logits.copy(), position).token_id == token_id
    rank = int((logits > logits[token_id]).sum())
    assert not top_k or rank < top_k
    weights = np.exp((logits.astype(np.float64) - logits.max()) / temperature)
    assert weights[token_id] >= min_p * (1 - 1e-9)
    # What is strictly likelier may not already hold top_p of everything (top_k only shrinks the whole).
    if not top_k:
        assert weights[weights > weights[token_id]].sum() <= top_p * weights.sum() * (1 + 1e-9)


@settings(max_examples=60, deadline=None)
@given(logits=LOGITS, k=st.integers(1, 700))
def test_largest_agrees_with_a_stable_sort(logits: np.ndarray, k: int) -> None:
    assert list(largest(logits, k)) == sorted(np.argsort(-logits, kind="stable")[:k])


@settings(max_examples=60, deadline=None)
@given(weights=hnp.arrays(np.float64, st.integers(1, 3000), elements=st.floats(0.001, 1)), top_p=st.floats(0.01, 0.999))
def test_the_nucleus_is_minimal_and_sufficient(weights: np.ndarray, top_p: float) -> None:
    kept = nucleus(weights, top_p)
    wanted = top_p * weights.sum()
    assert weights[kept].sum() >= wanted * (1 - 1e-9)
    assert weights[kept].sum() - weights[kept].min() < wanted * (1 + 1e-9)
    assert weights[kept].min() >= np.delete(weights, kept).max(initial=0)


@settings(max_examples=40, deadline=None)
@given(logits=LOGITS, logprobs=st.integers(0, 20))
def test_logprobs_sum_to_one_over_the_vocabulary(logits: np.ndarray, logprobs: int) -> None:
    draw = sampler(temperature=0.0, logprobs=logprobs).draw(logits, 0)
    assert len(draw.top) == min(logprobs, logits.size)
    assert sum(math.exp(t.logprob) for t in draw.top) <= 1 + 1e-9
    if draw.top:
        assert draw.top[0].token_id == draw.token_id
        assert draw.top[0].logprob == draw.logprob
    assert [t.logprob for t in draw.top] == sorted((t.logprob for t in draw.top), reverse=True)


@pytest.mark.parametrize("window", [0, 3])
@settings(max_examples=30, deadline=None)
@given(data=st.data(), split=st.integers(0, 12))
def test_a_replay_goes_on_with_the_same_tokens(window: int, data: st.DataObject, split: int) -> None:
    """Drawing 12 tokens at once equals drawing some, losing the stage, and resuming after them elsewhere."""
    steps = data.draw(hnp.arrays(np.float32, (12, 20), elements=st.floats(-5, 5, width=32)))
    params = SamplingParams(
        seed=3, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.5, top_p=0.9, repetition_window=window
    )
    request = GenerateRequest("r", (1, 2, 3), 20, params, frozenset({4}), min_tokens=6)
    whole = Sampler(request)
    expected = [whole.draw(step, i).token_id for i, step in enumerate(steps)]
    resumed = Sampler(replace(request, resume_ids=tuple(expected[:split])))
    assert [resumed.draw(steps[i], i).token_id for i in range(split, 12)] == expected[split:]
    assert 4 not in expected[:6]
