"""Cutting layers into ranges: every layer exactly once, whatever the numbers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exo_mesh.base.printable import counted
from exo_mesh.domain.fitting import largest_that_fit, split_layers
from exo_mesh.errors import PlacementError

GB = 10**9
memories = st.lists(st.integers(1, 2**45), min_size=1, max_size=16)


@given(st.integers(1, 130), memories)
def test_every_layer_is_held_exactly_once_or_the_split_is_refused(num_layers: int, memory: list[int]) -> None:
    if len(memory) > num_layers:
        with pytest.raises(PlacementError, match=f"{counted(num_layers, 'layer')} cannot fill {len(memory)} stages"):
            split_layers(num_layers, memory)
        return
    parts = split_layers(num_layers, memory)
    assert [layer for part in parts for layer in part] == list(range(num_layers))
    assert all(parts) and len(parts) == len(memory)


@given(st.integers(16, 130), memories)
def test_no_stage_is_a_whole_layer_off_its_share_unless_it_needs_its_first(num_layers: int, memory: list[int]) -> None:
    quotas = [num_layers * size / sum(memory) for size in memory]
    if min(quotas) >= 1:
        for part, quota in zip(split_layers(num_layers, memory), quotas, strict=True):
            assert abs(len(part) - quota) < 1 + 1e-6


@pytest.mark.parametrize(
    ("num_layers", "memory_gb", "counts"),
    [(32, [16, 8, 8], [16, 8, 8]), (32, [80, 30], [23, 9]), (5, [1, 1], [3, 2]), (3, [100, 1, 1], [1, 1, 1])],
)
def test_shares_follow_memory(num_layers: int, memory_gb: list[int], counts: list[int]) -> None:
    parts = split_layers(num_layers, [size * GB for size in memory_gb])
    assert [len(part) for part in parts] == counts


def test_a_stage_without_memory_is_refused_with_the_numbers() -> None:
    with pytest.raises(PlacementError, match=r"\[5, 0\]"):
        split_layers(4, [5, 0])


@given(st.integers(1, 20), memories)
def test_with_more_peers_than_layers_the_smallest_stay_out(num_layers: int, memory: list[int]) -> None:
    kept = largest_that_fit(num_layers, memory)
    assert kept == sorted(kept) and len(kept) == min(num_layers, len(memory))
    left_out = [size for rank, size in enumerate(memory) if rank not in kept]
    assert not left_out or max(left_out) <= min(memory[rank] for rank in kept)
    assert split_layers(num_layers, [memory[rank] for rank in kept])
