"""Cuts the layers of a model into one contiguous range per stage, in proportion to memory."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate

from exo_mesh.base.printable import counted
from exo_mesh.errors import PlacementError


def split_layers(num_layers: int, memory_bytes: Sequence[int]) -> list[range]:
    """Cut layers 0..num_layers into one non-empty half-open range per stage, in ring order.

    Shares follow memory by largest remainder (Hamilton); every stage gets at least one layer.
    Raises PlacementError if there are more stages than layers or a stage has no memory.
    """
    if not 0 < len(memory_bytes) <= num_layers:
        raise PlacementError(f"{counted(num_layers, 'layer')} cannot fill {counted(len(memory_bytes), 'stage')}")
    if min(memory_bytes) <= 0:
        raise PlacementError(f"a stage has no memory: {list(memory_bytes)}")
    quotas = [Fraction(num_layers * memory, sum(memory_bytes)) for memory in memory_bytes]
    counts = [max(1, int(quota)) for quota in quotas]
    while missing := num_layers - sum(counts):
        step = 1 if missing > 0 else -1
        movable = [rank for rank, count in enumerate(counts) if count + step >= 1]
        counts[max(movable, key=lambda rank: step * (quotas[rank] - counts[rank]))] += step
    stops = list(accumulate(counts))
    return [range(start, stop) for start, stop in zip([0, *stops], stops, strict=False)]


def largest_that_fit(num_layers: int, memory_bytes: Sequence[int]) -> list[int]:
    """Indexes of the stages that take part when each needs at least one layer, in their order.

    With more stages than layers the smallest stages are left out (of two equal ones the later); so are stages without
    memory.
    """
    by_size = sorted(range(len(memory_bytes)), key=lambda rank: (-memory_bytes[rank], rank))
    return sorted(rank for rank in by_size[:num_layers] if memory_bytes[rank] > 0)
