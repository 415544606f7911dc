"""Who owns a ring after deaths and partitions, and which stages nobody owns any more. Pure.

An owner dies, or seems to: the lowest-id member adopts its ready rings, each by a higher ballot. So after a partition,
or a false verdict, an instance may have two owners: the one of the lower ballot yields. A stage that no record speaks
for, and whose reports nobody follows, is an orphan. A stage whose owner still follows it is none, whatever the
membership says of that owner: verdicts of the membership kill no healthy ring.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from enum import Enum

from exo_mesh.domain.plan import Ballot, Plan
from exo_mesh.domain.view import InstanceInfo, InstanceState

ORPHAN_S = 10.0
"""A stage that nobody owns is ended after this; its ring may be healthy meanwhile, and somebody may adopt it."""


def adopter(instance: InstanceInfo, is_alive: Callable[[str], bool]) -> str | None:
    """Who takes over a ring whose owner is gone: its lowest-id member, if all members live and it is ready."""
    if instance.state is not InstanceState.READY or not all(is_alive(one) for one in instance.plan.member_ids):
        return None
    return min(instance.plan.member_ids)


def surviving_heir(instance: InstanceInfo, is_alive: Callable[[str], bool]) -> str | None:
    """Who goes on with what is left of a ring whose owner and other members are gone: its lowest-id live member."""
    if instance.state is not InstanceState.READY:
        return None
    return min((peer_id for peer_id in instance.plan.member_ids if is_alive(peer_id)), default=None)


class Claim(Enum):
    """What an owner does about its ring, in the face of what others own."""

    KEEP = "keep"
    HAND_OVER = "hand over"  # the same plan has another owner: stop watching, the stages go on
    END = "end"  # a higher plan is ready: end the stages of this one


def claim(own_id: str, plan: Plan, ballot: Ballot, others: Iterable[tuple[str, InstanceInfo]]) -> Claim:
    """ballot: by which this node holds the plan. others: (owner, instance) of all records. The highest (ballot, owner)
    that is ready stands, as in View.instances."""
    ready = [
        (one.ballot, owner, one.plan.ballot)
        for owner, one in others
        if one.plan.instance_id == plan.instance_id and one.state is InstanceState.READY and owner != own_id
    ]
    highest = max(ready, default=None)
    if highest is None or highest[:2] < (ballot, own_id):
        return Claim.KEEP
    return Claim.HAND_OVER if highest[2] == plan.ballot else Claim.END


class Orphans:
    """Remembers since when each committed stage here has had no owner."""

    def __init__(self) -> None:
        self._since: dict[tuple[str, Ballot], float] = {}

    def due(
        self, stages: Mapping[tuple[str, Ballot], bool], instances: Iterable[InstanceInfo], now: float
    ) -> list[tuple[str, Ballot]]:
        """Stages to end. stages: (instance id, ballot in force) of each, and whether somebody follows its reports.

        Whose place others have taken is not adopted any more, so it ends at once: its requests wait for that.
        """
        known = list(instances)
        owned = {(one.plan.instance_id, one.ballot) for one in known}
        alone = [stage for stage, followed in stages.items() if not followed and stage not in owned]
        self._since = {stage: self._since.get(stage, now) for stage in alone}
        lost = {(name, ballot) for name, ballot, _ in beaten(alone, known)}
        return [stage for stage, since in self._since.items() if stage in lost or now - since >= ORPHAN_S]


def beaten(stages: Iterable[tuple[str, Ballot]], instances: Iterable[InstanceInfo]) -> list[tuple[str, Ballot, Ballot]]:
    """Stages whose instance is ready by a higher ballot, and that ballot: what a node must free before it says that it
    lives again."""
    highest: dict[str, Ballot] = {}
    for one in instances:
        if one.state is InstanceState.READY:
            instance_id = one.plan.instance_id
            highest[instance_id] = max(one.ballot, highest.get(instance_id, one.ballot))
    return [(name, ballot, highest[name]) for name, ballot in stages if highest.get(name, ballot) > ballot]
