"""Deciding who holds which layers: a pure function of the model card and the peers' live figures."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

from exo_mesh.domain.model import ModelCard
from exo_mesh.domain.partition import largest_that_fit, split_layers
from exo_mesh.domain.plan import Ballot, Plan, PlanInputs, StagePlan
from exo_mesh.domain.shard import Shard
from exo_mesh.errors import PlacementError

ENGINE_OVERHEAD_BYTES = 256 * 2**20
"""What a runner takes besides weights and KV: interpreter, libraries and the scratch memory of a forward pass.
Measured on Linux with the demo model: 57 MiB resident with the dummy engine, 288 with mlx (198 of them its own)."""

POOL_TOKENS = 8192
"""KV is reserved for at least this many tokens, so that several short requests run side by side."""

MIN_USEFUL_CONTEXT = 512

POLICIES = ("memory", "latency", "throughput")
"""memory and latency: the fewest peers that hold the model (every hop costs time). throughput: all peers that fit in,
because a longer ring has more requests under way at once."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A peer that has the model on disk, what it could reserve now, and the engine it would run it with."""

    peer_id: str
    usable_bytes: int
    engine: str


def with_caps(candidates: Iterable[Candidate], caps: Mapping[str, int]) -> list[Candidate]:
    """The candidates with `usable_bytes` lowered to what each has said in a refusal."""
    return [replace(c, usable_bytes=min(c.usable_bytes, caps.get(c.peer_id, c.usable_bytes))) for c in candidates]


def stage_bytes(card: ModelCard, start: int, stop: int, pool_tokens: int) -> int:
    """What the stage `[start, stop)` must reserve: its tensors, KV for `pool_tokens` tokens, and the engine itself."""
    kv = card.kv_bytes_per_token * pool_tokens * (stop - start)
    return card.shard_bytes(start, stop) + kv + ENGINE_OVERHEAD_BYTES


def solve(
    card: ModelCard,
    candidates: Sequence[Candidate],
    *,
    policy: str,
    min_peers: int,
    context_limit: int,
    instance_id: str,
    ballot: Ballot,
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
    for peers in _rings_to_try(card, ordered, policy, min_peers, ballot.proposer):
        for pool_tokens in dict.fromkeys((max(POOL_TOKENS, context_limit), context_limit)):
            ranges = fit_layers(card, [peer.usable_bytes for peer in peers], pool_tokens)
            if ranges is not None:
                stages = tuple(
                    StagePlan(
                        peer.peer_id,
                        peer.engine,
                        Shard(card.name, layers.start, layers.stop, card.num_layers),
                        stage_bytes(card, layers.start, layers.stop, pool_tokens),
                    )
                    for peer, layers in zip(peers, ranges, strict=True)
                )
                inputs = PlanInputs(tuple((peer.peer_id, peer.usable_bytes) for peer in ordered), policy, min_peers)
                return Plan(instance_id, ballot, card.name, card.digest, stages, context_limit, inputs, pool_tokens)
    raise PlacementError(_refusal(card, ordered, min_peers, context_limit))


def solve_with_most_context(
    card: ModelCard,
    candidates: Sequence[Candidate],
    *,
    policy: str,
    min_peers: int,
    instance_id: str,
    ballot: Ballot,
) -> Plan:
    """As `solve`, for the longest context that the fewest peers can hold: the model's own, or a half, a quarter, …

    The number of peers is that for POOL_TOKENS tokens of context: more peers are slower, and few prompts are longer.
    """
    context = card.context_length

    def attempt(context_limit: int, least: int) -> Plan:
        return solve(
            card,
            candidates,
            policy=policy,
            min_peers=least,
            context_limit=context_limit,
            instance_id=instance_id,
            ballot=ballot,
        )

    shortest = attempt(min(context, POOL_TOKENS), min_peers)
    while context > POOL_TOKENS:
        try:
            plan = attempt(context, min_peers)
        except PlacementError:
            plan = None
        if plan is not None and len(plan.stages) == len(shortest.stages):
            return plan
        context //= 2
    return shortest


def fit_layers(card: ModelCard, usable_bytes: Sequence[int], pool_tokens: int) -> list[range] | None:
    """One layer range per peer, in the given order, that fits each peer; None if there is none.

    Stages begin at legal cuts only. Of all cuts that fit, those nearest to proportional shares are taken, from the
    first stage on; when a share does not fit its peer, neighbours take the layers over.
    """
    starts = sorted({0, *(cut for cut in card.legal_cuts if 0 < cut < card.num_layers)})
    num_stages = len(usable_bytes)
    if num_stages > len(starts) or min(usable_bytes) <= 0:
        return None
    wanted = [layers.stop for layers in split_layers(card.num_layers, usable_bytes)]

    @cache
    def stops(rank: int, start: int) -> tuple[int, ...]:
        """Where stage `rank` may stop if it begins at `start`, so that it and all later stages fit."""
        last = rank == num_stages - 1
        fitting = []
        for stop in (card.num_layers,) if last else (cut for cut in starts if cut > start):
            # a stage only grows with `stop`, except that the head comes with the last layer
            if stage_bytes(card, start, stop, pool_tokens) > usable_bytes[rank]:
                break
            if last or stops(rank + 1, stop):
                fitting.append(stop)
        return tuple(fitting)

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


def refuse_too_few(card: ModelCard, candidates: Sequence[Candidate], min_peers: int) -> None:
    """Raises PlacementError unless there are as many peers and layers as the smallest ring that was asked for."""
    if not candidates:
        raise PlacementError(f"no live peer can run {card.name} ({card.architecture}): none has both files and engine")
    if min_peers > len(candidates):
        have = ", ".join(f"{c.peer_id[:8]} ({gigabytes(c.usable_bytes)})" for c in candidates)
        raise PlacementError(
            f"{card.name} was asked to run on at least {min_peers} peers, but {len(candidates)} can take part: {have}; "
            f"start more peers with the model on disk, or lower min_peers"
        )
    if min_peers > card.num_layers:
        raise PlacementError(f"{card.name} has {card.num_layers} layers, which cannot fill {min_peers} stages")


def gigabytes(num_bytes: int) -> str:
    """For people: GB with two digits behind the point, or MB below one."""
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.0f} MB"


def _in_preference(candidates: Iterable[Candidate], proposer: str) -> list[Candidate]:
    return sorted(candidates, key=lambda c: (c.peer_id != proposer, -c.usable_bytes, c.peer_id))


def _rings_to_try(
    card: ModelCard, ordered: list[Candidate], policy: str, min_peers: int, proposer: str
) -> Iterable[list[Candidate]]:
    """Peers in ring order, the most wanted ring first."""
    engines = list(dict.fromkeys(candidate.engine for candidate in ordered))
    groups = [[candidate for candidate in ordered if candidate.engine == engine] for engine in engines]
    sizes = range(max(1, min_peers), len(ordered) + 1)
    for size in reversed(sizes) if policy == "throughput" else sizes:
        for group in groups:
            if size > min(len(group), card.num_layers):
                continue
            yield group[:size]
            # the proposer's own device may be the small one that makes a ring of this size impossible
            largest = largest_that_fit(size, [candidate.usable_bytes for candidate in group])
            if len(largest) == size and group[0].peer_id == proposer and 0 not in largest:
                yield [group[rank] for rank in largest]


def _refusal(card: ModelCard, ordered: Sequence[Candidate], min_peers: int, context_limit: int) -> str:
    kv = card.kv_bytes_per_token * context_limit * card.num_layers
    stages = max(1, min_peers)
    need = card.shard_bytes(0, card.num_layers) + kv + stages * ENGINE_OVERHEAD_BYTES
    have = sum(candidate.usable_bytes for candidate in ordered)
    listing = ", ".join(f"{c.peer_id[:8]} {gigabytes(c.usable_bytes)} ({c.engine})" for c in ordered)
    helpful = _what_would_help(card, ordered, min_peers, context_limit, need - have)
    return (
        f"{card.name} needs {gigabytes(need)} (weights {gigabytes(card.shard_bytes(0, card.num_layers))}, KV for "
        f"{context_limit} tokens {gigabytes(kv)}, {gigabytes(ENGINE_OVERHEAD_BYTES)} per stage); "
        f"there is {gigabytes(have)}: {listing}. {helpful}"
    )


def _what_would_help(
    card: ModelCard, ordered: Sequence[Candidate], min_peers: int, context_limit: int, missing: int
) -> str:
    context = context_limit // 2
    while context >= MIN_USEFUL_CONTEXT:
        for peers in _rings_to_try(card, list(ordered), "memory", min_peers, ""):
            if fit_layers(card, [peer.usable_bytes for peer in peers], context) is not None:
                return f"A context limit of {context} tokens would fit."
        context //= 2
    if missing > 0:
        return f"Free at least {gigabytes(missing)} or add a peer with that much and the model on disk."
    largest = max(stage_bytes(card, i, i + 1, context_limit) for i in range(card.num_layers))
    return (
        "The sum would do, but no cut into layers fits every peer"
        f" (the largest single layer with its KV takes {gigabytes(largest)}), or the peers run different engines:"
        " free memory on one of them or add a peer."
    )
