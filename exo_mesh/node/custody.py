"""The instances that this node owns: watched, adopted, given up, and ended; each has one owner and one plan.

What each case is for is in docs/placement.md under "Reserve, commit, and who is right".
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import replace

from exo_mesh.domain.device import PeerInfo
from exo_mesh.domain.plan import NO_BALLOT, Ballot, Plan
from exo_mesh.domain.view import InstanceInfo, InstanceState, Record, RecordKey
from exo_mesh.errors import MeshError
from exo_mesh.membership.service import Membership
from exo_mesh.node.members import Members
from exo_mesh.node.reservations import Answer
from exo_mesh.node.ring_keeper import RingKeeper
from exo_mesh.node.stage_host import StageHost
from exo_mesh.node.supervisor import Limits
from exo_mesh.tasks import TaskOwner

ORPHAN_S = 10.0
"""A stage whose owner has died, and that nobody has adopted, is ended after this; the ring may be healthy meanwhile."""

RELEASE_S = 2.0
"""At a stop: how long the members may take to end their stages. What is left at a peer that does not answer ends there
when its owner has been gone for a while."""

ORDER_EVERY_S = 1.0
"""Also without a change of the view: an adoption that failed is tried again, and orphans grow older."""

_log = logging.getLogger(__name__)


class Custody:
    """`keepers` has the rings this node owns, by instance id."""

    def __init__(self, membership: Membership, members: Members, host: StageHost, runner_limits: Limits) -> None:
        self.keepers: dict[str, RingKeeper] = {}
        self._membership = membership
        self._members = members
        self._host = host
        self._runner_limits = runner_limits
        self._highest: dict[str, Ballot] = {}
        self._ownerless: dict[str, InstanceInfo] = {}
        self._tasks = TaskOwner()

    def start(self) -> None:
        self._tasks.start(self._keep_order(), "order of instances")

    async def stop(self) -> None:
        """End every instance this node owns, at all members that answer within RELEASE_S."""
        keepers = list(self.keepers.values())
        self.keepers.clear()
        await asyncio.gather(*(keeper.close() for keeper in keepers))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(RELEASE_S):
                await self._tasks.close()
                await asyncio.gather(*(keeper.release() for keeper in keepers))

    def owner_left(self, peer: PeerInfo, records: list[Record]) -> None:
        """A peer is gone: its ready rings wait for the lowest-id live member of each to adopt them."""
        for record in records:
            instance = record.value
            if (
                isinstance(instance, InstanceInfo)
                and instance.state is InstanceState.READY
                and self._membership.own.id in instance.plan.peer_ids
            ):
                self._ownerless[record.key.id] = instance
        self._membership.changed.beat()

    def keep(self, keeper: RingKeeper) -> None:
        """From now on this node owns the ring, and ends it when a stage is lost."""
        self.keepers[keeper.plan.instance_id] = keeper
        self._tasks.start(self._watch(keeper), f"watch {keeper.plan.instance_id}")

    async def _watch(self, keeper: RingKeeper) -> None:
        """When a stage is lost the instance ends; the next request places it again."""
        instance_id = keeper.plan.instance_id
        error = await keeper.lost
        if self.keepers.get(instance_id) is not keeper:
            return
        del self.keepers[instance_id]
        failed = InstanceInfo(keeper.plan, InstanceState.FAILED, reason=str(error), adopted=keeper.adopted)
        self._membership.put_instance(instance_id, failed)
        await self.end(instance_id, keeper)

    async def end(self, instance_id: str, keeper: RingKeeper) -> None:
        """Release a ring that is in `keepers` no more, and take back this node's word of it."""
        self.note(instance_id, keeper.ballot)
        await keeper.release()
        record = self._membership.view.get(RecordKey("instance", instance_id, self._membership.own.id))
        # by now this node may have begun to place it again
        if record and isinstance(record.value, InstanceInfo) and record.value.ballot <= keeper.ballot:
            self._membership.put_instance(instance_id, None)

    # the order of instances: one owner and one plan each, wherever they came from

    async def _keep_order(self) -> None:
        """Each time the view changes: give way to higher ballots, adopt what has lost its owner, end orphans."""
        orphan_since: dict[tuple[str, Ballot], float] = {}
        while True:
            self._give_way()
            for instance in list(self._ownerless.values()):
                await self._adopt_if_due(instance)
            await self._end_orphans(orphan_since)
            await self._membership.changed.wait(ORDER_EVERY_S)

    def _give_way(self) -> None:
        """Two sides of a split mesh may each have placed or adopted an instance: the lower ballot ends."""
        for owner, instance in self._membership.view.instances():
            instance_id = instance.plan.instance_id
            keeper = self.keepers.get(instance_id)
            beaten = keeper is not None and owner != self._membership.own.id and instance.ballot > keeper.ballot
            if keeper is not None and beaten and instance.state is InstanceState.READY:
                _log.info("%s of ballot %s gives way to ballot %s", instance_id, keeper.ballot, instance.ballot)
                del self.keepers[instance_id]
                self._tasks.start(self.end(instance_id, keeper), f"give way: {instance_id}")

    async def _adopt_if_due(self, instance: InstanceInfo) -> None:
        """Adopt a ring without an owner if it is whole and this is its lowest-id member; a later round tries again."""
        plan = instance.plan
        known = self._membership.view.plans_of(plan.instance_id)
        runs_here = any(lease.plan == plan for lease in self._host.leases)
        if not runs_here or any(ballot >= plan.ballot for ballot in known):
            del self._ownerless[plan.instance_id]
            return
        alive = [peer_id for peer_id in sorted(plan.peer_ids) if self._membership.is_alive(peer_id)]
        if len(alive) < len(plan.peer_ids) or alive[0] != self._membership.own.id:
            return
        adopted = max(self.above(plan.instance_id), instance.ballot).next_for(self._membership.own.id)
        answers = await asyncio.gather(*(self._ask_to_adopt(plan, index, adopted) for index in range(len(alive))))
        for answer in answers:
            if not answer.granted:
                _log.info("%s cannot be adopted yet: %s", plan.instance_id, answer.reason)
                self.note(plan.instance_id, answer.beaten_by or NO_BALLOT)
                return
        _log.info("adopted %s by ballot %s", plan.instance_id, adopted)
        self._ownerless.pop(plan.instance_id, None)
        self.note(plan.instance_id, adopted)
        keeper = RingKeeper(plan, self._members, lambda done, total: None, self._runner_limits, adopted)
        self.keep(keeper)
        keeper.watch()
        self._membership.put_instance(plan.instance_id, replace(instance, adopted=adopted))

    async def _ask_to_adopt(self, plan: Plan, index: int, adopted: Ballot) -> Answer:
        try:
            return await self._members.member(plan.stages[index].peer_id).adopt(plan, index, adopted)
        except MeshError as exc:
            return Answer(False, 0, str(exc))

    async def _end_orphans(self, since: dict[tuple[str, Ballot], float]) -> None:
        """End stages here whose plan no living owner has spoken of for ORPHAN_S; `since` lasts from round to round."""
        now = asyncio.get_running_loop().time()
        running = {(lease.plan.instance_id, lease.plan.ballot): lease for lease in self._host.leases}
        orphans = {
            key: lease
            for key, lease in running.items()
            if lease.committed and key[1] not in self._membership.view.plans_of(key[0])
        }
        for key in since.keys() - orphans.keys():
            del since[key]
        for key, lease in orphans.items():
            if now - since.setdefault(key, now) >= ORPHAN_S:
                _log.warning("the stage of %s (ballot %s) has no owner: ending it", key[0], lease.ballot)
                await self._host.release(key[0], lease.ballot)

    def above(self, instance_id: str) -> Ballot:
        """The highest ballot of an instance that this node knows of: a new plan needs a higher one."""
        in_view = [held.ballot for _, held in self._membership.view.instances()
                   if held.plan.instance_id == instance_id]  # fmt: skip
        return max([self._highest.get(instance_id, NO_BALLOT), self._host.promised(instance_id), *in_view])

    def note(self, instance_id: str, ballot: Ballot) -> None:
        """There was such a ballot."""
        self._highest[instance_id] = max(ballot, self._highest.get(instance_id, NO_BALLOT))
