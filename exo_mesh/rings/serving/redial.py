"""After the stream from a driver breaks: asks the members whether the ring is healthy, and when to reconnect."""

from __future__ import annotations

import asyncio
from enum import Enum

from exo_mesh.base.clock import Clock
from exo_mesh.domain.plan import Ballot, Plan
from exo_mesh.errors import MeshError, StageLostError, TransportError
from exo_mesh.rings.placing.members import Members

REDIAL_S = 5.0
"""Seconds for which a driver is dialled again while the state of its ring is unknown: as long as a hop may be down
(LOST_AFTER_S of wire/ring_link.py), and longer than the membership needs to find another address or a death."""

WELL_S = 60.0
"""Seconds for which a driver that this node has reached before is dialled again while its members report a healthy
ring: a machine that is busy with other programs may take this long to answer a new connection."""

REDIAL_FIRST_S, REDIAL_MOST_S = 0.05, 0.5

REDIAL_WELL_S = 2.0
"""Longest pause between two dials after REDIAL_S: more dials would add work to an overloaded machine."""

ALIVE_EVERY_S = 0.1
"""Seconds between checks whether the membership has given up a member; its answer is then not waited for."""

MAX_REDIALS = 10
"""How often a driver may answer and disconnect without a new token: each time a long prefill starts again."""

MAX_REACHED = 256
"""Rings whose driver this node has reached; the oldest are forgotten."""


class ReachedDrivers:
    """Remembers which drivers have answered this node: if such a driver stops answering, no firewall is the cause."""

    def __init__(self) -> None:
        self._rings: dict[tuple[str, Ballot], None] = {}

    def note(self, plan: Plan) -> None:
        self._rings[plan.instance_id, plan.ballot] = None
        while len(self._rings) > MAX_REACHED:
            del self._rings[next(iter(self._rings))]

    def __contains__(self, plan: Plan) -> bool:
        return (plan.instance_id, plan.ballot) in self._rings


class RingVerdict(Enum):
    """The state of a ring, by its members' answers."""

    WELL = "well"
    LOST = "lost"
    UNKNOWN = "unknown"  # no member reports a loss, but the peer of the driver does not answer


async def look_at(plan: Plan, members: Members) -> tuple[RingVerdict, str]:
    """Ask every member whether its stage runs; returns the verdict and the reason.

    LOST: a member reports that its stage does not run, or the membership has given that member up. A member that does
    not answer is tried at its other addresses, too.
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
    """Decides when one request may dial the driver of one ring again, each time that the stream from it breaks."""

    def __init__(self, plan: Plan, members: Members, clock: Clock, reached: ReachedDrivers | None = None) -> None:
        self._plan = plan
        self._members = members
        self._clock = clock
        self._reached = ReachedDrivers() if reached is None else reached
        self._silent_at: float | None = None
        self._is_answered = False
        self._pause_s = REDIAL_FIRST_S
        self._tokens = 0
        self._in_vain = 0
        self._dialled = ""
        self._unheard: dict[str, int] = {}
        """Dials without an answer since the driver was last heard, by address."""

    def address(self, endpoint: str) -> str:
        """The driver's address, "host:port": among the addresses with the fewest unanswered dials, the best one for its
        peer. So the address that the membership has just changed to comes first. endpoint: as its peer reports it."""
        addresses = self._members.addresses(endpoint, self._plan.peer_ids[-1])
        self._dialled = min(addresses, key=lambda address: self._unheard.get(address, 0))
        return self._dialled

    def heard(self) -> None:
        """Note that the driver has sent something."""
        if not self._is_answered:
            self._is_answered = True
            self._reached.note(self._plan)
        self._unheard.clear()
        self._silent_at = None
        self._pause_s = REDIAL_FIRST_S

    async def wait(self, tokens: int) -> None:
        """Return after a break once the driver should be dialled again. tokens: how many the request has so far.

        Raises StageLostError if the ring is lost, or if its state is unknown for REDIAL_S after the last message from
        the driver, or from its node if that is longer ago. Raises TransportError if the ring is healthy and its driver
        does not answer this node: for REDIAL_S, or for WELL_S if it has answered this node before. The ring is not
        placed again for that.
        """
        if tokens > self._tokens:
            self._tokens, self._in_vain = tokens, 0
        if self._silent_at is None:
            self._silent_at = self._clock() - self._members.unanswered_s(self._plan.peer_ids[-1])
        self._in_vain += self._is_answered
        self._is_answered = False
        self._unheard[self._dialled] = self._unheard.get(self._dialled, 0) + 1
        while True:
            if (newer := self._members.newer_plan(self._plan)) is not None:
                raise StageLostError(f"{self._plan.instance_id} continues under ballot {newer.ballot}")
            verdict, reason = await look_at(self._plan, self._members)
            if verdict is RingVerdict.LOST:
                raise StageLostError(f"{self._plan.instance_id} is lost: {reason}")
            silent_s = self._clock() - self._silent_at
            is_patient = verdict is RingVerdict.WELL and self._plan in self._reached
            if self._in_vain > MAX_REDIALS or silent_s >= (WELL_S if is_patient else REDIAL_S):
                raise self._given_up(verdict, reason, silent_s)
            await asyncio.sleep(self._pause_s)
            self._pause_s = min(2 * self._pause_s, REDIAL_MOST_S if silent_s < REDIAL_S else REDIAL_WELL_S)
            if verdict is RingVerdict.WELL:
                return

    def _given_up(self, verdict: RingVerdict, reason: str, silent_s: float) -> MeshError:
        if verdict is not RingVerdict.WELL:
            return StageLostError(f"no peer knows the state of {self._plan.instance_id}: {reason}")
        driver = f"its last stage, on peer {self._plan.peer_ids[-1][:8]},"
        what = f"the ring of {self._plan.instance_id} is healthy, but {driver}"
        if self._plan not in self._reached:
            return TransportError(
                f"{what} has never answered this node: check the firewalls, or send the request to another peer"
            )
        if self._in_vain > MAX_REDIALS:
            return TransportError(
                f"{what} broke off {self._in_vain} times without a new token: its machine may be overloaded; try again"
            )
        return TransportError(
            f"{what} has not answered for {silent_s:.0f} s: its machine or the network may be overloaded; "
            "try again, or send the request to another peer"
        )
