"""A tensor group or stages of a pipeline, from what was measured; numbers checked by hand."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from exo_mesh.domain.group_placement import GroupTimes, group_verdict

# a 70B model in 4 bits on two Macs: 80 layers of 0.5 GB over 800 GB/s, Thunderbolt 5 with 25 us and 8 GB/s
MACS = GroupTimes(
    ranks=2,
    num_layers=80,
    all_reduce_s=25e-6,
    reduce_bytes_per_s=8e9,
    layer_s=625e-6,
    chunk_layer_s=20e-3,
    chunk_tokens=512,
    token_bytes=16384,
    hop_s=300e-6,
)


def test_a_fast_link_makes_a_group_worth_it() -> None:
    verdict = group_verdict(MACS)
    # 80 x (312.5 us + 2 x (25 + 2.048) us) = 29.3 ms against 80 x 625 us + 2 x 300 us = 50.6 ms
    assert verdict.group
    assert verdict.decode_gain == pytest.approx(50.6 / 29.328, rel=1e-3)
    # 80 x (10 ms + 2 x (25 us + 1.0486 ms)) against 80 x 10 ms
    assert verdict.prefill_gain == pytest.approx(10 / (10 + 2 * 1.0736), rel=1e-3)
    assert "better as a group" in verdict.reason and "all-reduces of 25 us" in verdict.reason


@pytest.mark.parametrize(
    "changes",
    [
        {"all_reduce_s": 1e-3, "reduce_bytes_per_s": 1e8},
        {"layer_s": 50e-6},
        {"reduce_bytes_per_s": 1e9},
    ],
    ids=["ethernet", "small layers", "prompts would be slow"],
)
def test_otherwise_stages_are_better(changes: dict[str, float]) -> None:
    verdict = group_verdict(replace(MACS, **changes))
    assert not verdict.group
    assert "better as stages" in verdict.reason


def test_more_ranks_of_the_same_link_gain_more_from_large_layers() -> None:
    gains = [group_verdict(replace(MACS, ranks=ranks)).decode_gain for ranks in (2, 3, 4)]
    assert gains == sorted(gains)


@pytest.mark.parametrize("field", ["all_reduce_s", "layer_s", "hop_s", "chunk_tokens"])
def test_what_was_not_measured_decides_nothing(field: str) -> None:
    with pytest.raises(ValueError, match="must be positive"):
        replace(MACS, **{field: 0})
