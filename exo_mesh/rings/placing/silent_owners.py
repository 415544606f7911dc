"""Checks the stages of rings whose owner does not answer, so that a member can take such a ring over in time."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Collection

from exo_mesh.base.wakeups import next_wakeup
from exo_mesh.domain.plan import Ballot, Seat
from exo_mesh.domain.view import InstanceInfo, InstanceState
from exo_mesh.mesh.membership.service import Membership
from exo_mesh.rings.placing.liveness import SilentSeats
from exo_mesh.rings.placing.members import Members
from exo_mesh.rings.placing.ring_use import RingUse

LOOK_EVERY_S = 0.2
CALM_LOOK_EVERY_S = 0.5
"""How often this node checks for rings of other owners that do not answer: while there is such a ring, and else."""


class SilentOwners:
    """Follows the rings of silent owners that have a stage here. ownerless: the rings whose owner has left the mesh."""

    def __init__(
        self,
        membership: Membership,
        members: Members,
        use: RingUse,
        ownerless: Callable[[], Collection[InstanceInfo]],
    ) -> None:
        self._membership = membership
        self._members = members
        self._use = use
        self._ownerless = ownerless
        self._looks: dict[tuple[str, Ballot], SilentSeats] = {}

    def looks_at(self, instance: InstanceInfo) -> SilentSeats:
        """The checks of a ring's stages since their nodes stopped answering."""
        key = instance.plan.instance_id, instance.ballot
        if key not in self._looks:
            self._looks[key] = SilentSeats(instance.plan, self._members, functools.partial(self._addresses, instance))
        return self._looks[key]

    async def keep(self) -> None:
        """Check the stages of rings that may have to be taken over, before the mesh agrees that their owner is dead.
        Runs until cancelled."""
        while True:
            rings = self._rings()
            for key in [key for key in self._looks if key not in rings]:
                await self._looks.pop(key).close()
            for instance in rings.values():
                self.looks_at(instance).step({})
            if self._ownerless() and self._use.notice_awaited():
                self._membership.changed.beat()
            await next_wakeup(LOOK_EVERY_S if rings else CALM_LOOK_EVERY_S)

    async def close(self) -> None:
        """End the checks that run."""
        await asyncio.gather(*(looks.close() for looks in self._looks.values()))

    def _rings(self) -> dict[tuple[str, Ballot], InstanceInfo]:
        """Ready rings with a stage here whose owner is dead or does not answer this node."""
        own_id = self._membership.own.id
        silent = [
            one
            for owner, one in self._membership.view.records_of_instances()
            if own_id in one.plan.member_ids and self._membership.unanswered_s(owner) > 0
        ]
        rings = [one for one in (*silent, *self._ownerless()) if one.state is InstanceState.READY]
        return {(one.plan.instance_id, one.ballot): one for one in rings}

    def _addresses(self, instance: InstanceInfo, seat: Seat) -> list[str]:
        """Where the runner of a seat may be reached; [] for a rank that is not a leader, whose address is not
        published."""
        return [] if seat.rank else self._members.addresses(instance.endpoints[seat.stage], seat.peer_id)
