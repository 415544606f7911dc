"""Does a stage live whose node cannot be asked? Its data plane knows; a silent node says nothing of its runner."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from exo_mesh.domain.plan import Plan
from exo_mesh.errors import MeshError
from exo_mesh.node.members import Members

CONNECT_S = 1.5
"""How long a runner may take to answer at its data port: a LAN needs 3 ms, Wi-Fi 100, and TLS on a slow board 500."""


async def is_refused(address: str) -> bool:
    """Does the machine answer that nobody listens at "host:port"? Then the process is gone; silence says less."""
    host, _, port = address.rpartition(":")
    try:
        async with asyncio.timeout(CONNECT_S):
            _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
    except ConnectionRefusedError:
        return True
    except (OSError, TimeoutError, ValueError):
        return False
    writer.close()
    return False


async def lives(plan: Plan, doors: Sequence[str], index: int, members: Members) -> bool:
    """Is a stage there, as far as anybody can tell whose word is not its node's?

    doors[i]: "host:port" at which this node reaches the data port of stage i. Its runner answers there itself, or the
    stage before it has its hop to it up.
    """
    door = doors[index] if doors else ""
    if door and await is_refused(door):
        return False
    answers = [_is_linked_to(plan, index, members)]
    if door:
        answers.append(members.connects(door, CONNECT_S))
    return any(await asyncio.gather(*answers))


async def _is_linked_to(plan: Plan, index: int, members: Members) -> bool:
    before = plan.stages[index - 1]
    if len(plan.stages) == 1:
        return False
    try:
        return (await members.member(before.peer_id).standing(plan.instance_id)).linked
    except MeshError:
        return False
