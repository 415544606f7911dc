"""The judge of the soak tests: it sees a leak of 4 KB a request, and neither noise, one step nor pages of a library."""

from __future__ import annotations

import mmap
import sys
from pathlib import Path

import numpy as np
import psutil
import pytest

from tests.support.own_memory import own_bytes
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


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not say which pages are of files")
def test_what_a_process_has_read_of_a_file_is_not_its_own_memory_and_what_it_has_written_is(tmp_path: Path) -> None:
    process, file = psutil.Process(), tmp_path / "library"
    file.write_bytes(bytes(16 * MB))
    before = own_bytes(process)
    with file.open("rb") as stream, mmap.mmap(stream.fileno(), 0, prot=mmap.PROT_READ) as pages:
        assert not any(pages[:: mmap.PAGESIZE])
        assert own_bytes(process) - before < MB
    fresh = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS  # malloc would give memory that was used before
    with mmap.mmap(-1, 16 * MB, flags=fresh) as data:
        data.write(b"x" * 16 * MB)
        assert own_bytes(process) - before > 15 * MB
