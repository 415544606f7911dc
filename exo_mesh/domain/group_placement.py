"""Decides whether placement joins peers to tensor groups, by request or because it needs fewer stages. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from exo_mesh.domain.grouping import GroupFacts, GroupWish, groupings, joined_as_named
from exo_mesh.domain.pinning import Pin
from exo_mesh.domain.plan import Plan
from exo_mesh.domain.ring_candidates import Candidate
from exo_mesh.domain.tensor_group import TensorGroup
from exo_mesh.errors import PlacementError

FAILED = "failed to become a tensor group"
"""Marks the reason of an instance whose peers run as stages although tensor groups were requested."""

Attempt = Callable[[Sequence[Candidate], int], Plan]
"""Makes a plan from (candidates, fewest stages). Raises PlacementError if there is none."""


def place_grouped(
    candidates: Sequence[Candidate], wish: GroupWish, facts: GroupFacts, min_peers: int, attempt: Attempt
) -> Plan:
    """Makes the plan with the requested groups, or with a group where that takes no more peers than a plain pipeline.

    Without a request, groups are tried only if the plain plan needs several stages. Raises PlacementError if there is
    no plan, or none with such groups; InputError for groups that make no sense.
    """
    if wish.is_forced:
        return _forced(candidates, wish, facts, min_peers, attempt)
    plain = attempt(candidates, min_peers)
    if len(plain.stages) == 1 or wish.size == 1 or not (facts.rdma or wish.backend == "ring"):
        return plain
    for grouping in groupings(candidates, wish, facts):
        try:
            plan = attempt(grouping, _stages(min_peers, grouping))
        except PlacementError:
            continue
        if groups_of(plan) and min_peers <= len(plan.member_ids) <= len(plain.stages):
            return plan
    return plain


def _forced(
    candidates: Sequence[Candidate], wish: GroupWish, facts: GroupFacts, min_peers: int, attempt: Attempt
) -> Plan:
    refusal: PlacementError | None = None
    for grouping in groupings(candidates, wish, facts):
        try:
            return attempt(grouping, _stages(min_peers, grouping))
        except PlacementError as exc:
            refusal = refusal or exc
    assert refusal is not None, "groupings never returns an empty list for a forced wish"
    raise refusal


def _stages(min_peers: int, grouping: Sequence[Candidate]) -> int:
    """The fewest stages that contain `min_peers` peers, given these groups."""
    return max(1, min_peers - sum(one.size - 1 for one in grouping))


def groups_of(plan: Plan) -> list[TensorGroup]:
    return [stage.group for stage in plan.stages if stage.group is not None]


def pinned_groups(
    candidates: Sequence[Candidate], pins: Sequence[Pin], facts: GroupFacts
) -> tuple[list[Candidate], list[Pin]]:
    """Joins the peers that a pin names as a group, and returns the candidates and the pins of the groups' leaders.

    Raises PlacementError or InputError if the peers cannot be a group.
    """
    grouped = list(candidates)
    for pin in pins:
        if pin.group:
            wish = GroupWish(members=(pin.group,), backend=pin.group_backend)
            grouped = joined_as_named(grouped, wish, facts, pin.engine)
    return grouped, [replace(pin, peer_id=pin.group[0]) if pin.group else pin for pin in pins]


def as_pipeline(wish: GroupWish, plan: Plan, min_peers: int) -> tuple[GroupWish, int]:
    """Returns the wish, and the fewest peers, that place the members of a plan as single stages instead of groups."""
    return GroupWish(size=1, backend=wish.backend), max(min_peers, len(plan.member_ids))
