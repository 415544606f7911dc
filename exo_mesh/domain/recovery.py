"""Plans the recovery of a ring that lost stages, so that its peers load the fewest bytes.

A stage that keeps its range keeps its weights and loads nothing. Every other stage loads its whole new range, because a
range belongs to a process. This gives the order: the lost peer takes its range again if only its process died; else a
spare peer takes it; else neighbours absorb it. Rebalancing waits until the ring is idle.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import combinations, product

import msgspec
from msgspec.structs import replace

from exo_mesh.domain.fitting import stage_stops, stops_that_fit
from exo_mesh.domain.footprint import gigabytes, pools_to_try, stage_bytes
from exo_mesh.domain.model import ModelCard
from exo_mesh.domain.placement import make_plan
from exo_mesh.domain.plan import Ballot, Plan, PlanInputs
from exo_mesh.domain.ring_candidates import NOTHING_KNOWN, Candidate, Surroundings
from exo_mesh.errors import PlacementError

MAX_LOST = 8
"""Most lost stages that are tried with and without a spare each: 2^8 combinations, milliseconds each."""


class Recovery(msgspec.Struct, frozen=True):
    """The new plan, and the bytes of weights that each peer must load before it runs; 0 if the peer keeps its range."""

    plan: Plan
    load_bytes: Mapping[str, int]

    @property
    def total_load_bytes(self) -> int:
        return sum(self.load_bytes.values())


class _Position(msgspec.Struct, frozen=True):
    """A peer in the new ring. kept: the range that it holds and runs now, or None. usable_bytes includes the memory of
    that range. card: the model as its engine holds it."""

    peer_id: str
    usable_bytes: int
    kept: range | None
    engine: str
    card: ModelCard


def recover(
    card: ModelCard,
    old: Plan,
    *,
    holding: Mapping[str, range],
    usable_bytes: Mapping[str, int],
    spares: Sequence[Candidate],
    ballot: Ballot,
    around: Surroundings = NOTHING_KNOWN,
) -> Recovery:
    """Finds the plan that continues `old` at a higher ballot with the fewest bytes loaded.

    holding: the range that each surviving runner of the old ring holds. usable_bytes: for each live peer of the old
    ring, what it could reserve if it gave up its stage. A live peer that holds nothing has lost its process; a peer
    that could not hold a single layer (it drains, stops or is short of memory) counts as lost. spares: other peers that
    could take part. The KV pool shrinks to the least full one, or to one context, if it must. Ties are decided by fewer
    peers that load, then by the shorter ring. Raises PlacementError, with the numbers, if these peers cannot hold the
    model; then only a new placement can help.
    """
    fitting_spares = sorted(
        (spare for spare in spares if spare.engine in old.engines and spare.peer_id not in old.peer_ids),
        key=lambda spare: (-spare.usable_bytes, spare.peer_id),
    )
    if any(stage.group is not None for stage in old.stages):
        raise PlacementError(
            f"{old.instance_id} has a tensor group, whose ranks can only restart together: it is placed again",
            reason="tensor_group",
        )
    usable_bytes = _of_use(card, old, usable_bytes, around)
    best: tuple[tuple[int, int, int], list[_Position], list[range]] | None = None
    pool_tokens = old.kv_tokens
    rings = _rings(card, old, holding, usable_bytes, fitting_spares, around)
    pools = dict.fromkeys((old.kv_tokens, *pools_to_try(old.context_limit)))
    for ring, pool in product(rings, [pool for pool in pools if pool <= old.kv_tokens]):
        ranges = _fewest_bytes(ring, pool)
        if ranges is None:
            continue
        loads = [_load_bytes(peer, layers) for peer, layers in zip(ring, ranges, strict=True)]
        score = (sum(loads), sum(1 for load in loads if load), len(ring))
        if best is None or score < best[0]:
            best, pool_tokens = (score, ring, ranges), pool
    if best is None:
        raise _hopeless(card, old, usable_bytes, fitting_spares, around)
    _, ring, ranges = best
    members = [Candidate(peer.peer_id, peer.usable_bytes, peer.engine) for peer in ring]
    inputs = PlanInputs(tuple((m.peer_id, m.usable_bytes) for m in members), old.inputs.policy, old.inputs.min_peers)
    cut = list(zip(members, ranges, strict=True))
    plan = make_plan(card, cut, old.context_limit, pool_tokens, old.instance_id, ballot, inputs, around)
    if len(plan.engines) > 1:
        plan = replace(plan, activation_dtype=old.activation_dtype)
    loads_by_peer = {peer.peer_id: _load_bytes(peer, layers) for peer, layers in zip(ring, ranges, strict=True)}
    return Recovery(plan, loads_by_peer)


def _of_use(card: ModelCard, old: Plan, usable_bytes: Mapping[str, int], around: Surroundings) -> dict[str, int]:
    """Returns the peers of the old ring that could hold at least its smallest layer, with what they could reserve."""
    able = {}
    for stage in old.stages:
        as_held, usable = around.held(card, stage.engine), usable_bytes.get(stage.peer_id, 0)
        if usable >= min(stage_bytes(as_held, i, i + 1, old.context_limit) for i in range(card.num_layers)):
            able[stage.peer_id] = usable
    return able


def _rings(
    card: ModelCard,
    old: Plan,
    holding: Mapping[str, range],
    usable_bytes: Mapping[str, int],
    spares: Sequence[Candidate],
    around: Surroundings,
) -> Iterator[list[_Position]]:
    """Yields the old ring with every live peer in its place, and each lost place given to a spare, or removed."""
    dead = [index for index, stage in enumerate(old.stages) if stage.peer_id not in usable_bytes][:MAX_LOST]
    for filled in _subsets(dead, min(len(dead), len(spares))):
        takers = dict(zip(_largest_first(old, filled), spares, strict=False))
        ring = []
        for index, stage in enumerate(old.stages):
            if index in takers:
                taker = takers[index]
                as_held = around.held(card, taker.engine)
                ring.append(_Position(taker.peer_id, taker.usable_bytes, None, taker.engine, as_held))
            elif stage.peer_id in usable_bytes:
                as_held, kept = around.held(card, stage.engine), holding.get(stage.peer_id)
                ring.append(_Position(stage.peer_id, usable_bytes[stage.peer_id], kept, stage.engine, as_held))
        if ring:
            yield ring


def _subsets(items: Sequence[int], most: int) -> Iterable[tuple[int, ...]]:
    for size in range(most, -1, -1):
        yield from combinations(items, size)


def _largest_first(old: Plan, indexes: Collection[int]) -> list[int]:
    """Sorts lost places by size: the spare with the most memory gets the largest shard."""
    return sorted(indexes, key=lambda index: (-old.stages[index].reserve_bytes, index))


def _load_bytes(peer: _Position, layers: range) -> int:
    return 0 if peer.kept == layers else peer.card.shard_bytes(layers.start, layers.stop)


def _fewest_bytes(ring: Sequence[_Position], pool_tokens: int) -> list[range] | None:
    """Ranges in ring order that fit, with the fewest bytes loaded; None if nothing fits. Dynamic programming."""
    legal = stage_stops([peer.card for peer in ring])

    @cache
    def best(rank: int, start: int) -> tuple[int, int] | None:
        """(bytes that the positions from `rank` on load, the layer at which position `rank` stops)."""
        peer, last = ring[rank], rank == len(ring) - 1
        found: tuple[int, int] | None = None
        for stop in stops_that_fit(peer.card, legal[rank], start, peer.usable_bytes, pool_tokens):
            load = _load_bytes(peer, range(start, stop))
            if not last:
                rest = best(rank + 1, stop)
                if rest is None:
                    continue
                load += rest[0]
            if found is None or load < found[0]:
                found = (load, stop)
        return found

    ranges: list[range] = []
    start = 0
    for rank in range(len(ring)):
        step = best(rank, start)
        if step is None:
            return None
        ranges.append(range(start, step[1]))
        start = step[1]
    return ranges


def _hopeless(
    card: ModelCard,
    old: Plan,
    usable_bytes: Mapping[str, int],
    spares: Sequence[Candidate],
    around: Surroundings,
) -> PlacementError:
    pool = min(old.kv_tokens, *pools_to_try(old.context_limit))
    need = sum(stage_bytes(around.held(card, s.engine), s.shard.start, s.shard.stop, pool) for s in old.stages)
    have = [*sorted(usable_bytes.items()), *((spare.peer_id, spare.usable_bytes) for spare in spares)]
    remedy = "Place the model again with a shorter context, or start more peers."
    listing = ", ".join(f"{peer_id[:8]} {gigabytes(size)}" for peer_id, size in have) or "none"
    return PlacementError(
        f"{old.instance_id} needs {gigabytes(need)} as placed, and the peers left cannot hold it: {listing}. {remedy}",
        reason="memory",
        need_bytes=need,
        have=have,
        remedy=remedy,
    )
