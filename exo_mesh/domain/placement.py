"""Decides which peer holds which layers: a pure function of the model card and the peers' live figures."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from msgspec.structs import replace

from exo_mesh.base.printable import counted
from exo_mesh.domain.fitting import (
    Goal,
    StepTimes,
    fastest_layers,
    fit_layers,
    latency,
    stage_stops,
    throughput,
)
from exo_mesh.domain.footprint import (
    ENGINE_OVERHEAD_BYTES,
    POOL_TOKENS,
    gigabytes,
    pool_sequences,
    pools_to_try,
    roomiest,
    roomiest_pool,
    stage_bytes,
)
from exo_mesh.domain.model import ModelCard
from exo_mesh.domain.on_disk import Ring, kept_rings
from exo_mesh.domain.plan import Ballot, Plan, PlanInputs, StagePlan
from exo_mesh.domain.ring_candidates import (
    NOTHING_KNOWN,
    Candidate,
    Group,
    Surroundings,
    attempts,
    num_engines,
    rings_by_speed,
    rings_to_try,
)
from exo_mesh.domain.shard import KeptLayers, Shard
from exo_mesh.errors import PlacementError

MIN_USEFUL_CONTEXT = 512

POLICIES = ("memory", "latency", "throughput")
"""memory: the fewest peers that hold the model (every hop costs time), layers in proportion to memory. latency,
throughput: the peers and cuts with the fastest step, or the most steps per second; this needs the measured speed of
every peer in a ring. Until speeds are known, latency works like memory, and throughput takes all peers that fit and
cuts as if their speed were in proportion to their memory."""

STABLE_SHARE = 0.9
"""Share of the free memory that is still free at the next start: fewer peers than before are chosen only if they hold
the model with this share too."""

NEARLY_AS_FAST = 1.25
"""A ring whose KV is on disks is kept if its steps take at most this many times as long as the fastest ring's: two
measurements of one machine differ by as much, and computing a prompt again takes as long as many steps."""

_GOALS: Mapping[str, Goal] = {"latency": latency, "throughput": throughput}


def with_caps(candidates: Iterable[Candidate], caps: Mapping[str, int]) -> list[Candidate]:
    """Lowers the candidates' `usable_bytes` to what each peer stated when it refused."""
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
    mixing: str = "auto",
) -> Plan:
    """Chooses peers and cuts the layers. Equal arguments give an equal plan on every machine.

    The proposer of the ballot comes first if it takes part, then the others by memory; but a ring that finds its KV or
    its weights on disks is kept, see _kept_ring. A ring has one engine if such a
    ring fits, or follows `mixing` (one of MIXING). The KV pool is max(POOL_TOKENS, context_limit) tokens, two to eight
    times as many where that is cheap, or one context where only that fits. Raises PlacementError with what is needed,
    what is available, and what would help.
    """
    if policy not in POLICIES:
        raise PlacementError(f'there is no placement policy "{policy}"; known: {", ".join(POLICIES)}')
    ordered = _in_preference(candidates, ballot.proposer)
    refuse_too_few(card, ordered, min_peers)
    for groups in attempts(ordered, mixing, around):
        measured = all(candidate.s_per_gb for group in groups for candidate in group)
        choose = _fastest_ring if policy in _GOALS and measured and not around.even else _first_ring
        found = choose(card, groups, policy, min_peers, context_limit, around)
        if found is not None:
            tight = choose(card, _tighter(groups), policy, min_peers, context_limit, around) if around.on_disk else None
            most_stages = max(len(one[0]) for one in (found, tight) if one is not None)
            ring, pool_tokens = _kept_ring(card, groups, found[0], most_stages, policy, context_limit, around) or found
            pool_tokens = roomiest_pool(stage_parts(card, ring, around), pool_tokens)
            inputs = PlanInputs(members_of(ordered), policy, min_peers, _on_disk_of(ordered, around))
            return make_plan(card, ring, context_limit, pool_tokens, instance_id, ballot, inputs, around)
    raise _refusal(card, ordered, min_peers, context_limit, around, mixing)


def most_context(
    card: ModelCard, attempt: Callable[[int], Plan], *, is_enough: Callable[[Plan, Plan], bool] = lambda a, b: True
) -> Plan:
    """Returns the plan with the longest context that `attempt` can place: the model's own, or a half, a quarter, …

    A plan with a longer context must be `is_enough` compared with the plan for POOL_TOKENS tokens; if none is, that
    plan is returned. Raises PlacementError if the plan for POOL_TOKENS tokens fails.
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
    mixing: str = "auto",
) -> Plan:
    """Like `solve`, for the longest context that the fewest peers can hold.

    The number of peers is the number for POOL_TOKENS tokens of context, because more peers are slower and few prompts
    are longer. A longer context never makes a ring mixed either.
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
            mixing=mixing,
        )

    return most_context(card, attempt, is_enough=_is_enough)


def _is_enough(plan: Plan, shortest: Plan) -> bool:
    return len(plan.stages) == len(shortest.stages) and len(plan.engines) <= len(shortest.engines)


def refuse_too_few(card: ModelCard, candidates: Sequence[Candidate], min_peers: int) -> None:
    """Raises PlacementError unless there are enough peers and layers for `min_peers` stages."""
    have = members_of(candidates)
    if not candidates:
        raise PlacementError(
            f"no live peer can run {card.name} ({card.architecture}): none has both its files and an engine for it",
            reason="no_candidates", remedy="start a peer that has the model on disk and an engine for it",
        )  # fmt: skip
    if min_peers > len(candidates):
        listing = ", ".join(f"{c.peer_id[:8]} ({gigabytes(c.usable_bytes)})" for c in candidates)
        remedy = "start more peers with the model on disk, or lower min_peers"
        raise PlacementError(
            f"{card.name} was asked to run on at least {counted(min_peers, 'peer')}, but {len(candidates)} can take "
            f"part: {listing}; {remedy}",
            reason="too_few_peers", have=have, remedy=remedy,
        )  # fmt: skip
    if min_peers > card.num_layers:
        raise PlacementError(
            f"{card.name} has {counted(card.num_layers, 'layer')}, which cannot fill {counted(min_peers, 'stage')}",
            reason="too_few_layers", have=have, remedy=f"lower min_peers to {card.num_layers} or less",
        )  # fmt: skip


def make_plan(
    card: ModelCard,
    ring: Ring,
    context_limit: int,
    pool_tokens: int,
    instance_id: str,
    ballot: Ballot,
    inputs: PlanInputs,
    around: Surroundings = NOTHING_KNOWN,
) -> Plan:
    """Builds the plan of a ring, with what each stage reserves. Raises ValueError unless it holds each layer once."""
    parts = stage_parts(card, ring, around)
    sequences = roomiest(parts, pool_tokens)
    stages = tuple(
        StagePlan(
            peer.peer_id,
            peer.engine,
            Shard(card.name, layers.start, layers.stop, card.num_layers),
            stage_bytes(as_held, layers.start, layers.stop, pool_tokens, sequences),
            peer.group,
        )
        for (as_held, layers, _), (peer, _) in zip(parts, ring, strict=True)
    )
    return Plan(
        instance_id,
        ballot,
        card.name,
        card.digest,
        stages,
        context_limit,
        inputs,
        pool_tokens,
        pool_sequences=sequences,
    )


def stage_parts(card: ModelCard, ring: Ring, around: Surroundings) -> list[tuple[ModelCard, range, int]]:
    """For each stage the model as its engine holds it, its layers, and the bytes that its peer offers."""
    return [(around.held_by(card, peer), layers, peer.usable_bytes) for peer, layers in ring]


def members_of(candidates: Iterable[Candidate]) -> tuple[tuple[str, int], ...]:
    """Returns (peer, usable bytes) of every candidate, with the ranks of a group listed one by one."""
    return tuple((peer_id, one.usable_bytes) for one in candidates for peer_id in one.members)


def _in_preference(candidates: Iterable[Candidate], proposer: str) -> list[Candidate]:
    return sorted(candidates, key=lambda c: (c.group is None, c.peer_id != proposer, -c.share_bytes, c.peer_id))


def _first_ring(
    card: ModelCard,
    groups: Sequence[Group],
    policy: str,
    min_peers: int,
    context_limit: int,
    around: Surroundings,
) -> tuple[Ring, int] | None:
    """Returns the most wanted ring that fits, and its KV pool; a smaller pool is preferred to more hops. Layers are cut
    by memory, or for throughput by the bytes that a step reads."""
    for peers in rings_to_try(card, groups, policy, min_peers):
        usable, shares = [peer.usable_bytes for peer in peers], [peer.share_bytes for peer in peers]
        held = [around.held_by(card, peer) for peer in peers]
        for pool_tokens in pools_to_try(context_limit):
            if around.even:
                ranges = fit_layers(held, usable, pool_tokens, [1] * len(peers))
            elif policy == "throughput":
                fastest = fastest_layers(card, held, usable, [1e9 / max(1, n) for n in shares], pool_tokens, throughput)
                ranges = fastest[1] if fastest else None
            else:
                ranges = fit_layers(held, usable, pool_tokens, shares)
            if ranges is not None:
                return list(zip(peers, ranges, strict=True)), pool_tokens
    return None


def _fastest_ring(
    card: ModelCard,
    groups: Sequence[Group],
    policy: str,
    min_peers: int,
    context_limit: int,
    around: Surroundings,
) -> tuple[Ring, int] | None:
    """Returns the fastest ring of `rings_by_speed`, and its KV pool."""
    goal = _GOALS[policy]
    for pool_tokens in pools_to_try(context_limit):
        best: tuple[tuple[float, float], Ring] | None = None
        for peers in rings_by_speed(card, groups, min_peers):
            usable, speeds = [peer.usable_bytes for peer in peers], [peer.s_per_gb or 0.0 for peer in peers]
            held = [around.held_by(card, peer) for peer in peers]
            found = fastest_layers(card, held, usable, speeds, pool_tokens, goal)
            if found is None:
                continue
            score = goal(found[0].then(around.ring_hops([peer.peer_id for peer in peers])))
            if best is None or score < best[0]:
                best = (score, list(zip(peers, found[1], strict=True)))
        if best is not None:
            return best[1], pool_tokens
    return None


def _tighter(groups: Sequence[Group]) -> list[Group]:
    """The peers as if each had a little less memory: a ring that only just fits may not fit after the next start."""
    return [[replace(one, usable_bytes=int(STABLE_SHARE * one.usable_bytes)) for one in group] for group in groups]


def _kept_ring(
    card: ModelCard,
    groups: Sequence[Group],
    chosen: Ring,
    most_stages: int,
    policy: str,
    context_limit: int,
    around: Surroundings,
) -> tuple[Ring, int] | None:
    """Returns the ring that makes most use of files on disks, with its KV pool; None if none is as good as the chosen
    one.

    It holds the same context and has as many stages as the chosen one, or up to `most_stages`. With measured speeds and
    a policy that wants speed, it is at most NEARLY_AS_FAST times as slow; with even layers it has the same cuts.
    """
    goal = _GOALS.get(policy)
    limit = None if goal is None else _step_times(card, chosen, around)
    sizes = range(len(chosen), most_stages + 1)
    found = (one for size in sizes for one in kept_rings(card, groups, size, context_limit, around))
    for ring, pool_tokens in found:
        if around.even and [layers for _, layers in ring] != [layers for _, layers in chosen]:
            continue
        times = None if limit is None else _step_times(card, ring, around)
        if goal is None or limit is None or (times is not None and goal(times)[0] <= NEARLY_AS_FAST * goal(limit)[0]):
            return ring, pool_tokens
    return None


def _step_times(card: ModelCard, ring: Ring, around: Surroundings) -> StepTimes | None:
    """The times of a step of a ring; None unless each of its peers was measured."""
    if not all(peer.s_per_gb for peer, _ in ring):
        return None
    stages = [(peer.s_per_gb or 0.0) * card.step_bytes(layers.start, layers.stop) / 1e9 for peer, layers in ring]
    return StepTimes(sum(stages), max(stages)).then(around.ring_hops([peer.peer_id for peer, _ in ring]))


def _on_disk_of(
    candidates: Iterable[Candidate], around: Surroundings
) -> tuple[tuple[str, tuple[KeptLayers, ...]], ...]:
    """What the candidates have on their disks, as the plan carries it."""
    members = sorted({peer_id for one in candidates for peer_id in one.members})
    return tuple((peer_id, tuple(around.on_disk[peer_id])) for peer_id in members if around.on_disk.get(peer_id))


def _refusal(
    card: ModelCard,
    ordered: Sequence[Candidate],
    min_peers: int,
    context_limit: int,
    around: Surroundings,
    mixing: str,
) -> PlacementError:
    held = around.held(card, ordered[0].engine)
    weights = held.shard_bytes(0, card.num_layers)
    kv = held.kv_bytes(0, card.num_layers, context_limit, pool_sequences(held, context_limit))
    need = weights + kv + max(1, min_peers) * ENGINE_OVERHEAD_BYTES
    have = sum(candidate.share_bytes for candidate in ordered)
    listing = ", ".join(f"{_name(c)} {gigabytes(c.share_bytes)} ({c.engine})" for c in ordered)
    reason, remedy = _what_would_help(card, ordered, min_peers, context_limit, need - have, around, mixing)
    return PlacementError(
        f"{card.name} needs {gigabytes(need)} (weights {gigabytes(weights)}, KV for "
        f"{context_limit} tokens {gigabytes(kv)}, {gigabytes(ENGINE_OVERHEAD_BYTES)} per stage); "
        f"there is {gigabytes(have)}: {listing}. {remedy}",
        reason=reason,
        need_bytes=need,
        have=members_of(ordered),
        remedy=remedy,
    )


def _name(candidate: Candidate) -> str:
    """Names a candidate for people: `0a1b2c3d`, or a group `0a1b2c3d+4e5f6071`."""
    return "+".join(peer_id[:8] for peer_id in candidate.members)


def _what_would_help(
    card: ModelCard,
    ordered: Sequence[Candidate],
    min_peers: int,
    context_limit: int,
    missing: int,
    around: Surroundings,
    mixing: str,
) -> tuple[str, str]:
    """Returns (name of the obstacle, what to do about it)."""
    if obstacle := _mixing_in_the_way(card, ordered, min_peers, context_limit, around, mixing):
        return "mixing", obstacle
    context = context_limit // 2
    while context >= MIN_USEFUL_CONTEXT:
        if _fits(card, ordered, min_peers, context, around, mixing):
            return "memory", f"A context limit of {context} tokens would fit."
        context //= 2
    if missing > 0:
        return "memory", f"Free at least {gigabytes(missing)} or add a peer with that much and the model on disk."
    pieces = max(len(stage_stops([around.held(card, c.engine)] * 2)[0]) + 1 for c in ordered)
    if min_peers > pieces:
        return "cuts", f"The model can be cut into at most {counted(pieces, 'stage')}: lower min_peers."
    largest = max(stage_bytes(card, i, i + 1, context_limit) for i in range(card.num_layers))
    return (
        "layers",
        "The memory is enough in sum, but no cut into layers fits every peer"
        f" (the largest single layer with its KV takes {gigabytes(largest)}), or the peers run different engines:"
        " free memory on one of them or add a peer.",
    )


def _mixing_in_the_way(
    card: ModelCard,
    ordered: Sequence[Candidate],
    min_peers: int,
    context_limit: int,
    around: Surroundings,
    mixing: str,
) -> str:
    """Says what to do if only a rule about mixed rings prevents a ring; "" if something else prevents it."""
    if mixing == "always" and num_engines(ordered) == 1:
        return (
            f"A ring of several engines was asked for, but all peers run {ordered[0].engine}: "
            "start a peer with another engine."
        )
    if mixing == "always" and max(2, min_peers) > len(ordered):
        return "A ring of several engines needs more peers."
    if mixing == "never":
        fits = _fits(card, ordered, min_peers, context_limit, around, "auto")
        return "A ring of several engines would fit: allow it (mixed_rings: auto)." if fits else ""
    if around.unmixable and _fits(card, ordered, min_peers, context_limit, replace(around, unmixable={}), mixing):
        return "A ring of several engines would fit, but " + "; ".join(around.unmixable.values()) + "."
    return ""


def _fits(
    card: ModelCard, ordered: Sequence[Candidate], min_peers: int, context: int, around: Surroundings, mixing: str
) -> bool:
    groups = [group for groups in attempts(ordered, mixing, around) for group in groups]
    return _first_ring(card, groups, "memory", min_peers, context, around) is not None
