"""Deciding who holds which layers: a pure function of the model card and the peers' live figures."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations

from exo_mesh.domain.fitting import Goal, Pace, fastest_layers, fit_layers, latency, stage_starts, throughput
from exo_mesh.domain.footprint import (
    ENGINE_OVERHEAD_BYTES,
    POOL_TOKENS,
    Footprint,
    footprint,
    gigabytes,
    pools_to_try,
    stage_bytes,
)
from exo_mesh.domain.model import ModelCard
from exo_mesh.domain.partition import largest_that_fit
from exo_mesh.domain.plan import Ballot, Plan, PlanInputs, StagePlan
from exo_mesh.domain.shard import Shard
from exo_mesh.errors import PlacementError

__all__ = [
    "ENGINE_OVERHEAD_BYTES",
    "POOL_TOKENS",
    "Candidate",
    "Footprint",
    "fit_layers",
    "footprint",
    "gigabytes",
    "most_context",
    "refuse_too_few",
    "solve",
    "solve_with_most_context",
    "stage_bytes",
    "with_caps",
]

MIN_USEFUL_CONTEXT = 512

DEFAULT_HOP_S = 0.0005
"""One way between two peers whose link was not measured: a LAN's round trip is about a millisecond."""

FEW_PEERS = 4
"""Of so many measured peers every ring is weighed; of more only the quickest and the largest ones of each size."""

MAX_RING_SIZES = 16
"""With measured speeds every size of ring is weighed, up to this many more than the fewest peers that hold the model:
each further hop costs time, and no model is known to gain from more."""

POLICIES = ("memory", "latency", "throughput")
"""memory: the fewest peers that hold the model (every hop costs time), layers in proportion to memory. latency and
throughput, where all peers of a ring know how fast they are: the peers and cuts that make a step quickest, or let most
steps through. Until then latency is as memory, and throughput takes all peers that fit in."""

_GOALS: Mapping[str, Goal] = {"latency": latency, "throughput": throughput}


@dataclass(frozen=True, slots=True)
class Candidate:
    """A peer that has the model on disk, what it could reserve now, and the engine it would run it with.

    s_per_gb: what one of its decode steps takes per 1e9 bytes of weights, if that was measured.
    """

    peer_id: str
    usable_bytes: int
    engine: str
    s_per_gb: float | None = None


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What placement may know besides model and peers; the defaults suit a model that may be cut anywhere.

    cuts: where each engine can cut the model. hop_s: seconds one way between two peers, where measured.
    """

    cuts: Mapping[str, Sequence[int]] = field(default_factory=dict)
    hop_s: Mapping[tuple[str, str], float] = field(default_factory=dict)

    def ring_hops(self, peer_ids: Sequence[str]) -> Pace:
        """All hops of a lap; a ring of one has none."""
        if len(peer_ids) < 2:
            return Pace(0.0, 0.0)
        hops = [self._hop(a, b) for a, b in zip(peer_ids, [*peer_ids[1:], peer_ids[0]], strict=True)]
        return Pace(sum(hops), max(hops))

    def _hop(self, one: str, other: str) -> float:
        return self.hop_s.get((one, other), self.hop_s.get((other, one), DEFAULT_HOP_S))


NOTHING_KNOWN = Surroundings()


def with_caps(candidates: Iterable[Candidate], caps: Mapping[str, int]) -> list[Candidate]:
    """The candidates with `usable_bytes` lowered to what each has said in a refusal."""
    return [replace(c, usable_bytes=min(c.usable_bytes, caps.get(c.peer_id, c.usable_bytes))) for c in candidates]


def solve(
    card: ModelCard,
    candidates: Sequence[Candidate],
    *,
    policy: str,
    min_peers: int,
    context_limit: int,
    instance_id: str,
    ballot: Ballot,
    around: Surroundings = NOTHING_KNOWN,
) -> Plan:
    """Choose peers and cut the layers. Equal arguments give an equal plan on every machine.

    The proposer of the ballot comes first if it takes part, then the others by memory. A ring is of one engine.
    The KV pool is max(POOL_TOKENS, context_limit) tokens, or one context where that is all that fits.
    Raises PlacementError with what is needed, what there is, and what would help.
    """
    if policy not in POLICIES:
        raise PlacementError(f"there is no placement policy {policy!r}; known: {', '.join(POLICIES)}")
    ordered = _in_preference(candidates, ballot.proposer)
    refuse_too_few(card, ordered, min_peers)
    choose = _fastest_ring if policy in _GOALS and all(c.s_per_gb for c in ordered) else _first_ring
    found = choose(card, ordered, policy, min_peers, context_limit, around)
    if found is not None:
        ring, pool_tokens = found
        inputs = PlanInputs(tuple((peer.peer_id, peer.usable_bytes) for peer in ordered), policy, min_peers)
        return make_plan(card, ring, context_limit, pool_tokens, instance_id, ballot, inputs)
    raise _refusal(card, ordered, min_peers, context_limit, around)


def most_context(
    card: ModelCard, attempt: Callable[[int], Plan], *, is_enough: Callable[[Plan, Plan], bool] = lambda a, b: True
) -> Plan:
    """What `attempt` makes of the longest context that it can: the model's own, or a half, a quarter, …

    A longer one must be `is_enough` beside that of POOL_TOKENS tokens, which is taken if no longer one is.
    Raises PlacementError if that fails.
    """
    context = card.context_length
    shortest = attempt(min(context, POOL_TOKENS))
    while context > POOL_TOKENS:
        try:
            plan = attempt(context)
        except PlacementError:
            plan = None
        if plan is not None and is_enough(plan, shortest):
            return plan
        context //= 2
    return shortest


def solve_with_most_context(
    card: ModelCard,
    candidates: Sequence[Candidate],
    *,
    policy: str,
    min_peers: int,
    instance_id: str,
    ballot: Ballot,
    around: Surroundings = NOTHING_KNOWN,
) -> Plan:
    """As `solve`, for the longest context that the fewest peers can hold.

    The number of peers is that for POOL_TOKENS tokens of context: more peers are slower, and few prompts are longer.
    """

    def attempt(context_limit: int) -> Plan:
        return solve(
            card,
            candidates,
            policy=policy,
            min_peers=min_peers,
            context_limit=context_limit,
            instance_id=instance_id,
            ballot=ballot,
            around=around,
        )

    return most_context(card, attempt, is_enough=lambda plan, shortest: len(plan.stages) == len(shortest.stages))


def refuse_too_few(card: ModelCard, candidates: Sequence[Candidate], min_peers: int) -> None:
    """Raises PlacementError unless there are as many peers and layers as the smallest ring that was asked for."""
    have = [(c.peer_id, c.usable_bytes) for c in candidates]
    if not candidates:
        raise PlacementError(
            f"no live peer can run {card.name} ({card.architecture}): none has both files and engine",
            reason="no_candidates", remedy="start a peer that has the model on disk and an engine for it",
        )  # fmt: skip
    if min_peers > len(candidates):
        listing = ", ".join(f"{c.peer_id[:8]} ({gigabytes(c.usable_bytes)})" for c in candidates)
        remedy = "start more peers with the model on disk, or lower min_peers"
        raise PlacementError(
            f"{card.name} was asked to run on at least {min_peers} peers, but {len(candidates)} can take part: "
            f"{listing}; {remedy}",
            reason="too_few_peers", have=have, remedy=remedy,
        )  # fmt: skip
    if min_peers > card.num_layers:
        raise PlacementError(
            f"{card.name} has {card.num_layers} layers, which cannot fill {min_peers} stages",
            reason="too_few_layers", have=have, remedy=f"lower min_peers to {card.num_layers} or less",
        )  # fmt: skip


Ring = list[tuple[Candidate, range]]
"""Peers in ring order with their layers."""


def make_plan(
    card: ModelCard,
    ring: Ring,
    context_limit: int,
    pool_tokens: int,
    instance_id: str,
    ballot: Ballot,
    inputs: PlanInputs,
) -> Plan:
    """The ring with what each stage must reserve. Raises ValueError unless it holds each layer exactly once."""
    stages = tuple(
        StagePlan(
            peer.peer_id,
            peer.engine,
            Shard(card.name, layers.start, layers.stop, card.num_layers),
            stage_bytes(card, layers.start, layers.stop, pool_tokens),
        )
        for peer, layers in ring
    )
    return Plan(instance_id, ballot, card.name, card.digest, stages, context_limit, inputs, pool_tokens)


def _in_preference(candidates: Iterable[Candidate], proposer: str) -> list[Candidate]:
    return sorted(candidates, key=lambda c: (c.peer_id != proposer, -c.usable_bytes, c.peer_id))


def _first_ring(
    card: ModelCard,
    ordered: list[Candidate],
    policy: str,
    min_peers: int,
    context_limit: int,
    around: Surroundings,
) -> tuple[Ring, int] | None:
    """The most wanted ring that fits, layers in proportion to memory, and its KV pool: a small one before more hops."""
    for peers in _rings_to_try(card, ordered, policy, min_peers):
        usable = [peer.usable_bytes for peer in peers]
        for pool_tokens in pools_to_try(context_limit):
            ranges = fit_layers(card, usable, pool_tokens, around.cuts.get(peers[0].engine))
            if ranges is not None:
                return list(zip(peers, ranges, strict=True)), pool_tokens
    return None


def _fastest_ring(
    card: ModelCard,
    ordered: list[Candidate],
    policy: str,
    min_peers: int,
    context_limit: int,
    around: Surroundings,
) -> tuple[Ring, int] | None:
    """The ring with the best pace among those of `_rings_by_speed`."""
    goal = _GOALS[policy]
    for pool_tokens in pools_to_try(context_limit):
        best: tuple[tuple[float, float], Ring] | None = None
        for peers in _rings_by_speed(card, ordered, min_peers):
            usable, speeds = [peer.usable_bytes for peer in peers], [peer.s_per_gb or 0.0 for peer in peers]
            found = fastest_layers(card, usable, speeds, pool_tokens, goal, around.cuts.get(peers[0].engine))
            if found is None:
                continue
            score = goal(found[0].then(around.ring_hops([peer.peer_id for peer in peers])))
            if best is None or score < best[0]:
                best = (score, list(zip(peers, found[1], strict=True)))
        if best is not None:
            return best[1], pool_tokens
    return None


def _rings_by_speed(card: ModelCard, ordered: list[Candidate], min_peers: int) -> Iterable[list[Candidate]]:
    fewest = max(1, min_peers)
    for group in _engine_groups(ordered):
        quickest = sorted(group, key=lambda c: (c.s_per_gb or 0.0, -c.usable_bytes, c.peer_id))
        roomiest = sorted(group, key=lambda c: (-c.usable_bytes, c.peer_id))
        for size in range(fewest, min(len(group), card.num_layers, fewest + MAX_RING_SIZES) + 1):
            if len(group) <= FEW_PEERS:
                yield from (list(peers) for peers in combinations(group, size))
            else:
                for wanted in (quickest[:size], roomiest[:size]):
                    yield [candidate for candidate in group if candidate in wanted]


def _engine_groups(ordered: list[Candidate]) -> list[list[Candidate]]:
    engines = list(dict.fromkeys(candidate.engine for candidate in ordered))
    return [[candidate for candidate in ordered if candidate.engine == engine] for engine in engines]


def _rings_to_try(card: ModelCard, ordered: list[Candidate], policy: str, min_peers: int) -> Iterable[list[Candidate]]:
    """Peers in ring order, the most wanted ring first."""
    groups = _engine_groups(ordered)
    sizes = range(max(1, min_peers), len(ordered) + 1)
    for size in reversed(sizes) if policy == "throughput" else sizes:
        for group in groups:
            if size > min(len(group), card.num_layers):
                continue
            yield group[:size]
            # the proposer's own device may be the small one that makes a ring of this size impossible
            largest = largest_that_fit(size, [candidate.usable_bytes for candidate in group])
            if len(largest) == size and 0 not in largest:
                yield [group[rank] for rank in largest]


def _refusal(
    card: ModelCard, ordered: Sequence[Candidate], min_peers: int, context_limit: int, around: Surroundings
) -> PlacementError:
    kv = card.kv_bytes_per_token * context_limit * card.num_layers
    weights = card.shard_bytes(0, card.num_layers)
    need = weights + kv + max(1, min_peers) * ENGINE_OVERHEAD_BYTES
    have = sum(candidate.usable_bytes for candidate in ordered)
    listing = ", ".join(f"{c.peer_id[:8]} {gigabytes(c.usable_bytes)} ({c.engine})" for c in ordered)
    reason, remedy = _what_would_help(card, ordered, min_peers, context_limit, need - have, around)
    return PlacementError(
        f"{card.name} needs {gigabytes(need)} (weights {gigabytes(weights)}, KV for "
        f"{context_limit} tokens {gigabytes(kv)}, {gigabytes(ENGINE_OVERHEAD_BYTES)} per stage); "
        f"there is {gigabytes(have)}: {listing}. {remedy}",
        reason=reason,
        need_bytes=need,
        have=[(c.peer_id, c.usable_bytes) for c in ordered],
        remedy=remedy,
    )


def _what_would_help(
    card: ModelCard,
    ordered: Sequence[Candidate],
    min_peers: int,
    context_limit: int,
    missing: int,
    around: Surroundings,
) -> tuple[str, str]:
    """(what the obstacle is called, what to do about it)."""
    context = context_limit // 2
    while context >= MIN_USEFUL_CONTEXT:
        if _first_ring(card, list(ordered), "memory", min_peers, context, around) is not None:
            return "memory", f"A context limit of {context} tokens would fit."
        context //= 2
    if missing > 0:
        return "memory", f"Free at least {gigabytes(missing)} or add a peer with that much and the model on disk."
    pieces = max(len(stage_starts(card, around.cuts.get(c.engine))) for c in ordered)
    if min_peers > pieces:
        return "cuts", f"The model can be cut into {pieces} stages at most: lower min_peers."
    largest = max(stage_bytes(card, i, i + 1, context_limit) for i in range(card.num_layers))
    return (
        "layers",
        "The sum would do, but no cut into layers fits every peer"
        f" (the largest single layer with its KV takes {gigabytes(largest)}), or the peers run different engines:"
        " free memory on one of them or add a peer.",
    )
