"""Layers that a user assigns to peers by hand: checked as strictly as the layers that placement assigns."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import msgspec

from exo_mesh.base.printable import counted
from exo_mesh.domain.fitting import stage_stops
from exo_mesh.domain.footprint import gigabytes, pools_to_pin, pools_to_try, roomiest_pool, stage_bytes
from exo_mesh.domain.grouping import WishedBackend
from exo_mesh.domain.model import ModelCard
from exo_mesh.domain.on_disk import Ring
from exo_mesh.domain.placement import make_plan, members_of, stage_parts
from exo_mesh.domain.plan import Ballot, Plan, PlanInputs
from exo_mesh.domain.ring_candidates import NOTHING_KNOWN, Candidate, Surroundings
from exo_mesh.errors import InputError, PlacementError

PINNED = "pinned"
"""The policy of a plan whose layers a user assigned by hand."""


class Pin(msgspec.Struct, frozen=True):
    """Layers `[start, stop)` that a user assigned to a peer. reserve_bytes, engine: None if left open. group: the peers
    of the tensor group that holds the layers, the leader first, if one is wanted; group_backend: how they connect."""

    peer_id: str
    start: int
    stop: int
    engine: str | None = None
    reserve_bytes: int | None = None
    group: tuple[str, ...] = ()
    group_backend: WishedBackend = "auto"


def solve_pinned(
    card: ModelCard,
    candidates: Sequence[Candidate],
    pins: Sequence[Pin],
    *,
    context_limit: int,
    instance_id: str,
    ballot: Ballot,
    around: Surroundings = NOTHING_KNOWN,
    mixing: str = "auto",
) -> Plan:
    """Makes the plan with the layers as pinned, in the order of the layers. Pins may mix engines.

    Raises InputError if the pins omit a layer or hold one twice, name a peer or an engine that cannot take part, or cut
    where the model must not be cut; PlacementError if the layers do not fit, need other memory than the pins state, or
    mix engines that must not be mixed.
    """
    pins = sorted(pins, key=lambda pin: (pin.start, pin.stop))
    _refuse_gaps(card, pins)
    by_id = {candidate.peer_id: candidate for candidate in candidates}
    for pin in pins:
        if pin.peer_id not in by_id:
            known = ", ".join(sorted(peer_id[:8] for peer_id in by_id)) or "none"
            raise _pins_refused(
                card, f"{pin.peer_id[:8]} is given layers but cannot take part (peers that can: {known})"
            )
    members = [_with_engine(card, by_id[pin.peer_id], pin.engine) for pin in pins]
    _refuse_mixing(card, members, around, mixing)
    _refuse_cuts(card, pins, members, around)
    ring = [(member, range(pin.start, pin.stop)) for member, pin in zip(members, pins, strict=True)]
    inputs = PlanInputs(members_of(members), PINNED, len(pins))
    fitting: dict[int, Plan] = {}
    for pool_tokens in pools_to_pin(context_limit):
        plan = make_plan(card, ring, context_limit, pool_tokens, instance_id, ballot, inputs, around)
        if all(stage.reserve_bytes <= member.usable_bytes for stage, member in zip(plan.stages, members, strict=True)):
            fitting[pool_tokens] = plan
    least = next((pool_tokens for pool_tokens in pools_to_try(context_limit) if pool_tokens in fitting), None)
    if least is None:
        raise _pins_do_not_fit(card, ring, context_limit, around)
    usual = fitting[roomiest_pool(stage_parts(card, ring, around), least)]
    as_stated = [plan for plan in (usual, *fitting.values()) if not _outdated(plan, pins)]
    if as_stated:
        return as_stated[0]
    raise _outdated(usual, pins)[0]


def _with_engine(card: ModelCard, member: Candidate, engine: str | None) -> Candidate:
    """Returns the peer with the engine that its pin names. Raises InputError if it cannot run the model with it."""
    if engine is None:
        return member
    able = (member.engine, *member.others)
    if engine not in able:
        raise _pins_refused(
            card, f"{member.peer_id[:8]} is pinned with {engine}, but can run the model only with {' or '.join(able)}"
        )
    return member.running(engine)


def _refuse_mixing(card: ModelCard, members: Sequence[Candidate], around: Surroundings, mixing: str) -> None:
    """Raises InputError or PlacementError if the members' engines break the rule `mixing`, or must not share a ring."""
    engines = {member.engine for member in members}
    listing = ", ".join(f"{member.peer_id[:8]} {member.engine}" for member in members)
    if len(engines) > 1 and mixing == "never":
        raise _pins_refused(card, f'mixed_rings is "never", so a ring has one engine, but these differ: {listing}')
    if len(engines) == 1 and mixing == "always":
        raise _pins_refused(
            card, f'mixed_rings is "always", so a ring needs several engines, but these are pinned: {listing}'
        )
    for one, other in combinations(members, 2):
        why = around.unmixable.get(frozenset((one.build, other.build)))
        if why is not None:
            remedy = "pin peers with one engine"
            raise PlacementError(
                f"{card.name} as pinned: {why}; {remedy}",
                reason="mixing",
                have=[(member.peer_id, member.usable_bytes) for member in members],
                remedy=remedy,
            )


def _refuse_cuts(card: ModelCard, pins: Sequence[Pin], members: Sequence[Candidate], around: Surroundings) -> None:
    """Raises InputError unless every boundary is legal for the engines on both sides."""
    legal = stage_stops([around.held(card, member.engine) for member in members])
    for pin, stops in zip(pins[1:], legal, strict=False):
        if pin.start not in stops:
            allowed = ", ".join(map(str, (0, *stops)))
            raise _pins_refused(card, f"no stage may begin at layer {pin.start}; legal are {allowed}")


def _outdated(plan: Plan, pins: Sequence[Pin]) -> list[PlacementError]:
    """An error for each pin that states its stage's memory, as previews do, where the stage needs another."""
    return [
        PlacementError(
            f"{stage.shard} at {stage.peer_id[:8]} would take {gigabytes(stage.reserve_bytes)} now, "
            f"not {gigabytes(pin.reserve_bytes or 0)}: memory has changed since the preview; ask for a new one",
            reason="outdated",
            remedy="ask for a new preview",
        )
        for stage, pin in zip(plan.stages, pins, strict=True)
        if pin.reserve_bytes not in (None, stage.reserve_bytes)
    ]


def _refuse_gaps(card: ModelCard, pins: Sequence[Pin]) -> None:
    """Raises InputError unless every layer is pinned exactly once and no peer is pinned twice."""
    expected = 0
    for pin in pins:
        given = f"{pin.peer_id[:8]} is given layers {pin.start} to {pin.stop - 1}"
        if not pin.start == expected < pin.stop:
            raise _pins_refused(card, f"{given}, but layer {expected} must come next")
        if pin.stop > card.num_layers:
            raise _pins_refused(card, f"{given}, but the last layer is {card.num_layers - 1}")
        expected = pin.stop
    if expected != card.num_layers:
        raise _pins_refused(card, f"layers {expected} to {card.num_layers - 1} are given to no peer")
    if len({pin.peer_id for pin in pins}) != len(pins):
        raise _pins_refused(card, "a peer is given layers twice, but can hold only one stage")


def _pins_refused(card: ModelCard, problem: str) -> InputError:
    remedy = "give each layer to exactly one of the peers that `GET /instance/previews` lists"
    return InputError(f"{card.name} ({counted(card.num_layers, 'layer')}): {problem}; {remedy}", param="pins")


def _pins_do_not_fit(card: ModelCard, ring: Ring, context_limit: int, around: Surroundings) -> PlacementError:
    needs = [
        stage_bytes(around.held_by(card, member), layers.start, layers.stop, context_limit) for member, layers in ring
    ]
    short = [
        f"{member.peer_id[:8]} needs {gigabytes(need)} for layers {layers.start} to {layers.stop - 1}, "
        f"usable are {gigabytes(member.usable_bytes)}"
        for (member, layers), need in zip(ring, needs, strict=True)
        if need > member.usable_bytes
    ]
    remedy = "pin fewer layers there, lower context_limit, or free memory"
    return PlacementError(
        f"{card.name} as pinned with a context of {context_limit} tokens: {'; '.join(short)}. {remedy}",
        reason="memory",
        need_bytes=sum(needs),
        have=[(member.peer_id, member.usable_bytes) for member, _ in ring],
        remedy=remedy,
    )
