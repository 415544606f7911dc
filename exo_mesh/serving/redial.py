"""After the stream from a driver breaks: asks the members whether the ring is healthy, and when to reconnect."""

from __future__ import annotations

import asyncio
from enum import Enum

from exo_mesh.clock import Clock
from exo_mesh.domain.plan import Plan
from exo_mesh.errors import MeshError, StageLostError, TransportError
from exo_mesh.instances.members import Members

REDIAL_S = 5.0
"""How long a ring that is not known to be lost is dialled again without a word from it: as long as a hop may be down
(LOST_AFTER_S of transport/ring_link.py), and longer than the membership needs to find another address or a death."""

REDIAL_FIRST_S, REDIAL_MOST_S = 0.05, 0.5

ALIVE_EVERY_S = 0.1
"""While a member is asked, the membership may give it up, and then its answer is not waited for."""

MAX_REDIALS = 10
"""Without a new token in between. A long prefill begins anew each time, so this is not for ever."""


class RingVerdict(Enum):
    """What the members of a ring say of it."""

    WELL = "well"
    LOST = "lost"
    UNKNOWN = "unknown"  # nobody says that it is lost, but the peer of the driver cannot be asked


async def look_at(plan: Plan, members: Members) -> tuple[RingVerdict, str]:
    """Ask every member whether its stage runs; the verdict and why.

    Lost: a member says that its stage does not run, or the membership has given that member up. A member that cannot
    be asked is asked at its other addresses, too.
    """
    answers = await asyncio.gather(*(_answer(plan, peer_id, members) for peer_id in plan.member_ids))
    for verdict, reason in answers:
        if verdict is RingVerdict.LOST:
            return verdict, reason
    return answers[plan.member_ids.index(plan.peer_ids[-1])]


async def _answer(plan: Plan, peer_id: str, members: Members) -> tuple[RingVerdict, str]:
    asked = asyncio.create_task(_ask(plan, peer_id, members))
    try:
        while members.is_alive(peer_id):
            if (await asyncio.wait((asked,), timeout=ALIVE_EVERY_S))[0]:
                return asked.result()
        return RingVerdict.LOST, f"peer {peer_id[:8]} is gone"
    finally:
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)


async def _ask(plan: Plan, peer_id: str, members: Members) -> tuple[RingVerdict, str]:
    try:
        reason = await members.member(peer_id).look(plan.instance_id, plan.ballot)
    except MeshError as exc:
        await members.try_other_ways(peer_id)
        return RingVerdict.UNKNOWN, str(exc)
    return (RingVerdict.LOST, f"peer {peer_id[:8]}: {reason}") if reason else (RingVerdict.WELL, "")


class Redial:
    """When one request may dial the driver of one ring again, each time that the stream from it breaks."""

    def __init__(self, plan: Plan, members: Members, clock: Clock) -> None:
        self._plan = plan
        self._members = members
        self._clock = clock
        self._give_up_at: float | None = None
        self._pause_s = REDIAL_FIRST_S
        self._tokens = 0
        self._in_vain = 0
        self._unheard = 0

    def door(self, endpoint: str) -> str:
        """Where to dial the driver, "host:port": at the best address of its peer, and after a dial to which nobody has
        answered at the next one. endpoint: as its peer reports it."""
        doors = self._members.doors(endpoint, self._plan.peer_ids[-1])
        return doors[self._unheard % len(doors)]

    def heard(self) -> None:
        """The driver has said something."""
        self._unheard = 0
        self._give_up_at = None
        self._pause_s = REDIAL_FIRST_S

    async def wait(self, tokens: int) -> None:
        """After a break: return once the driver is to be dialled again. tokens: how many the request has by now.

        Raises StageLostError if the ring is lost, or if nobody knows REDIAL_S after the last word from the driver, or
        from its node where that is longer ago; and
        TransportError if it is well and only cannot be reached from here: then it is not to be placed anew for that.
        """
        if tokens > self._tokens:
            self._tokens, self._in_vain = tokens, 0
        if self._give_up_at is None:
            silent_s = self._members.unanswered_s(self._plan.peer_ids[-1])
            self._give_up_at = self._clock() + max(0.0, REDIAL_S - silent_s)
        self._in_vain += 1
        self._unheard += 1
        while True:
            if (newer := self._members.newer_plan(self._plan)) is not None:
                raise StageLostError(f"{self._plan.instance_id} goes on by ballot {newer.ballot}")
            verdict, reason = await look_at(self._plan, self._members)
            if verdict is RingVerdict.LOST:
                raise StageLostError(f"{self._plan.instance_id} is lost: {reason}")
            if self._in_vain > MAX_REDIALS or self._clock() >= self._give_up_at:
                raise self._given_up(verdict, reason)
            await asyncio.sleep(self._pause_s)
            self._pause_s = min(2 * self._pause_s, REDIAL_MOST_S)
            if verdict is RingVerdict.WELL:
                return

    def _given_up(self, verdict: RingVerdict, reason: str) -> MeshError:
        if verdict is RingVerdict.WELL:
            return TransportError(
                f"the ring of {self._plan.instance_id} is well, but its last stage, at peer "
                f"{self._plan.peer_ids[-1][:8]}, cannot be reached from here: look at the firewall, or ask another peer"
            )
        return StageLostError(f"nobody knows of {self._plan.instance_id}: {reason}")
