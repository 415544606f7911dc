"""The judge of the soak tests: it sees a leak of 4 KB a request, and neither noise nor one step."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.slope import second_half, trend

MB = 1_000_000
COUNTS = np.arange(10, 1001, 10)


def test_the_slope_of_a_line_is_that_of_the_line_whatever_some_samples_say() -> None:
    figures = 3.0 * COUNTS + 7
    figures[[5, 50, 80]] = 10_000
    found = trend(COUNTS, figures)
    assert (found.slope, found.growth) == (3.0, 3.0 * 990)


@pytest.mark.parametrize("seed", range(20))
def test_a_leak_of_four_kilobytes_a_request_is_seen_in_noise_of_a_megabyte(seed: int) -> None:
    noise = np.random.default_rng(seed).normal(0, 0.2 * MB, len(COUNTS))
    assert second_half(COUNTS, 90 * MB + noise + 4000 * COUNTS).rises(MB)
    assert not second_half(COUNTS, 90 * MB + noise).rises(MB)


def test_a_pool_that_fills_in_the_first_half_and_one_step_later_are_no_leak() -> None:
    fills = 60 * MB + np.minimum(COUNTS, 400) * 20_000
    step = np.where(COUNTS > 700, 3 * MB, 0)
    assert not second_half(COUNTS, fills).rises(MB)
    assert not second_half(COUNTS, fills + step).rises(MB)
    assert second_half(COUNTS, fills + np.where(COUNTS > 500, 1, 0) * (COUNTS - 500) * 20_000).rises(MB)
