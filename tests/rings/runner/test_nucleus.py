"""The nucleus of top_p is found from a few tokens, and is the one that all weights in double precision give."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from exo_mesh.rings.runner.sampling.nucleus import LARGE, from_border, nucleus, nucleus_of
from exo_mesh.rings.runner.sampling.weights_of_logits import weights_of


def whole(logits: np.ndarray, temperature: float, top_p: float) -> list[int]:
    best = int(logits.argmax())
    return nucleus(weights_of(logits, best, temperature, None).copy(), top_p).tolist()


@given(
    size=st.integers(1, 5000),
    fall=st.floats(0.0, 6.0),
    seed=st.integers(0, 2**32 - 1),
    temperature=st.floats(0.05, 2.0),
    top_p=st.floats(0.0, 0.999),
    step=st.sampled_from([0.0, 0.25, 2.0]),
)
def test_the_nucleus_is_that_of_all_weights(
    size: int, fall: float, seed: int, temperature: float, top_p: float, step: float
) -> None:
    """fall: how fast the logits fall with their rank; step: to which multiples they are rounded, which makes equals."""
    rng = np.random.default_rng(seed)
    logits = rng.standard_normal(size, dtype=np.float32) - np.float32(fall) * np.log(
        rng.permutation(np.arange(1, size + 1, dtype=np.float32))
    )
    if step:
        logits = np.round(logits / np.float32(step)) * np.float32(step)
    found = nucleus_of(logits, int(logits.argmax()), temperature, top_p)
    assert found is None or found.tolist() == whole(logits, temperature, top_p)


@pytest.mark.parametrize(("temperature", "fall"), [(0.7, 1.5), (0.7, 3.0), (1.0, 1.5), (1.0, 2.0)])
@pytest.mark.parametrize("top_p", [0.5, 0.9])
def test_a_peaked_distribution_over_a_large_vocabulary_needs_few_tokens(
    temperature: float, fall: float, top_p: float
) -> None:
    rng = np.random.default_rng(3)
    ranks = rng.permutation(np.arange(1, 50_001, dtype=np.float32))
    logits = rng.standard_normal(50_000, dtype=np.float32) - np.float32(fall) * np.log(ranks)
    found = nucleus_of(logits, int(logits.argmax()), temperature, top_p)
    assert found is not None and found.tolist() == whole(logits, temperature, top_p)


@pytest.mark.parametrize("top_p", [0.5, 0.9, 0.99])
def test_a_nucleus_of_many_tokens_is_right_or_left_to_all_weights(top_p: float) -> None:
    rng = np.random.default_rng(4)
    ranks = rng.permutation(np.arange(1, 50_001, dtype=np.float32))
    logits = rng.standard_normal(50_000, dtype=np.float32) - np.log(ranks)
    found = nucleus_of(logits, int(logits.argmax()), 0.7, top_p)
    assert found is None or found.tolist() == whole(logits, 0.7, top_p)


@pytest.mark.parametrize("step", [0.0, 0.25])
@pytest.mark.parametrize("fall", [0.0, 1.0, 1.3])
@pytest.mark.parametrize("top_p", [0.1, 0.9, 0.999])
def test_a_large_nucleus_is_that_of_sorting_all_weights(fall: float, step: float, top_p: float) -> None:
    rng = np.random.default_rng(5)
    size = LARGE + 12_345
    logits = rng.standard_normal(size) - fall * np.log(rng.permutation(np.arange(1, size + 1)))
    weights = np.exp(np.round(logits / step) * step if step else logits)
    weights[rng.permutation(size)[: size // 3]] = 0.0
    falling = np.sort(weights)[::-1]
    count = int(np.searchsorted(np.cumsum(falling), top_p * weights.sum())) + 1
    assert nucleus(weights, top_p).tolist() == from_border(weights, falling[count - 1], count).tolist()


def test_the_border_takes_the_first_of_equal_values() -> None:
    values = np.array([1.0, 3.0, 2.0, 3.0, 2.0, 0.0])
    assert from_border(values, values[2], 3).tolist() == [1, 2, 3]
    assert from_border(values, values[2], 4).tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize("temperature", [1e-300, 1e-45, 1e-30])
def test_equal_logits_at_a_tiny_temperature_are_left_to_double_precision(temperature: float) -> None:
    logits = np.zeros(64, np.float32)
    found = nucleus_of(logits, 0, temperature, 0.5)
    assert found is None or found.tolist() == whole(logits, temperature, 0.5)


def test_masked_tokens_are_never_in_it() -> None:
    logits = np.full(40_000, -np.inf, np.float32)
    logits[[7, 9, 11]] = 3.0, 2.5, 2.5
    found = nucleus_of(logits, 7, 1.0, 0.95)
    assert found is not None and found.tolist() == whole(logits, 1.0, 0.95) == [7, 9, 11]
