"""The instances that this node owns: watched, adopted, recovered, given up, and ended; each has one owner and one plan.

What is to be done is decided in `ownership`, which is pure; here it is done. What each case is for is in
docs/how-it-works/placement.md under "Reserve, commit, and who is right".
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections.abc import Collection, Coroutine, Mapping
from dataclasses import replace
from typing import Any

from exo_mesh.domain.device import PeerInfo
from exo_mesh.domain.plan import NO_BALLOT, Ballot, Plan, Seat
from exo_mesh.domain.rdma_links import broken_cable
from exo_mesh.domain.runner_limits import RunnerLimits
from exo_mesh.domain.stage import ReserveAnswer
from exo_mesh.domain.view import InstanceInfo, InstanceState, Record, RecordKey
from exo_mesh.errors import MeshError
from exo_mesh.instances.idle import IdleClock
from exo_mesh.instances.liveness import SilentSeats, StageLook
from exo_mesh.instances.members import Members
from exo_mesh.instances.ownership import Claim, Orphans, adopter, beaten, claim, surviving_heir
from exo_mesh.instances.placer import BallotBeatenError
from exo_mesh.instances.recoverer import Recoverer
from exo_mesh.instances.ring_monitor import RingMonitor, tell_nobody
from exo_mesh.instances.short_peers import short_members
from exo_mesh.membership.service import Membership
from exo_mesh.tasks import TaskOwner

RELEASE_S = 2.0
"""At a stop: how long the members may take to end their stages. What is left at a peer that does not answer ends there
when its owner has been gone for a while."""

HOP_SUSPECT_S = 60.0
"""A hop that is lost though both its ends live is made anew once. If it is lost again within this, the peer behind it
is left out: a firewall stays."""

MAX_LAPSED = 256
"""Rings without an owner that are remembered for whoever places their model next; as many as one owner may have."""

LAPSED_S = 30.0
"""... for so long: then their stages have ended (see reservations.LEASE_S)."""

SHORT_IDLE_S = 10.0
"""How long a ring with a peer short of memory may have nothing to do, once another ring serves its model."""

ORDER_EVERY_S = 1.0
"""Also without a change of the view: an adoption that failed is tried again, and orphans grow older."""

TAKE_OVER_S = 2.0
"""A ring that nobody uses is taken over from a dead owner without the members that are dead with it, though a runner of
theirs still answers, after this: a verdict that is false is often taken back sooner."""

LOOK_EVERY_S = 0.2
"""How often this node checks for rings of others whose owner does not answer."""

_log = logging.getLogger(__name__)


class OwnedRings:
    """`monitors` has the rings this node owns, by instance id."""

    def __init__(
        self,
        membership: Membership,
        members: Members,
        recoverer: Recoverer,
        runner_limits: RunnerLimits,
        idle_s: float = 0.0,
    ) -> None:
        """idle_s: how long a ring of this node may have nothing to do before it is unloaded; 0: for ever."""
        self.monitors: dict[str, RingMonitor] = {}
        self._recoverer = recoverer
        self._recoveries: dict[str, tuple[Ballot, asyncio.Task[None]]] = {}
        self._hops_made_anew: dict[str, float] = {}
        self._lapsed: dict[str, tuple[InstanceInfo, float]] = {}
        self._membership = membership
        self._members = members
        self._runner_limits = runner_limits
        self._highest: dict[str, Ballot] = {}
        self._ownerless: dict[str, InstanceInfo] = {}
        self._orphans = Orphans()
        self._silent: dict[tuple[str, Ballot], SilentSeats] = {}
        self._idle = IdleClock(idle_s)
        self._short = IdleClock(SHORT_IDLE_S)
        self._tasks = TaskOwner()

    def start(self) -> None:
        self._tasks.keep(self._keep_order, "order of instances")
        self._tasks.keep(self._keep_looking, "silent owners")

    @property
    def ended_tasks(self) -> Mapping[str, str]:
        """Long-lived tasks that a bug has ended; see TaskOwner."""
        return self._tasks.ended

    async def stop(self) -> None:
        """Leave the rings this node owns to their other members, who go on without it; what it was recovering or ending
        it ends, at all members that answer within RELEASE_S."""
        monitors = list(self.monitors.values())
        self.monitors.clear()
        await asyncio.gather(*(monitor.close() for monitor in monitors))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(RELEASE_S):
                await self._tasks.close()
        await asyncio.gather(*(looks.close() for looks in self._silent.values()))

    def owner_left(self, peer: PeerInfo, records: list[Record]) -> None:
        """A peer is gone: its ready rings wait for the lowest-id live member of each to adopt them."""
        for record in records:
            instance = record.value
            if not isinstance(instance, InstanceInfo):
                continue
            if self._membership.own.id in instance.plan.member_ids:
                self._ownerless[record.key.id] = instance
            if instance.state is InstanceState.READY:
                self._lapsed[record.key.id] = instance, asyncio.get_running_loop().time()
                while len(self._lapsed) > MAX_LAPSED:
                    del self._lapsed[next(iter(self._lapsed))]
        self._membership.changed.beat()

    def keep(self, monitor: RingMonitor) -> None:
        """From now on this node owns the ring, instead of any other of that instance; it ends when a stage is lost."""
        stale = self.monitors.get(monitor.plan.instance_id)
        if stale is not None:
            self._start_end(stale)
        self.monitors[monitor.plan.instance_id] = monitor
        monitor.on_taken_back = lambda: self._say_taken_back(monitor)
        self._tasks.start(self._watch(monitor), f"watch {monitor.plan.instance_id}")

    def _say_taken_back(self, monitor: RingMonitor) -> None:
        """The ring is this node's by a higher ballot now."""
        instance_id = monitor.plan.instance_id
        self.note(instance_id, monitor.ballot)
        record = self._own_record(instance_id)
        if self.monitors.get(instance_id) is monitor and record is not None:
            self._membership.put_instance(instance_id, replace(record, adopted=monitor.adopted))

    async def _watch(self, monitor: RingMonitor) -> None:
        """When a stage is lost the ring goes on without it, if it can; else it ends, and the next request places the
        model again."""
        instance_id = monitor.plan.instance_id
        error = await monitor.lost
        if self.monitors.get(instance_id) is not monitor:
            return
        del self.monitors[instance_id]
        self._start_recovery(instance_id, monitor.ballot, self._go_on(monitor, error))

    def _start_recovery(self, instance_id: str, ballot: Ballot, work: Coroutine[Any, Any, None]) -> None:
        """ballot: of the ring that is lost."""
        task = self._tasks.start(work, f"recover {instance_id}")
        self._recoveries[instance_id] = ballot, task

        def ended(task: asyncio.Task[None]) -> None:
            if self._recoveries.get(instance_id) == (ballot, task):
                del self._recoveries[instance_id]

        task.add_done_callback(ended)

    async def _go_on(self, monitor: RingMonitor, error: MeshError) -> None:
        instance_id = monitor.plan.instance_id
        await monitor.close()
        suspects = await self._suspects(monitor)
        is_wanted = not self._is_deleted(instance_id, monitor.ballot)
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

    async def _suspects(self, monitor: RingMonitor) -> tuple[str, ...]:
        """Peers to leave out: of a hop that is lost one end, if the node before it does not reach the one behind it
        either, or if it is lost again soon after it was made anew. The one behind it, unless that is this node."""
        if monitor.hop_lost is None:
            return ()
        instance_id, now = monitor.plan.instance_id, asyncio.get_running_loop().time()
        again = now - self._hops_made_anew.get(instance_id, -HOP_SUSPECT_S) < HOP_SUSPECT_S
        self._hops_made_anew = {name: at for name, at in self._hops_made_anew.items() if now - at < HOP_SUSPECT_S}
        self._hops_made_anew[instance_id] = now
        before, behind = (monitor.plan.peer_ids[(monitor.hop_lost + n) % len(monitor.plan.stages)] for n in (0, 1))
        is_reached = not monitor.is_next_out_of_reach and await self._members.reaches(before, behind)
        if is_reached and not again:
            return ()
        return (before if behind == self._membership.own.id else behind,)

    async def _recover(
        self, plan: Plan, owned: Ballot, trouble_s: float, cause: str, suspects: Collection[str] = ()
    ) -> bool:
        """Go on with what is left of a ring that is this node's by the ballot `owned`; False if that cannot be. cause:
        of the loss, for the metrics."""
        instance_id = plan.instance_id
        try:
            monitor, instance = await self._recoverer.recover(
                plan,
                self.above(instance_id),
                tell_nobody,
                trouble_s=trouble_s,
                owned=owned,
                suspects=suspects,
                cause=cause,
            )
        except BallotBeatenError as exc:
            self.note(instance_id, exc.ballot)
            _log.info("%s is left to another peer: %s", instance_id, exc)
            return False
        except MeshError as exc:
            _log.warning("%s cannot go on: %s", instance_id, exc)
            return False
        self.take(monitor, instance)
        return True

    def take(self, monitor: RingMonitor, instance: InstanceInfo) -> None:
        """A ring that is ready is this node's."""
        instance_id = instance.plan.instance_id
        self._lapsed.pop(instance_id, None)
        self._ownerless.pop(instance_id, None)
        self.note(instance_id, instance.ballot)
        self.keep(monitor)
        self._membership.put_instance(instance_id, instance)

    async def stop_recovery(self, instance_id: str) -> bool:
        """Somebody wants the instance to end; True if it was being recovered."""
        _, task = self._recoveries.pop(instance_id, (NO_BALLOT, None))
        if task is None:
            return False
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        self._membership.put_instance(instance_id, None)
        return True

    def lapsed(self, instance_id: str) -> InstanceInfo | None:
        """A ring whose owner is gone, or that nobody has mended: its stages may be there still."""
        instance, at = self._lapsed.get(instance_id, (None, 0.0))
        if instance is None or asyncio.get_running_loop().time() > at + LAPSED_S:
            return None
        if self._is_deleted(instance_id, instance.ballot):
            return None
        newer = any(one.ballot > instance.ballot for _, one in self._records_of(instance_id))
        return None if newer else instance

    def is_recovering(self, instance_id: str) -> bool:
        """Does this node go on with what is left of a ring just now?"""
        return instance_id in self._recoveries

    def is_awaited(self, instance_id: str) -> bool:
        """Is somebody about to go on with this ring, or to say that it cannot be?"""
        if self.is_recovering(instance_id):
            return True
        records = [one for _, one in self._records_of(instance_id)]
        if records:
            return max(records, key=lambda one: one.ballot).state is InstanceState.READY
        lapsed = self.lapsed(instance_id)
        return lapsed is not None and any(self._membership.is_alive(peer_id) for peer_id in lapsed.plan.member_ids)

    def _own_record(self, instance_id: str) -> InstanceInfo | None:
        record = self._membership.view.get(RecordKey("instance", instance_id, self._membership.own.id))
        return record.value if record is not None and isinstance(record.value, InstanceInfo) else None

    async def end(self, monitor: RingMonitor, *, for_good: bool = False) -> None:
        """Release a ring that is in `monitors` no more, and take back this node's word of it. for_good: see
        RingMonitor.release.

        This goes on if whoever asked hangs up before all members have answered.
        """
        await asyncio.shield(self._start_end(monitor, for_good=for_good))

    def _start_end(self, monitor: RingMonitor, *, for_good: bool = False) -> asyncio.Task[None]:
        return self._tasks.start(self._end(monitor, for_good), f"end {monitor.plan.instance_id}")

    async def _end(self, monitor: RingMonitor, for_good: bool) -> None:
        instance_id = monitor.plan.instance_id
        self.note(instance_id, monitor.ballot)
        await monitor.release(for_good=for_good)
        self.note(instance_id, monitor.ballot)
        record = self._own_record(instance_id)
        # by now this node may have begun to place it again
        if record is not None and record.ballot <= monitor.ballot:
            self._membership.put_instance(instance_id, None)

    # the order of instances: one owner and one plan each, wherever they came from

    async def _keep_order(self) -> None:
        """Each time the view changes: yield to those with more right, adopt what has lost its owner, end orphans."""
        while True:
            await self._end_deleted()
            await self._yield()
            for instance in list(self._ownerless.values()):
                await self._adopt_if_due(instance)
            self._give_up_broken_groups()
            self._unload_idle(asyncio.get_running_loop().time())
            self._unload_short(asyncio.get_running_loop().time())
            await self._end_orphans(asyncio.get_running_loop().time())
            await self._membership.changed.wait(ORDER_EVERY_S)

    def _is_deleted(self, instance_id: str, ballot: Ballot) -> bool:
        return self._membership.fences.covers(instance_id, ballot)

    async def _end_deleted(self) -> None:
        """End what was deleted, whoever placed, adopted or recovers it: the stages here, and rings of this node."""
        for instance_id, monitor in list(self.monitors.items()):
            if self._is_deleted(instance_id, monitor.ballot) and self.monitors.get(instance_id) is monitor:
                del self.monitors[instance_id]
                self._start_end(monitor, for_good=True)
        for instance_id, instance in list(self._ownerless.items()):
            if self._is_deleted(instance_id, instance.ballot):
                del self._ownerless[instance_id]
        for instance_id, (ballot, _) in list(self._recoveries.items()):
            if self._is_deleted(instance_id, ballot):
                await self.stop_recovery(instance_id)
        for instance_id, ballot in self._members.leased_here():
            if self._is_deleted(instance_id, ballot):
                await self._members.release_here(instance_id, self._membership.fences.ballot(instance_id))

    def wish_idle(self, instance_id: str, idle_s: float) -> bool:
        """See IdleClock.wish. False if this node does not own the instance."""
        if instance_id in self.monitors:
            self._idle.wish(instance_id, idle_s)
        return instance_id in self.monitors

    def _unload_idle(self, now: float) -> None:
        """No fence: a request that comes just now places the model again."""
        if not self._idle.is_on:
            return
        readings, work = self._membership.telemetry, {}
        for instance_id, monitor in self.monitors.items():
            reading = readings.get(monitor.plan.peer_ids[-1])
            if reading is not None:
                work[instance_id] = reading.outstanding.get(instance_id, 0), reading.tokens.get(instance_id, 0)
        for instance_id in self._idle.due(work, now):
            _log.info("unloading %s: nobody has used it for a while (--idle-unload or keep_alive)", instance_id)
            self._start_end(self.monitors.pop(instance_id), for_good=True)

    def _unload_short(self, now: float) -> None:
        """End rings that have a peer short of memory and that nobody uses, where another ring serves their model."""
        readings = self._membership.telemetry
        roomy = {
            one.plan.model
            for _, one in self._membership.view.instances()
            if one.state is InstanceState.READY and not short_members(one.plan, readings)
        }
        work = {
            instance_id: (reading.outstanding.get(instance_id, 0), reading.tokens.get(instance_id, 0))
            for instance_id, monitor in self.monitors.items()
            if monitor.plan.model in roomy
            and short_members(monitor.plan, readings)
            and (reading := readings.get(monitor.plan.peer_ids[-1])) is not None
        }
        for instance_id in self._short.due(work, now):
            _log.info("unloading %s: a peer of it is short of memory, and another ring serves", instance_id)
            self._start_end(self.monitors.pop(instance_id), for_good=True)

    def _give_up_broken_groups(self) -> None:
        """A cable was pulled: collectives over it would hang until somebody's patience ends."""
        peers = self._membership.view.peers()
        for monitor in self.monitors.values():
            for index, stage in enumerate(monitor.plan.stages):
                if stage.group is not None and (reason := broken_cable(stage.group, peers)):
                    monitor.give_up(index, reason)

    async def _yield(self) -> None:
        """Two sides of a split mesh may each have placed an instance; and who was given up may be there after all."""
        records = self._membership.view.records_of_instances()
        for instance_id, monitor in list(self.monitors.items()):
            verdict = claim(self._membership.own.id, monitor.plan, monitor.ballot, records)
            if verdict is Claim.KEEP or self.monitors.get(instance_id) is not monitor:
                continue
            del self.monitors[instance_id]
            if verdict is Claim.END:
                _log.info("%s of ballot %s gives way to a higher one", instance_id, monitor.ballot)
                self._start_end(monitor)
            else:
                _log.info("%s of ballot %s has another owner; leaving it to that", instance_id, monitor.ballot)
                self._membership.put_instance(instance_id, None)
                await monitor.close()

    async def _adopt_if_due(self, instance: InstanceInfo) -> None:
        """Adopt a ring without an owner if that falls to this node; a later round tries again."""
        plan = instance.plan
        runs_here = self._members.runs_here(plan)
        known = [one for _, one in self._records_of(plan.instance_id)]
        if not runs_here or plan.instance_id in self.monitors or any(one.ballot >= instance.ballot for one in known):
            self._ownerless.pop(plan.instance_id, None)
            return
        heir = adopter(instance, self._membership.is_alive)
        if heir is None:
            await self._recover_if_due(instance)
        if heir != self._membership.own.id:
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
        monitor = RingMonitor(
            plan, self._members, tell_nobody, self._runner_limits, adopted, endpoints=instance.endpoints
        )
        self._lapsed.pop(plan.instance_id, None)
        self.keep(monitor)
        monitor.watch()
        self._membership.put_instance(plan.instance_id, replace(instance, adopted=adopted))

    async def _recover_if_due(self, instance: InstanceInfo) -> None:
        """A ring has lost its owner and other members: go on with what is left of it if that falls to this node, and if
        those members are really gone, and not only their nodes out of reach."""
        plan, instance_id = instance.plan, instance.plan.instance_id
        is_heir = surviving_heir(instance, self._membership.is_alive) == self._membership.own.id
        if not is_heir or instance_id in self._recoveries:
            return
        gone = [seat for seat in plan.seats if not self._membership.is_alive(seat.peer_id)]
        looks = await asyncio.gather(*map(self._looks_at(instance).result, gone))
        if StageLook.LIVES in looks and not self._is_idle(instance):
            return
        _log.info("%s has lost its owner and %d of its seats", instance_id, len(gone))
        self._start_recovery(instance_id, instance.ballot, self._take_over(plan, instance.ballot))

    def _looks_at(self, instance: InstanceInfo) -> SilentSeats:
        """What has been seen of the stages of a ring since their nodes fell silent."""
        key = instance.plan.instance_id, instance.ballot
        if key not in self._silent:
            self._silent[key] = SilentSeats(instance.plan, self._members, functools.partial(self._addresses, instance))
        return self._silent[key]

    def _is_idle(self, instance: InstanceInfo) -> bool:
        """Has the owner of a ring been dead for TAKE_OVER_S, and no request used the stage here?

        Then nothing is lost by going on without the dead. New requests could not use it: nobody speaks for it."""
        instance_id = instance.plan.instance_id
        is_used = self._members.stages_here().get((instance_id, instance.ballot), False)
        now = asyncio.get_running_loop().time()
        _, lapsed_at = self._lapsed.get(instance_id, (None, now))
        return not is_used and now - lapsed_at >= TAKE_OVER_S

    async def _keep_looking(self) -> None:
        """Look at the stages of rings that may have to be taken over before the mesh agrees on the owner's death."""
        while True:
            rings = self._rings_of_silent_owners()
            for key in [key for key in self._silent if key not in rings]:
                await self._silent.pop(key).close()
            for instance in rings.values():
                self._looks_at(instance).step({})
            await asyncio.sleep(LOOK_EVERY_S)

    def _rings_of_silent_owners(self) -> dict[tuple[str, Ballot], InstanceInfo]:
        """Ready rings with a stage here whose owner is dead or does not answer this node."""
        own_id = self._membership.own.id
        silent = [
            one
            for owner, one in self._membership.view.records_of_instances()
            if own_id in one.plan.member_ids and self._membership.unanswered_s(owner) > 0
        ]
        rings = [one for one in (*silent, *self._ownerless.values()) if one.state is InstanceState.READY]
        return {(one.plan.instance_id, one.ballot): one for one in rings}

    def _addresses(self, instance: InstanceInfo, seat: Seat) -> list[str]:
        """Where the runner of a seat may be reached; the mesh is told where leaders listen, and not the other ranks."""
        return [] if seat.rank else self._members.addresses(instance.endpoints[seat.stage], seat.peer_id)

    async def _take_over(self, plan: Plan, owned: Ballot) -> None:
        loop = asyncio.get_running_loop()
        _, since = self._lapsed.get(plan.instance_id, (None, loop.time()))
        if not await self._recover(plan, owned, loop.time() - since, "owner_lost"):
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
            _log.warning("ending the stage of %s (ballot %s): nobody owns it", instance_id, ballot)
            await self._members.release_here(instance_id, ballot)

    async def free_beaten(self) -> None:
        """Before this node says that it lives after all: end the stages that were deleted, and those whose place others
        have taken."""
        await self._end_deleted()
        instances = [one for _, one in self._membership.view.records_of_instances()]
        for instance_id, ballot, higher in beaten(self._members.stages_here(), instances):
            _log.info("ending the stage of %s (ballot %s): ballot %s is ready", instance_id, ballot, higher)
            await self._members.release_here(instance_id, ballot, higher)

    def _records_of(self, instance_id: str) -> list[tuple[str, InstanceInfo]]:
        records = self._membership.view.records_of_instances()
        return [(owner, one) for owner, one in records if one.plan.instance_id == instance_id]

    def above(self, instance_id: str) -> Ballot:
        """The highest ballot of an instance that this node knows of: a new plan needs a higher one."""
        in_view = [one.ballot for _, one in self._records_of(instance_id)]
        fence, promised = self._membership.fences.ballot(instance_id), self._members.promised_here(instance_id)
        return max([self._highest.get(instance_id, NO_BALLOT), promised, fence, *in_view])

    def note(self, instance_id: str, ballot: Ballot) -> None:
        """There was such a ballot."""
        self._highest[instance_id] = max(ballot, self._highest.get(instance_id, NO_BALLOT))
