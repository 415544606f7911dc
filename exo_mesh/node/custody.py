"""The instances that this node owns: watched, adopted, given up, and ended; each has one owner and one plan.

What is to be done is decided in `ownership`, which is pure; here it is done. What each case is for is in
docs/placement.md under "Reserve, commit, and who is right".
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import replace

from exo_mesh.domain.device import PeerInfo
from exo_mesh.domain.plan import NO_BALLOT, Ballot, Plan, Seat
from exo_mesh.domain.rdma_links import broken_cable
from exo_mesh.domain.view import InstanceInfo, InstanceState, Record, RecordKey
from exo_mesh.errors import MeshError
from exo_mesh.membership.service import Membership
from exo_mesh.node.members import Members
from exo_mesh.node.ownership import Claim, Orphans, adopter, beaten, claim
from exo_mesh.node.reservations import Answer
from exo_mesh.node.ring_keeper import RingKeeper
from exo_mesh.node.stage_host import StageHost
from exo_mesh.node.supervisor import Limits
from exo_mesh.tasks import TaskOwner

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
        self._orphans = Orphans()
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
            if isinstance(instance, InstanceInfo) and self._membership.own.id in instance.plan.member_ids:
                self._ownerless[record.key.id] = instance
        self._membership.changed.beat()

    def keep(self, keeper: RingKeeper) -> None:
        """From now on this node owns the ring, instead of any other of that instance; it ends when a stage is lost."""
        stale = self.keepers.get(keeper.plan.instance_id)
        if stale is not None:
            self._start_end(stale)
        self.keepers[keeper.plan.instance_id] = keeper
        keeper.on_taken_back = lambda: self._say_taken_back(keeper)
        self._tasks.start(self._watch(keeper), f"watch {keeper.plan.instance_id}")

    def _say_taken_back(self, keeper: RingKeeper) -> None:
        """The ring is this node's by a higher ballot now."""
        instance_id = keeper.plan.instance_id
        self.note(instance_id, keeper.ballot)
        record = self._membership.view.get(RecordKey("instance", instance_id, self._membership.own.id))
        if self.keepers.get(instance_id) is keeper and record and isinstance(record.value, InstanceInfo):
            self._membership.put_instance(instance_id, replace(record.value, adopted=keeper.adopted))

    async def _watch(self, keeper: RingKeeper) -> None:
        """When a stage is lost the instance ends; the next request places it again."""
        instance_id = keeper.plan.instance_id
        error = await keeper.lost
        if self.keepers.get(instance_id) is not keeper:
            return
        del self.keepers[instance_id]
        failed = InstanceInfo(keeper.plan, InstanceState.FAILED, reason=str(error), adopted=keeper.adopted)
        self._membership.put_instance(instance_id, failed)
        await self.end(keeper)

    async def end(self, keeper: RingKeeper) -> None:
        """Release a ring that is in `keepers` no more, and take back this node's word of it.

        This goes on if whoever asked hangs up before all members have answered.
        """
        await asyncio.shield(self._start_end(keeper))

    def _start_end(self, keeper: RingKeeper) -> asyncio.Task[None]:
        return self._tasks.start(self._end(keeper), f"end {keeper.plan.instance_id}")

    async def _end(self, keeper: RingKeeper) -> None:
        instance_id = keeper.plan.instance_id
        self.note(instance_id, keeper.ballot)
        await keeper.release()
        record = self._membership.view.get(RecordKey("instance", instance_id, self._membership.own.id))
        # by now this node may have begun to place it again
        if record and isinstance(record.value, InstanceInfo) and record.value.ballot <= keeper.ballot:
            self._membership.put_instance(instance_id, None)

    # the order of instances: one owner and one plan each, wherever they came from

    async def _keep_order(self) -> None:
        """Each time the view changes: yield to those with more right, adopt what has lost its owner, end orphans."""
        while True:
            await self._yield()
            for instance in list(self._ownerless.values()):
                await self._adopt_if_due(instance)
            self._give_up_broken_groups()
            await self._end_orphans(asyncio.get_running_loop().time())
            await self._membership.changed.wait(ORDER_EVERY_S)

    def _give_up_broken_groups(self) -> None:
        """A cable was pulled: collectives over it would hang until somebody's patience ends."""
        peers = self._membership.view.peers()
        for keeper in self.keepers.values():
            for index, stage in enumerate(keeper.plan.stages):
                if stage.group is not None and (reason := broken_cable(stage.group, peers)):
                    keeper.give_up(index, reason)

    async def _yield(self) -> None:
        """Two sides of a split mesh may each have placed an instance; and who was given up may be there after all."""
        records = self._membership.view.records_of_instances()
        for instance_id, keeper in list(self.keepers.items()):
            verdict = claim(self._membership.own.id, keeper.plan, keeper.ballot, records)
            if verdict is Claim.KEEP or self.keepers.get(instance_id) is not keeper:
                continue
            del self.keepers[instance_id]
            if verdict is Claim.END:
                _log.info("%s of ballot %s gives way to a higher one", instance_id, keeper.ballot)
                self._start_end(keeper)
            else:
                _log.info("%s of ballot %s has another owner; leaving it to that", instance_id, keeper.ballot)
                self._membership.put_instance(instance_id, None)
                await keeper.close()

    async def _adopt_if_due(self, instance: InstanceInfo) -> None:
        """Adopt a ring without an owner if that falls to this node; a later round tries again."""
        plan = instance.plan
        runs_here = any(lease.plan == plan for lease in self._host.leases)
        known = [one for _, one in self._records_of(plan.instance_id)]
        if not runs_here or plan.instance_id in self.keepers or any(one.ballot >= instance.ballot for one in known):
            self._ownerless.pop(plan.instance_id, None)
            return
        if adopter(instance, self._membership.is_alive) != self._membership.own.id:
            return
        adopted = max(self.above(plan.instance_id), instance.ballot).next_for(self._membership.own.id)
        answers = await asyncio.gather(*(self._ask_to_adopt(plan, seat, adopted) for seat in plan.seats))
        for answer in answers:
            if not answer.granted:
                _log.info("%s cannot be adopted yet: %s", plan.instance_id, answer.reason)
                self.note(plan.instance_id, answer.beaten_by or NO_BALLOT)
                return
        self._ownerless.pop(plan.instance_id, None)
        self.note(plan.instance_id, adopted)
        if any(owner == self._membership.own.id for owner, _ in self._records_of(plan.instance_id)):
            return  # meanwhile this node has begun to place it, by a higher ballot
        _log.info("adopted %s by ballot %s", plan.instance_id, adopted)
        keeper = RingKeeper(plan, self._members, lambda done, total: None, self._runner_limits, adopted)
        self.keep(keeper)
        keeper.watch()
        self._membership.put_instance(plan.instance_id, replace(instance, adopted=adopted))

    async def _ask_to_adopt(self, plan: Plan, seat: Seat, adopted: Ballot) -> Answer:
        try:
            return await self._members.member(seat.peer_id).adopt(plan, seat.stage, adopted)
        except MeshError as exc:
            return Answer(False, 0, str(exc))

    async def _end_orphans(self, now: float) -> None:
        instances = [one for _, one in self._membership.view.records_of_instances()]
        for instance_id, ballot in self._orphans.due(self._host.stages(), instances, now):
            _log.warning("ending the stage of %s (ballot %s): nobody owns it", instance_id, ballot)
            await self._host.release(instance_id, ballot)

    async def free_beaten(self) -> None:
        """Before this node says that it lives after all: end the stages whose place others have taken."""
        instances = [one for _, one in self._membership.view.records_of_instances()]
        for instance_id, ballot in beaten(self._host.stages(), instances):
            _log.info("ending the stage of %s (ballot %s): a higher ballot is ready", instance_id, ballot)
            await self._host.release(instance_id, ballot)

    def _records_of(self, instance_id: str) -> list[tuple[str, InstanceInfo]]:
        records = self._membership.view.records_of_instances()
        return [(owner, one) for owner, one in records if one.plan.instance_id == instance_id]

    def above(self, instance_id: str) -> Ballot:
        """The highest ballot of an instance that this node knows of: a new plan needs a higher one."""
        in_view = [one.ballot for _, one in self._records_of(instance_id)]
        return max([self._highest.get(instance_id, NO_BALLOT), self._host.promised(instance_id), *in_view])

    def note(self, instance_id: str, ballot: Ballot) -> None:
        """There was such a ballot."""
        self._highest[instance_id] = max(ballot, self._highest.get(instance_id, NO_BALLOT))
