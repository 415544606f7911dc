"""Decides which peer to leave out after a ring has lost a hop while both its ends are alive."""

from __future__ import annotations

import asyncio

from exo_mesh.domain.plan import Plan
from exo_mesh.rings.placing.members import Members

HOP_SUSPECT_S = 60.0
"""A hop that is lost while both its ends are alive is re-established once. If it is lost again within this time, the
peer behind it is left out: a firewall does not go away."""


class LostHops:
    """Remembers when each instance last lost a hop on this node's rings."""

    def __init__(self, members: Members) -> None:
        self._members = members
        self._lost_at: dict[str, float] = {}

    async def suspects(self, plan: Plan, hop: int | None, *, is_out_of_reach: bool = False) -> tuple[str, ...]:
        """The peers to leave out of the next plan, because the stage `hop` of this one lost its connection to the next
        stage (None: the ring was lost for another reason).

        One end of the hop, if the node before it cannot reach the node behind it either, or if the instance lost a hop
        a short time ago and this plan has re-established it. The end behind the hop unless that is this node.
        is_out_of_reach: the node before the hop has already reported that it cannot reach the other one.
        """
        if hop is None:
            return ()
        now = asyncio.get_running_loop().time()
        again = now - self._lost_at.get(plan.instance_id, -HOP_SUSPECT_S) < HOP_SUSPECT_S
        self._lost_at = {name: at for name, at in self._lost_at.items() if now - at < HOP_SUSPECT_S}
        self._lost_at[plan.instance_id] = now
        before, behind = (plan.peer_ids[(hop + n) % len(plan.stages)] for n in (0, 1))
        if not (again or is_out_of_reach) and await self._members.reaches(before, behind):
            return ()
        return (before if behind == self._members.own_id else behind,)
