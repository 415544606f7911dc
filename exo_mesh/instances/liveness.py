"""Checks whether a stage is alive when its node does not answer, by probing the stage's data port."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from exo_mesh.domain.plan import Plan, Seat
from exo_mesh.errors import MeshError
from exo_mesh.instances.members import Members

CONNECT_S = 1.5
"""How long a runner may take to answer at its data port: a LAN needs 3 ms, Wi-Fi 100, and TLS on a slow board 500."""


async def is_refused(doors: Sequence[str], members: Members) -> bool:
    """Does the machine answer, at each "host:port" by which it is reached, that nobody listens there? Then the process
    is gone; silence says less."""
    return bool(doors) and all(await asyncio.gather(*(members.is_refused(door, CONNECT_S) for door in doors)))


async def lives(plan: Plan, seat: Seat, doors: Sequence[str], members: Members) -> bool:
    """Is a stage there, or a rank of it, as far as anybody can tell whose word is not its node's?

    doors: "host:port" by which this node may reach its data port; none of a rank whose owner did not bring it up. Its
    runner answers there itself, or the stage before it has its hop to it up; of a rank its leader goes on. Where the
    next stage is this node's own, only an answer that arrives here counts: the frames of the ring go the same way.
    """
    if await is_refused(doors, members):
        return False
    answers = [members.connects(door, CONNECT_S) for door in doors]
    if seat.rank:
        answers.append(_is_led(plan, seat, members))
    elif plan.stages[(seat.stage + 1) % len(plan.stages)].peer_id != members.own_id:
        answers.append(_is_linked_to(plan, seat.stage, members))
    return any(await asyncio.gather(*answers))


async def _is_linked_to(plan: Plan, index: int, members: Members) -> bool:
    before = plan.stages[index - 1]
    if len(plan.stages) == 1:
        return False
    try:
        return (await members.member(before.peer_id).standing(plan.instance_id)).linked
    except MeshError:
        return False


async def _is_led(plan: Plan, seat: Seat, members: Members) -> bool:
    """Does the leader of this rank run? It ends by itself when a rank is gone, for no frame gets through then."""
    try:
        return not await members.member(plan.stages[seat.stage].peer_id).look(plan.instance_id, plan.ballot)
    except MeshError:
        return False
