"""Watches, adopts, recovers, hands over and ends the instances that this node owns; each has one owner and one plan.

`ownership`, which is pure, makes the decisions; this module carries them out. docs/how-it-works/placement.md explains
each case under "Reserve, commit, and who is right".
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Collection, Coroutine, Mapping
from typing import Any

from msgspec.structs import replace

from exo_mesh.base.printable import counted
from exo_mesh.base.tasks import TaskOwner
from exo_mesh.base.wakeups import until_wakeup
from exo_mesh.domain.device import PeerInfo
from exo_mesh.domain.plan import NO_BALLOT, Ballot, Plan, Seat
from exo_mesh.domain.rdma_links import broken_cable
from exo_mesh.domain.runner_limits import RunnerLimits
from exo_mesh.domain.stage import ReserveAnswer
from exo_mesh.domain.view import InstanceInfo, InstanceState, Record
from exo_mesh.errors import MeshError
from exo_mesh.mesh.membership.service import Membership
from exo_mesh.rings.placing.liveness import StageLook
from exo_mesh.rings.placing.members import Members
from exo_mesh.rings.placing.ownership import Claim, Orphans, adopter, beaten, claim, surviving_heir
from exo_mesh.rings.placing.recoverer import Recoverer
from exo_mesh.rings.placing.refused_stages import BallotBeatenError
from exo_mesh.rings.placing.ring_history import RingHistory
from exo_mesh.rings.placing.ring_monitor import RingMonitor, tell_nobody
from exo_mesh.rings.placing.ring_use import RingUse
from exo_mesh.rings.placing.silent_owners import SilentOwners
from exo_mesh.rings.placing.unloading import UnusedRings

RELEASE_S = 2.0
"""At a stop: how long the members may take to end their stages. A stage on a peer that does not answer ends there by
itself after its owner has been gone for a while."""

ORDER_EVERY_S = 1.0
"""Longest pause between two rounds: without a change of the view, failed adoptions are retried and orphans grow
older."""

_log = logging.getLogger(__name__)


class OwnedRings:
    """Manages the rings that this node owns; `monitors` holds them by instance id."""

    def __init__(
        self,
        membership: Membership,
        members: Members,
        recoverer: Recoverer,
        runner_limits: RunnerLimits,
        use: RingUse,
        idle_s: float = 0.0,
    ) -> None:
        """idle_s: how long a ring of this node may be idle before it is unloaded; 0: for ever."""
        self.monitors: dict[str, RingMonitor] = {}
        self.known = RingHistory(membership, members)
        self.use = use
        self.unused = UnusedRings(membership, self.monitors, idle_s)
        self._recoverer = recoverer
        self._recoveries: dict[str, tuple[Ballot, asyncio.Task[None]]] = {}
        self._ends: dict[str, asyncio.Task[None]] = {}
        self._membership = membership
        self._members = members
        self._runner_limits = runner_limits
        self._ownerless: dict[str, InstanceInfo] = {}
        self._orphans = Orphans()
        self._silent = SilentOwners(membership, members, self.use, self._ownerless.values)
        self._tasks = TaskOwner()

    def start(self) -> None:
        self._tasks.keep(self._keep_order, "ownership of instances")
        self._tasks.keep(self._silent.keep, "silent owners")

    @property
    def ended_tasks(self) -> Mapping[str, str]:
        """Long-lived tasks that ended because of a bug; see TaskOwner."""
        return self._tasks.ended

    async def stop(self) -> None:
        """Leave the rings that this node owns to their other members, which continue without it. Rings that it was
        recovering or ending are ended at all members that answer within RELEASE_S."""
        monitors = list(self.monitors.values())
        self.monitors.clear()
        await asyncio.gather(*(monitor.close() for monitor in monitors))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(RELEASE_S):
                await self._tasks.close()
        await self._members.close()
        await self._silent.close()

    def owner_left(self, peer: PeerInfo, records: list[Record]) -> None:
        """Remember the rings of a peer that is gone, so that the lowest-id live member of each adopts it."""
        for record in records:
            instance = record.value
            if not isinstance(instance, InstanceInfo):
                continue
            if self._membership.own.id in instance.plan.member_ids:
                self._ownerless[record.key.id] = instance
            if instance.state is InstanceState.READY:
                self.known.note_lapsed(instance)
        self._membership.changed.beat()

    def keep(self, monitor: RingMonitor) -> None:
        """Watch a ring that this node owns from now on, instead of any other ring of that instance; end it when a stage
        is lost."""
        stale = self.monitors.get(monitor.plan.instance_id)
        if stale is not None:
            self._start_end(stale)
        self.monitors[monitor.plan.instance_id] = monitor
        self._tasks.start(self._watch(monitor), f"watch {monitor.plan.instance_id}")

    def _publish_taken_back(self, monitor: RingMonitor) -> None:
        """Publish the higher ballot by which this node took its ring back."""
        instance_id = monitor.plan.instance_id
        self.known.note(instance_id, monitor.ballot)
        record = self.known.own_record(instance_id)
        if self.monitors.get(instance_id) is monitor and record is not None:
            self._membership.put_instance(instance_id, replace(record, adopted=monitor.adopted))

    async def _watch(self, monitor: RingMonitor) -> None:
        """Wait until a stage is lost, then recover the ring without that stage. If that fails the ring ends, and the
        next request places the model again."""
        instance_id = monitor.plan.instance_id
        while (error := await monitor.lost_or_taken_back()) is None:
            self._publish_taken_back(monitor)
        if self.monitors.get(instance_id) is not monitor:
            return
        del self.monitors[instance_id]
        self._start_recovery(instance_id, monitor.ballot, self._go_on(monitor, error))

    def _start_recovery(self, instance_id: str, ballot: Ballot, work: Coroutine[Any, Any, None]) -> None:
        """Start a recovery task. ballot: of the lost ring."""
        task = self._tasks.start(work, f"recover {instance_id}")
        self._recoveries[instance_id] = ballot, task

        def ended(task: asyncio.Task[None]) -> None:
            if self._recoveries.get(instance_id) == (ballot, task):
                del self._recoveries[instance_id]

        task.add_done_callback(ended)

    async def _go_on(self, monitor: RingMonitor, error: MeshError) -> None:
        instance_id = monitor.plan.instance_id
        await monitor.close()
        suspects = await self._recoverer.lost_hops.suspects(
            monitor.plan, monitor.hop_lost, is_out_of_reach=monitor.is_next_out_of_reach
        )
        is_wanted = not self.known.is_deleted(instance_id, monitor.ballot)
        cause = "stage_lost" if monitor.hop_lost is None else "hop_lost"
        if (
            is_wanted
            and self._members.newer_plan(monitor.plan) is None
            and await self._recover(monitor.plan, monitor.ballot, monitor.trouble_s, cause, suspects)
        ):
            return
        failed = InstanceInfo(monitor.plan, InstanceState.FAILED, reason=str(error), adopted=monitor.adopted)
        self._membership.put_instance(instance_id, failed)
        await self.end(monitor)

    async def _recover(
        self, plan: Plan, owned: Ballot, trouble_s: float, cause: str, suspects: Collection[str] = ()
    ) -> bool:
        """Recover the rest of a ring that this node owns by the ballot `owned`; False if that fails. cause: of the
        loss, for the metrics."""
        instance_id = plan.instance_id
        is_auto = self.known.is_auto(instance_id)
        try:
            monitor, instance = await self._recoverer.recover(
                plan,
                self.known.above(instance_id),
                tell_nobody,
                trouble_s=trouble_s,
                owned=owned,
                suspects=suspects,
                cause=cause,
            )
        except BallotBeatenError as exc:
            self.known.note(instance_id, exc.ballot)
            _log.info("%s was left to another peer: %s", instance_id, exc)
            return False
        except MeshError as exc:
            _log.warning("%s could not be recovered: %s", instance_id, exc)
            return False
        self.take(monitor, replace(instance, is_auto=is_auto))
        return True

    def unload(self, instance_id: str) -> None:
        """End an instance that this node owns and nobody uses, without a deletion fence: a later request may place it
        again."""
        monitor = self.monitors.pop(instance_id, None)
        if monitor is not None:
            self._start_end(monitor, for_good=True)

    def take(self, monitor: RingMonitor, instance: InstanceInfo) -> None:
        """Become the owner of a ring that is ready: watch it and publish it."""
        instance_id = instance.plan.instance_id
        self.known.forget_lapsed(instance_id)
        self._ownerless.pop(instance_id, None)
        self.known.note(instance_id, instance.ballot)
        self.keep(monitor)
        self._membership.put_instance(instance_id, instance)

    async def stop_recovery(self, instance_id: str) -> bool:
        """Cancel the recovery of an instance that is to be ended; True if it was being recovered."""
        _, task = self._recoveries.pop(instance_id, (NO_BALLOT, None))
        if task is None:
            return False
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        self._membership.put_instance(instance_id, None)
        return True

    def is_recovering(self, instance_id: str) -> bool:
        """Whether this node is recovering this instance now."""
        return instance_id in self._recoveries

    def is_awaited(self, instance_id: str) -> bool:
        """Whether a peer is expected to recover this ring soon, or to report that it is lost."""
        if self.is_recovering(instance_id):
            return True
        records = [one for _, one in self.known.records_of(instance_id)]
        if records:
            return max(records, key=lambda one: one.ballot).state is InstanceState.READY
        lapsed = self.known.lapsed(instance_id)
        return lapsed is not None and any(self._membership.is_alive(peer_id) for peer_id in lapsed.plan.member_ids)

    def awaits_model(self, model: str) -> bool:
        """Whether some ring of a model is expected to be recovered soon."""
        mine = [name for name, one in self.monitors.items() if one.plan.model == model]
        return any(map(self.is_awaited, (*self.known.lapsed_of_model(model), *mine)))

    async def end(self, monitor: RingMonitor, *, for_good: bool = False) -> None:
        """Release a ring that is no longer in `monitors` and withdraw this node's record of it. for_good: see
        RingMonitor.release.

        Continues if the caller is cancelled before all members have answered.
        """
        await asyncio.shield(self._start_end(monitor, for_good=for_good))

    async def wait_for_end(self, instance_id: str) -> bool:
        """Wait until a ring that ends now has ended; False if none does."""
        task = self._ends.get(instance_id)
        if task is not None:
            await asyncio.wait((task,))  # a release has a deadline of its own
        return task is not None

    def _start_end(self, monitor: RingMonitor, *, for_good: bool = False) -> asyncio.Task[None]:
        instance_id = monitor.plan.instance_id
        task = self._ends[instance_id] = self._tasks.start(self._end(monitor, for_good), f"end {instance_id}")
        task.add_done_callback(
            lambda done: self._ends.pop(instance_id) if self._ends.get(instance_id) is done else None
        )
        return task

    async def _end(self, monitor: RingMonitor, for_good: bool) -> None:
        instance_id = monitor.plan.instance_id
        self.known.note(instance_id, monitor.ballot)
        await monitor.release(for_good=for_good)
        self.known.note(instance_id, monitor.ballot)
        record = self.known.own_record(instance_id)
        # By now this node may have started to place the instance again, by a higher ballot.
        if record is not None and record.ballot <= monitor.ballot:
            self._membership.put_instance(instance_id, None)

    # Ownership: each instance has one owner and one plan, wherever its records came from.

    async def _keep_order(self) -> None:
        """Each time the view changes: yield to owners with precedence, adopt rings without an owner, end orphans."""
        while True:
            await self._end_deleted()
            await self._yield()
            for instance in list(self._ownerless.values()):
                await self._adopt_if_due(instance)
            self._give_up_broken_groups()
            for instance_id in self.unused.due(asyncio.get_running_loop().time()):
                self.unload(instance_id)
            await self._end_orphans(asyncio.get_running_loop().time())
            await self._membership.changed.wait(until_wakeup(ORDER_EVERY_S))

    async def _end_deleted(self) -> None:
        """End what was deleted, regardless of who placed, adopted or recovers it: stages on this node and rings it
        owns."""
        for instance_id, monitor in list(self.monitors.items()):
            if self.known.is_deleted(instance_id, monitor.ballot) and self.monitors.get(instance_id) is monitor:
                del self.monitors[instance_id]
                self._start_end(monitor, for_good=True)
        for instance_id, instance in list(self._ownerless.items()):
            if self.known.is_deleted(instance_id, instance.ballot):
                del self._ownerless[instance_id]
        for instance_id, (ballot, _) in list(self._recoveries.items()):
            if self.known.is_deleted(instance_id, ballot):
                await self.stop_recovery(instance_id)
        for instance_id, ballot in self._members.leased_here():
            if self.known.is_deleted(instance_id, ballot):
                await self._members.release_here(instance_id, self._membership.fences.ballot(instance_id))

    def _give_up_broken_groups(self) -> None:
        """Give up rings whose tensor group lost a cable: collectives over it would hang until a timeout."""
        peers = self._membership.view.peers()
        for monitor in self.monitors.values():
            for index, stage in enumerate(monitor.plan.stages):
                if stage.group is not None and (reason := broken_cable(stage.group, peers)):
                    monitor.give_up(index, reason)

    async def _yield(self) -> None:
        """Hand over or end rings that another owner has by a higher ballot: both sides of a split mesh may have placed
        an instance, and a peer declared dead may be alive."""
        records = self._membership.view.records_of_instances()
        for instance_id, monitor in list(self.monitors.items()):
            verdict = claim(self._membership.own.id, monitor.plan, monitor.ballot, records)
            if verdict is Claim.KEEP or self.monitors.get(instance_id) is not monitor:
                continue
            del self.monitors[instance_id]
            if verdict is Claim.END:
                _log.info("%s of ballot %s ended: a higher ballot is ready", instance_id, monitor.ballot)
                self._start_end(monitor)
            else:
                _log.info("%s of ballot %s handed over to its new owner", instance_id, monitor.ballot)
                self._membership.put_instance(instance_id, None)
                await monitor.close()

    async def _adopt_if_due(self, instance: InstanceInfo) -> None:
        """Adopt a ring without an owner if this node is its heir; a failed adoption is retried in a later round."""
        plan = instance.plan
        runs_here = self._members.runs_here(plan)
        known = [one for _, one in self.known.records_of(plan.instance_id)]
        if not runs_here or plan.instance_id in self.monitors or any(one.ballot >= instance.ballot for one in known):
            self._ownerless.pop(plan.instance_id, None)
            return
        heir = adopter(instance, self._membership.is_alive)
        if heir is None:
            await self._recover_if_due(instance)
        if heir != self._membership.own.id:
            return
        adopted = max(self.known.above(plan.instance_id), instance.ballot).next_for(self._membership.own.id)
        answers = await asyncio.gather(*(self._ask_to_adopt(plan, seat, adopted) for seat in plan.seats))
        for answer in answers:
            if not answer.granted:
                _log.info("%s cannot be adopted yet, retrying: %s", plan.instance_id, answer.reason)
                self.known.note(plan.instance_id, answer.beaten_by or NO_BALLOT)
                return
        self._ownerless.pop(plan.instance_id, None)
        self.known.note(plan.instance_id, adopted)
        if any(owner == self._membership.own.id for owner, _ in self.known.records_of(plan.instance_id)):
            return  # this node is already placing it by a higher ballot
        _log.info("adopted %s by ballot %s", plan.instance_id, adopted)
        monitor = RingMonitor(
            plan, self._members, self.use, tell_nobody, self._runner_limits, adopted, endpoints=instance.endpoints
        )
        self.known.forget_lapsed(plan.instance_id)
        self.keep(monitor)
        monitor.watch()
        self._membership.put_instance(plan.instance_id, replace(instance, adopted=adopted))

    async def _recover_if_due(self, instance: InstanceInfo) -> None:
        """Recover a ring that lost its owner and other members, if this node is its heir and the lost stages are really
        gone, not only unreachable through their nodes."""
        plan, instance_id = instance.plan, instance.plan.instance_id
        is_heir = surviving_heir(instance, self._membership.is_alive) == self._membership.own.id
        if not is_heir or instance_id in self._recoveries:
            return
        gone = [seat for seat in plan.seats if not self._membership.is_alive(seat.peer_id)]
        looks = await asyncio.gather(*map(self._silent.looks_at(instance).result, gone))
        if StageLook.LIVES in looks and not self._is_idle(instance):
            return
        _log.info("recovering %s, which lost its owner and %s", instance_id, counted(len(gone), "seat"))
        self._start_recovery(instance_id, instance.ballot, self._take_over(plan, instance.ballot))

    def _is_idle(self, instance: InstanceInfo) -> bool:
        """See RingUse.is_idle."""
        return self.use.is_idle(instance, self.known.lapsed_for_s(instance.plan.instance_id))

    async def _take_over(self, plan: Plan, owned: Ballot) -> None:
        trouble_s = self.known.lapsed_for_s(plan.instance_id)
        if not await self._recover(plan, owned, trouble_s, "owner_lost"):
            self._ownerless.pop(plan.instance_id, None)
            self._membership.put_instance(plan.instance_id, None)

    async def _ask_to_adopt(self, plan: Plan, seat: Seat, adopted: Ballot) -> ReserveAnswer:
        try:
            return await self._members.member(seat.peer_id).adopt(plan, seat.stage, adopted)
        except MeshError as exc:
            return ReserveAnswer(False, 0, str(exc))

    async def _end_orphans(self, now: float) -> None:
        instances = [one for _, one in self._membership.view.records_of_instances()]
        for instance_id, ballot in self._orphans.due(self._members.stages_here(), instances, now):
            _log.warning("ending the stage of %s (ballot %s): it has no owner", instance_id, ballot)
            await self._members.release_here(instance_id, ballot)

    async def free_beaten(self) -> None:
        """End the deleted stages, and the stages of instances that are ready under a higher ballot, before this node
        refutes its death."""
        await self._end_deleted()
        instances = [one for _, one in self._membership.view.records_of_instances()]
        for instance_id, ballot, higher in beaten(self._members.stages_here(), instances):
            _log.info("ending the stage of %s (ballot %s): ballot %s is ready", instance_id, ballot, higher)
            await self._members.release_here(instance_id, ballot, higher)
