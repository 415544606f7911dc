"""The arithmetic of sampling gives the draws that its plain definition gives, row for row."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from exo_mesh.domain.request import GenerateRequest, SamplingParams
from exo_mesh.rings.runner.sampling.sampler import Sampler
from exo_mesh.rings.runner.sampling.weights_of_logits import BLOCK, index_at, uniform

VOCAB = 40_000
LEVELS = st.sampled_from([-np.inf, -60.0, -1.0, 0.0, 0.5, 4.0, 9.0])
LOGITS = hnp.arrays(np.float32, st.integers(1, 600), elements=LEVELS)


def plain_draw(logits: np.ndarray, params: SamplingParams, position: int) -> int:
    """Softmax of all tokens; those that top_k, top_p and min_p keep, in the order of their ids; one draw."""
    shifted = (logits.astype(np.float64) - float(logits.max())) / params.temperature
    weights = np.exp(shifted)
    by_rank = np.argsort(-shifted, kind="stable")
    if params.top_k:
        by_rank = by_rank[: params.top_k]
    if params.top_p < 1.0:
        cumulative = np.cumsum(weights[by_rank])
        by_rank = by_rank[: int(np.searchsorted(cumulative, params.top_p * cumulative[-1])) + 1]
    ids = np.sort(by_rank)
    if params.min_p:
        ids = ids[weights[ids] >= params.min_p * weights.max()]
    ends = np.cumsum(weights[ids])
    found = int(np.searchsorted(ends, uniform(params.seed, position) * ends[-1], side="right"))
    return int(ids[min(found, int(np.flatnonzero(weights[ids])[-1]))])


def flat(rng: np.random.Generator) -> np.ndarray:
    return rng.normal(0, 1, VOCAB).astype(np.float32)


def peaked(rng: np.random.Generator) -> np.ndarray:
    logits = rng.normal(0, 2.5, VOCAB).astype(np.float32)
    logits[rng.integers(0, VOCAB, 12)] += rng.uniform(8, 24, 12).astype(np.float32)
    return logits


WISHES = [
    *({"temperature": 1.0}, {"temperature": 0.3}, {"top_p": 0.9}, {"top_k": 40}, {"min_p": 0.05}),
    {"temperature": 1.7, "top_k": 3000, "top_p": 0.8, "min_p": 1e-3},
]


@pytest.mark.parametrize("wish", WISHES, ids=str)
@pytest.mark.parametrize("make", [flat, peaked])
def test_large_vocabularies_are_drawn_from_as_defined(make: object, wish: dict[str, float]) -> None:
    assert callable(make)
    rng = np.random.default_rng(5)
    for seed in range(3):
        logits, params = make(rng), SamplingParams(seed=seed, **wish)  # type: ignore[arg-type]
        drawn = Sampler(GenerateRequest("r", (0,), 9, params)).draw(logits, seed).token_id
        assert drawn == plain_draw(logits, params, seed)


@given(
    LOGITS,
    st.sampled_from([0.05, 0.7, 1.0, 5.0]),
    st.sampled_from([0, 1, 3, 50]),
    st.sampled_from([1.0, 0.9, 0.1]),
    st.sampled_from([0.0, 0.05, 1.0]),
    st.integers(0, 2**64 - 1),
)
@settings(max_examples=60, deadline=None)
def test_ties_and_masked_tokens_change_nothing_of_that(
    logits: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float, seed: int
) -> None:
    logits[0] = 1.0  # not all are masked
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)
    drawn = Sampler(GenerateRequest("r", (0,), 9, params)).draw(logits, 3).token_id
    assert drawn == plain_draw(logits, params, 3)


def test_every_weight_has_its_interval_also_at_the_borders_of_blocks() -> None:
    weights = np.zeros(4 * BLOCK)
    places = [1, BLOCK - 1, BLOCK, 2 * BLOCK - 1, 3 * BLOCK + 5]
    weights[places] = 1.0  # exact in binary, so that a share of n / 5 is a border
    assert [index_at(weights, (n + 0.5) / 5) for n in range(5)] == places
    assert index_at(weights, 0.0) == 1 and index_at(weights, np.nextafter(1.0, 0.0)) == places[-1]


@pytest.mark.parametrize(("seed", "position"), [(0, 0), (2**64 - 1, 1), (2**63 + 9, 123), (7, 2**40)])
def test_the_number_of_a_position_is_that_of_a_new_generator(seed: int, position: int) -> None:
    key, counter = np.array([seed, 0], np.uint64), np.array([0, position, 0, 0], np.uint64)
    fresh = np.random.Philox(key=key, counter=counter)
    assert uniform(seed, position) == int(fresh.random_raw() >> 11) * 2.0**-53
