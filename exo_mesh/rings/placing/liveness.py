"""Checks whether a stage is alive when its node does not answer, by probing the stage's data port."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from enum import Enum

from exo_mesh.base.tasks import TaskOwner
from exo_mesh.domain.plan import Plan, Seat
from exo_mesh.errors import MeshError
from exo_mesh.rings.placing.members import Members

CONNECT_S = 1.5
"""How long a runner may take to accept a connection at its data port: a LAN needs 3 ms, Wi-Fi 100 ms, and TLS on a slow
board 500 ms."""

LOOK_AGAIN_S = 1.0
"""Pause between two checks of a stage whose node does not answer."""


class StageLook(Enum):
    """Result of checking the data port of a stage."""

    LIVES = "lives"
    SILENT = "silent"
    REFUSED = "refused"
    """The machine answers that nothing listens on the port, so the process has ended. Silence proves less."""


async def look_at(plan: Plan, seat: Seat, addresses: Sequence[str], members: Members) -> StageLook:
    """Check a stage, or one rank of it, by evidence that does not come from its node; takes at most CONNECT_S.

    addresses: "host:port" by which this node may reach the data port; empty for a rank that was brought up by another
    owner. The stage is alive if its runner answers there, or if the stage before it still has its connection to it; a
    rank is alive if its leader still runs. If the next stage is this node's own, only an answer that arrives here
    counts, because the frames of the ring take the same path.
    """
    lives = asyncio.create_task(_lives(plan, seat, addresses, members))
    try:
        if addresses and all(await asyncio.gather(*(members.is_refused(address, CONNECT_S) for address in addresses))):
            return StageLook.REFUSED
        return StageLook.LIVES if await lives else StageLook.SILENT
    finally:
        lives.cancel()
        await asyncio.gather(lives, return_exceptions=True)


async def _lives(plan: Plan, seat: Seat, addresses: Sequence[str], members: Members) -> bool:
    answers = [members.connects(address, CONNECT_S) for address in addresses]
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
        return (await members.member(before.peer_id).status(plan.instance_id, shows_hop=True)).linked
    except MeshError:
        return False


async def _is_led(plan: Plan, seat: Seat, members: Members) -> bool:
    """Whether the leader of this rank runs. A leader ends by itself when a rank is gone, because no frame gets
    through."""
    try:
        return not await members.member(plan.stages[seat.stage].peer_id).look(plan.instance_id, plan.ballot)
    except MeshError:
        return False


class SilentSeats:
    """Checks the stages of one ring whose nodes do not answer, starting with the first unanswered probe.

    A check of a frozen machine takes CONNECT_S. By the time the mesh declares the node dead, the result is known.
    """

    def __init__(self, plan: Plan, members: Members, addresses: Callable[[Seat], Sequence[str]]) -> None:
        self._plan = plan
        self._members = members
        self._addresses = addresses
        self._looks: dict[Seat, tuple[StageLook, int, float]] = {}
        self._under_way: dict[Seat, asyncio.Task[None]] = {}
        self._tasks = TaskOwner()

    def step(self, broken: Mapping[Seat, object]) -> None:
        """Start the checks that are due. Call this several times a second. broken: seats whose report stream is
        broken."""
        now = asyncio.get_running_loop().time()
        for seat in self._plan.seats:
            if seat not in broken and not self._is_silent(seat.peer_id):
                self._looks.pop(seat, None)
                continue
            looked_at = self._looks[seat][2] if seat in self._looks else now - LOOK_AGAIN_S
            if seat not in self._under_way and now >= looked_at + LOOK_AGAIN_S:
                self._start(seat)

    @property
    def is_checking(self) -> bool:
        """Whether a stage is silent, so that checks are due."""
        return bool(self._looks or self._under_way)

    def last(self, seat: Seat) -> tuple[StageLook, int] | None:
        """The last result and how often in a row it occurred; None if the node of the seat answers, or before the first
        check has ended."""
        held = self._looks.get(seat)
        return None if held is None else held[:2]

    async def result(self, seat: Seat) -> StageLook:
        """The last result; without one, waits for the running check, or for a new one."""
        if (last := self.last(seat)) is not None:
            return last[0]
        task = self._under_way.get(seat) or self._start(seat)
        await asyncio.wait((task,))
        return self._looks[seat][0] if seat in self._looks else StageLook.LIVES

    def heard(self, seat: Seat) -> None:
        """Record that the seat has reported, which discards earlier check results."""
        self._looks.pop(seat, None)

    async def close(self) -> None:
        await self._tasks.close()

    def _is_silent(self, peer_id: str) -> bool:
        is_here = peer_id == self._members.own_id
        return not is_here and (not self._members.is_alive(peer_id) or self._members.unanswered_s(peer_id) > 0)

    def _start(self, seat: Seat) -> asyncio.Task[None]:
        task = self._tasks.start(self._look(seat), f"look at {seat} of {self._plan.instance_id}")
        self._under_way[seat] = task
        return task

    async def _look(self, seat: Seat) -> None:
        try:
            look = await look_at(self._plan, seat, self._addresses(seat), self._members)
        finally:
            self._under_way.pop(seat, None)
        before, count, _ = self._looks.get(seat, (look, 0, 0.0))
        now = asyncio.get_running_loop().time()
        self._looks[seat] = look, count + 1 if look is before else 1, now
