"""Cuts a model over peers in a given ring order: in proportion to memory, near to it, or for the fastest step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import cache
from itertools import accumulate, pairwise

import msgspec

from exo_mesh.base.printable import counted
from exo_mesh.domain.footprint import stage_bytes
from exo_mesh.domain.model import ModelCard
from exo_mesh.errors import PlacementError


def stage_starts(card: ModelCard) -> tuple[int, ...]:
    """Returns the layers at which a stage may begin, in order: 0 and the legal cuts."""
    return tuple(sorted({0, *(cut for cut in card.legal_cuts if 0 < cut < card.num_layers)}))


def stage_stops(cards: Sequence[ModelCard]) -> list[tuple[int, ...]]:
    """Returns, for each stage, the layers before which it may stop, in order; cards[i]: the model as stage i holds it.

    A boundary between two engines must be legal for both, because one passes on the tensors there and the other takes
    them.
    """
    starts = [set(stage_starts(card)) - {0} for card in cards]
    inner = [tuple(sorted(one & other)) for one, other in pairwise(starts)]
    return [*inner, (cards[-1].num_layers,)]


def fit_layers(
    cards: Sequence[ModelCard],
    usable_bytes: Sequence[int],
    pool_tokens: int,
    share_bytes: Sequence[int] | None = None,
) -> list[range] | None:
    """Assigns one layer range per peer, in the given order, that fits each peer; None if there is no such cut.

    cards[i]: the model as the engine of peer i holds it. Stages begin at legal cuts only. Of all cuts that fit, those
    nearest to proportional shares are chosen, from the first stage on; when a share does not fit its peer, neighbours
    take the rest. share_bytes: the weights for the shares, where they differ from one peer's memory.
    """
    num_layers, num_stages = cards[0].num_layers, len(usable_bytes)
    if num_stages > num_layers or min(usable_bytes) <= 0:
        return None
    wanted = [layers.stop for layers in split_layers(num_layers, share_bytes or usable_bytes)]
    legal = stage_stops(cards)

    @cache
    def stops(rank: int, start: int) -> tuple[int, ...]:
        """Where stage `rank` may stop if it begins at `start`, so that this stage and all later stages fit."""
        fitting = stops_that_fit(cards[rank], legal[rank], start, usable_bytes[rank], pool_tokens)
        return fitting if rank == num_stages - 1 else tuple(stop for stop in fitting if stops(rank + 1, stop))

    ranges: list[range] = []
    start = 0
    for rank in range(num_stages):
        possible = stops(rank, start)
        if not possible:
            return None
        stop = min(possible, key=lambda cut, rank=rank: (abs(cut - wanted[rank]), cut))  # type: ignore[misc]
        ranges.append(range(start, stop))
        start = stop
    return ranges


def stops_that_fit(
    card: ModelCard, legal: Sequence[int], start: int, usable_bytes: int, pool_tokens: int
) -> tuple[int, ...]:
    """Where one stage that begins at `start` may stop so that it fits its peer, among the legal stops."""
    fitting = []
    for stop in (cut for cut in legal if cut > start):
        # a stage only grows with `stop`, so the first stop that does not fit ends the search
        if stage_bytes(card, start, stop, pool_tokens) > usable_bytes:
            break
        fitting.append(stop)
    return tuple(fitting)


class StepTimes(msgspec.Struct, frozen=True):
    """Seconds of one decode step: in all stages together, and in the slowest stage."""

    total_s: float
    slowest_s: float

    def then(self, other: StepTimes) -> StepTimes:
        """The times of these stages followed by the other's."""
        return StepTimes(self.total_s + other.total_s, max(self.slowest_s, other.slowest_s))


def latency(pace: StepTimes) -> tuple[float, float]:
    """Goal of one user, who waits for every stage in sequence."""
    return (pace.total_s, pace.slowest_s)


def throughput(pace: StepTimes) -> tuple[float, float]:
    """Goal of a full ring, in which the slowest stage limits the rate."""
    return (pace.slowest_s, pace.total_s)


Goal = Callable[[StepTimes], tuple[float, float]]


def fastest_layers(
    card: ModelCard,
    cards: Sequence[ModelCard],
    usable_bytes: Sequence[int],
    s_per_gb: Sequence[float],
    pool_tokens: int,
    goal: Goal,
) -> tuple[StepTimes, list[range]] | None:
    """Returns the ranges that fit and minimise the goal, with their step times; None if nothing fits.

    cards[i]: the model as the engine of peer i holds it. s_per_gb: the time of a decode step on each peer per 1e9 bytes
    of weights as they are in the files (`card`); see ModelCard.step_bytes. Exact in the goal's first figure, by dynamic
    programming over the cuts: O(stages x cuts²).
    """
    num_stages = len(usable_bytes)
    if num_stages > card.num_layers:
        return None
    legal = stage_stops(cards)
    bytes_before = [0, *accumulate(card.layer_bytes)]
    bytes_before[-1] += card.head_bytes  # the last stage holds the head, wherever it begins

    @cache
    def best(rank: int, start: int) -> tuple[StepTimes, int] | None:
        """Times of the stages from `rank` on, and where stage `rank` stops."""
        last = rank == num_stages - 1
        found: tuple[StepTimes, int] | None = None
        for stop in stops_that_fit(cards[rank], legal[rank], start, usable_bytes[rank], pool_tokens):
            taken_s = s_per_gb[rank] * (bytes_before[stop] - bytes_before[start]) / 1e9
            pace = StepTimes(taken_s, taken_s)
            if not last:
                rest = best(rank + 1, stop)
                if rest is None:
                    continue
                pace = pace.then(rest[0])
            if found is None or goal(pace) < goal(found[0]):
                found = (pace, stop)
        return found

    whole = best(0, 0)
    if whole is None:
        return None
    ranges: list[range] = []
    start = 0
    for rank in range(num_stages):
        step = best(rank, start)
        assert step is not None, "best(0, 0) found a way"
        ranges.append(range(start, step[1]))
        start = step[1]
    return whole[0], ranges


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
