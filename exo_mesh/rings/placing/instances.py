"""Chooses, places and deletes the instances of the mesh on behalf of this node."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Awaitable, Sequence
from weakref import WeakSet, WeakValueDictionary

from msgspec.structs import replace

from exo_mesh.base.clock import Clock, monotonic
from exo_mesh.base.tasks import TaskOwner
from exo_mesh.domain.model import ModelCard
from exo_mesh.domain.pinning import Pin
from exo_mesh.domain.plan import Ballot, StagePlan
from exo_mesh.domain.view import InstanceInfo, InstanceState, RecordKey
from exo_mesh.errors import (
    DeadlineError,
    InstanceDeletedError,
    MemoryPressureError,
    MeshError,
    StageLostError,
    TransportError,
)
from exo_mesh.mesh.membership.fences import FENCE_S, LEAP, Fence
from exo_mesh.mesh.membership.service import Membership
from exo_mesh.models.catalogue import Catalogue
from exo_mesh.rings.placing.avoided_rings import Distrust
from exo_mesh.rings.placing.calls import delete_instance, keep_instance
from exo_mesh.rings.placing.choosing import InstanceChoice, Load
from exo_mesh.rings.placing.owned_rings import OwnedRings
from exo_mesh.rings.placing.placer import Placer
from exo_mesh.rings.placing.recoverer import Recoverer
from exo_mesh.rings.placing.refused_stages import BallotBeatenError, StageFailedError
from exo_mesh.rings.placing.ring_monitor import OnProgress, RingMonitor
from exo_mesh.rings.placing.short_peers import draining_members, refusal_of, short_members
from exo_mesh.rings.placing.spec import InstanceSpec, is_replica, replica_id, suits
from exo_mesh.rings.placing.stage_phases import StagePhase

MAX_ATTEMPTS = 6
WINNER_S = 2.0
"""How long the winner's record may take to arrive after this node lost a placement race. Records are pushed at once;
probes run every second."""

OWNER_S = 8.0
"""How long to wait for the owner (or the next owner) of a ring that failed here to notice. A machine that is suddenly
off is declared dead after 3 s of unanswered probes, and its stage is given up after another 3 s."""

SHORTAGE_S = 3.0
"""How long a peer's report that it is short of memory may take to arrive after its ring refused a request."""

SHORT_RETRY_S = 10.0
"""Retry-After of a refusal for lack of memory: other programs usually end, and weights are unloaded, in this time."""

_log = logging.getLogger(__name__)


async def _ignore_failure(call: Awaitable[None]) -> None:
    """Await a call to a peer and ignore its failure: the peer learns of a deletion later by anti-entropy, and a lost
    keep-alive time does no harm."""
    with contextlib.suppress(MeshError):
        await call


def _log_failure(placement: asyncio.Task[InstanceInfo]) -> None:
    if not placement.cancelled() and (error := placement.exception()) is not None:
        _log.info("%s failed: %s", placement.get_name(), error)


def _pin(stage: StagePlan) -> Pin:
    """A wish for a stage as it is in a plan."""
    group = stage.peers if stage.group is not None else ()
    return Pin(stage.peers[0], stage.shard.start, stage.shard.stop, stage.engine, group=group)


class Instances:
    """Lets this node use every instance in the view; the peer that placed an instance owns it (see `owned_rings`)."""

    def __init__(
        self,
        membership: Membership,
        owned_rings: OwnedRings,
        placer: Placer,
        catalogue: Catalogue,
        recoverer: Recoverer,
        rng: random.Random,
        clock: Clock = monotonic,
    ) -> None:
        self._membership = membership
        self._owned = owned_rings
        self._placer = placer
        self._catalogue = catalogue
        self._recoverer = recoverer
        self._rng = rng
        self._clock = clock
        self._flights: dict[InstanceSpec, asyncio.Task[InstanceInfo]] = {}
        self._replaced: WeakSet[asyncio.Task[InstanceInfo]] = WeakSet()
        """Placements whose instance was deleted because its weights had wrong bytes."""
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._progress: dict[str, tuple[str, int, int]] = {}
        self._distrust = Distrust()
        self.choice = InstanceChoice(membership, rng, clock)
        self._out_of_reach: set[str] = set()
        self._tasks = TaskOwner()

    async def stop(self) -> None:
        """Stop placing, and leave the instances that this node owns to their other members."""
        await self._tasks.close()
        await self._owned.stop()

    def all(self) -> list[tuple[str, InstanceInfo]]:
        """(owner, instance) of each instance in the view, by instance id, without deleted ones. Every owner is alive
        and withdraws its record when a stage is lost. A node that does not answer may still have a healthy runner."""
        return [(owner, one) for owner, one in self._membership.view.instances() if not self.is_deleted(one)]

    def is_deleted(self, instance: InstanceInfo) -> bool:
        """Whether this instance was deleted. An instance placed after the deletion has a higher ballot and is not
        covered."""
        return self._membership.fences.covers(instance.plan.instance_id, instance.ballot)

    def of_model(self, model: str, state: InstanceState = InstanceState.READY) -> list[InstanceInfo]:
        return [instance for _, instance in self.all() if instance.plan.model == model and instance.state is state]

    def progress(self, model: str) -> tuple[str, int, int]:
        """(phase, done, total) of the placement of a model, see OnProgress. For a placement by another peer, its
        downloads in the view. Phase "placing": no plan has been agreed on yet."""
        under_way = "loading" if self.of_model(model, InstanceState.LOADING) else "placing"
        return self._progress.get(model) or self._fetching_elsewhere(model) or (under_way, 0, 0)

    def _fetching_elsewhere(self, model: str) -> tuple[str, int, int] | None:
        members = {peer_id for one in self.of_model(model, InstanceState.LOADING) for peer_id in one.plan.member_ids}
        parts = [
            info
            for owner, info in self._membership.view.downloads()
            if info.model == model and owner in members and info.state.is_active
        ]
        if not parts:
            return None
        return "fetching", sum(one.done_bytes for one in parts), sum(one.total_bytes for one in parts)

    def phases(self, instance_id: str) -> Sequence[StagePhase]:
        """The phase of each stage of an instance that this node is bringing up; () for other instances."""
        return self._placer.phases(instance_id)

    def distrust(self, instance: InstanceInfo) -> None:
        """Avoid an instance that failed a request here for a while, and place the model again by a higher ballot if
        necessary.

        An instance that is adopted later is used again, because its new owner has reached all its stages.
        """
        self._distrust.note(instance, self._clock())
        self._out_of_reach.update(filter(self._membership.unanswered_s, instance.plan.peer_ids))
        self._owned.known.note(instance.plan.instance_id, instance.ballot)  # remembered even if the record disappears

    def is_trusted(self, instance: InstanceInfo) -> bool:
        return not (self._distrust.includes(instance, self._clock()) or self._is_out_of_reach(instance))

    def _is_out_of_reach(self, instance: InstanceInfo) -> bool:
        """Whether the driver's peer did not answer here when a ring with it failed a request, and still does not.

        Other nodes may still reach the driver, so no owner will recover the instance for this node's sake.
        """
        self._out_of_reach = {peer_id for peer_id in self._out_of_reach if self._membership.unanswered_s(peer_id)}
        return instance.plan.peer_ids[-1] in self._out_of_reach

    def ready_for(self, model: str, tokens: int = 0) -> list[InstanceInfo]:
        """The instances that a request could run on now, narrowed while any remain: first to room for `tokens` tokens,
        then to peers that are not short of memory, then to peers that do not drain."""
        trusted = [one for one in self.of_model(model) if self.is_trusted(one)]
        ready = [one for one in trusted if one.plan.context_limit >= tokens] or trusted
        readings = self._membership.telemetry if len(ready) > 1 else {}
        roomy = [one for one in ready if not short_members(one.plan, readings)] or ready
        return [one for one in roomy if not draining_members(one.plan, readings)] or roomy

    async def elsewhere(
        self, refused: InstanceInfo, refusal: MemoryPressureError, load: Load, *, may_place: bool = True
    ) -> InstanceInfo:
        """A ready instance of the same model that avoids the peers of `refused` that are short of memory; if there is
        none and may_place, one that is placed now. Raises MemoryPressureError with the peer, the numbers and the
        remedy."""
        clock = asyncio.get_running_loop().time
        give_up_at = clock() + SHORTAGE_S
        while not (short := short_members(refused.plan, self._membership.telemetry)):
            if clock() >= give_up_at:
                raise refusal
            await self._membership.changed.wait(0.1)
        spec = InstanceSpec(refused.plan.model, exclude_peers=tuple(sorted(short)))
        if not may_place and not any(suits(one, spec) for one in self.ready_for(spec.model)):
            raise refusal
        _log.info(
            "%s is short of memory: placing its model without peers %s",
            refused.plan.instance_id,
            ", ".join(spec.exclude_peers),
        )
        try:
            return await self.ensure(spec, load)
        except MeshError as exc:
            peers = {peer.id: peer for peer in self._membership.view.peers()}
            text = refusal_of(refused.plan, short, peers, f"other peers cannot either: {exc}")
            raise MemoryPressureError(text, retry_after_s=max(SHORT_RETRY_S, refusal.retry_after_s)) from exc

    async def ensure(self, spec: InstanceSpec, load: Load | None = None) -> InstanceInfo:
        """A ready instance that matches the spec: an existing one, or a newly placed one. Concurrent callers with the
        same spec share one placement. load: of the request that needs it; None if somebody asks for the instance
        itself. An instance that is asked for is no longer given back by itself."""
        is_asked, load = load is None and not spec.is_auto, load or Load()
        ready = [one for one in self.ready_for(spec.model, load.tokens) if suits(one, spec)]
        if ready:
            best = self.choice.best([one for one in ready if one.plan.instance_id not in load.full] or ready, load)
            if is_asked and best.is_auto:
                self.keep_alive(best.plan.instance_id, -1.0)
            return best
        for _ in range(MAX_ATTEMPTS):
            flight = self._flight(spec)
            try:
                return await asyncio.shield(flight)
            except asyncio.CancelledError:
                if not flight.cancelled():  # the caller was cancelled, not the placement by a deletion
                    raise
            except InstanceDeletedError:
                if flight not in self._replaced:
                    raise
            if flight not in self._replaced:
                break
        raise InstanceDeletedError(f"{spec.model}: the instance was deleted while it was being placed")

    def _flight(self, spec: InstanceSpec) -> asyncio.Task[InstanceInfo]:
        """The placement for a spec that is under way; started if there is none."""
        flight = self._flights.get(spec)
        if flight is None:
            flight = self._tasks.start(self._place_or_join(spec), f"place {spec.model}", for_request=True)
            self._flights[spec] = flight
            flight.add_done_callback(lambda _: self._flights.pop(spec, None))
        return flight

    def place_soon(self, spec: InstanceSpec) -> None:
        """Place an instance unless there is one or a placement for the spec is under way. Returns at once; a failure is
        logged."""
        if not self.exists(spec.model):
            self._flight(spec).add_done_callback(_log_failure)

    def exists(self, model: str) -> bool:
        """Whether a model has an instance, also while it is being placed or recovered."""
        there = any(one.plan.model == model and one.state is not InstanceState.FAILED for _, one in self.all())
        return there or any(spec.model == model for spec in self._flights) or self._owned.awaits_model(model)

    def keep_alive(self, instance_id: str, idle_s: float) -> None:
        """Send the owner of an instance how long it may be idle before it is unloaded; negative: for ever. Returns at
        once. An owner that does not support this call uses its own setting."""
        if self.wish_idle(instance_id, idle_s):
            return
        owners = {owner for owner, one in self.all() if one.plan.instance_id == instance_id}
        for peer in self._membership.peers:
            if peer.id in owners:
                call = keep_instance(self._membership.calls, peer.id, instance_id, idle_s)
                self._tasks.start(_ignore_failure(call), f"keep {instance_id}")

    def wish_idle(self, instance_id: str, idle_s: float) -> bool:
        """Like keep_alive, for an instance that this node owns; False if another node owns it."""
        return self._owned.unused.wish_idle(instance_id, idle_s)

    def idle_left_s(self, instance_id: str) -> float | None:
        """See UnusedRings.left_s."""
        return self._owned.unused.left_s(instance_id, asyncio.get_running_loop().time())

    async def delete(self, instance_id: str, *, is_replaced: bool = False) -> bool:
        """End an instance on every peer, regardless of its owner; False if it has no owner. is_replaced: its weights
        had wrong bytes; callers that wait for it to be placed wait for the next one instead of an error.

        Every peer remembers the deletion (see Fences) and ends its part of the instance. If two peers placed the
        instance at the same time, both end it. Returns when the owners have ended it.
        """
        records = self._membership.view.records_of_instances()
        owners = {owner for owner, instance in records if instance.plan.instance_id == instance_id}
        if not owners and self._owned.known.lapsed(instance_id) is None:
            return False
        above = self._owned.known.above(instance_id)
        fence = Fence(instance_id, Ballot(above.counter + LEAP, self._membership.own.id), FENCE_S)
        self._membership.take_fence(fence)
        waited = []
        for peer in self._membership.peers:
            call = delete_instance(self._membership.calls, peer.id, fence, is_replaced=is_replaced)
            if peer.id in owners:
                waited.append(call)
            else:
                self._tasks.start(_ignore_failure(call), f"delete {instance_id}")
        await asyncio.gather(self.delete_own(instance_id, is_replaced=is_replaced), *waited, return_exceptions=True)
        return True  # answers do not matter: the fence spreads by gossip too

    async def place_again(self, model: str, *, only_ready: bool) -> None:
        """Deletes the instances of a model that have a stage on this node, which ends their requests with an error, and
        places those again that somebody asked for. only_ready: leave those that are loading."""
        own_id = self._membership.own.id
        for _, one in self.all():
            plan = one.plan
            is_meant = one.state is InstanceState.READY or not only_ready
            if plan.model == model and own_id in plan.member_ids and is_meant:
                _log.error("deleting %s: its weights had wrong bytes on this machine", plan.instance_id)
                await self.delete(plan.instance_id, is_replaced=True)
                if not one.is_auto:
                    pins = tuple(map(_pin, plan.stages))
                    self.place_soon(InstanceSpec(model, context_limit=plan.context_limit, pins=pins))

    async def delete_own(self, instance_id: str, is_replaced: bool = False) -> bool:
        """End an instance that this node owns; False if this node owns no instance with the id. is_replaced: see
        `delete`."""
        if is_replaced:
            self._replaced.update(one for spec, one in self._flights.items() if is_replica(instance_id, spec.model))
        monitor = self._owned.monitors.pop(instance_id, None)
        if monitor is not None:
            await self._owned.end(monitor, for_good=True)
            return True
        if await self._owned.stop_recovery(instance_id) or await self._owned.wait_for_end(instance_id):
            return True
        key = RecordKey("instance", instance_id, self._membership.own.id)
        record = self._membership.view.get(key)
        if record is None or not isinstance(record.value, InstanceInfo):
            return False
        flights = [flight for spec, flight in self._flights.items() if spec.model == record.value.plan.model]
        for flight in flights:
            flight.cancel()
        await asyncio.gather(*flights, return_exceptions=True)
        return bool(flights)

    async def _place_or_join(self, spec: InstanceSpec) -> InstanceInfo:
        turn = self._turns.setdefault(spec.model, asyncio.Lock())
        async with turn:
            card = await self._catalogue.card(spec.model)
            failure: MeshError = StageLostError(f"{spec.model} could not be placed")
            started = self._clock()
            for attempt in range(MAX_ATTEMPTS):
                instance_id, held = self._id_for(spec)
                if held is None and await self._await_recovery(instance_id):
                    continue
                if held is not None and held.state is InstanceState.READY:
                    return held
                try:
                    if held is not None and held.state is InstanceState.LOADING:
                        return await self._join(instance_id, spec, held.ballot)
                    return await self._place(card, spec, instance_id)
                except BallotBeatenError as exc:
                    failure = exc
                    self._owned.known.note(instance_id, exc.ballot)
                    if exc.ballot.proposer == self._membership.own.id:
                        continue  # an earlier run of this node used it
                    try:
                        return await self._join(instance_id, spec, exc.ballot)
                    except (StageLostError, DeadlineError) as lost:
                        failure = lost
                except (StageLostError, StageFailedError, TransportError, DeadlineError) as exc:
                    failure = exc
                if self._membership.fences.noted_since(instance_id, started):
                    raise InstanceDeletedError(f"{instance_id} was deleted while it was being placed") from failure
                _log.info("placing %s: attempt %d failed: %s", instance_id, attempt + 1, failure)
                await asyncio.sleep(self._rng.uniform(0.05, 0.5) * (attempt + 1))
            raise failure

    async def _await_recovery(self, instance_id: str) -> bool:
        """Wait while the owner of a ring that failed here may still recover it. True if a usable ring of this instance
        exists afterwards."""
        give_up_at = asyncio.get_running_loop().time() + OWNER_S
        with self._owned.use.awaits(instance_id):
            while self._owned.is_awaited(instance_id):
                if self._is_there_again(instance_id):
                    return True
                is_late = asyncio.get_running_loop().time() > give_up_at or self._is_ready_elsewhere(instance_id)
                if is_late and not self._owned.is_recovering(instance_id):  # two would end each other
                    return False
                await self._membership.changed.wait(0.1)
        return self._is_there_again(instance_id)

    def _is_there_again(self, instance_id: str) -> bool:
        """Whether the view has a ring of this instance that has not failed here."""
        rings = [one for _, one in self.all() if one.plan.instance_id == instance_id]
        return any(one.state is not InstanceState.FAILED and self.is_trusted(one) for one in rings)

    def _is_ready_elsewhere(self, instance_id: str) -> bool:
        """Whether the owner reports the ring as ready, and only this node cannot reach its driver."""
        rings = [one for _, one in self.all() if one.plan.instance_id == instance_id]
        return any(one.state is InstanceState.READY and self._is_out_of_reach(one) for one in rings)

    def _id_for(self, spec: InstanceSpec) -> tuple[str, InstanceInfo | None]:
        """The first replica id whose instance matches the spec, with that instance; or the first free id, with None."""
        held = {instance.plan.instance_id: instance for _, instance in self.all()}
        replica = 1
        while True:
            instance_id = replica_id(spec.model, replica)
            instance = held.get(instance_id)
            if instance is None or instance.state is InstanceState.FAILED or not self.is_trusted(instance):
                return instance_id, None
            if suits(instance, spec):
                return instance_id, instance
            replica += 1

    async def _place(self, card: ModelCard, spec: InstanceSpec, instance_id: str) -> InstanceInfo:
        def on_progress(phase: str, done: int, total: int) -> None:
            self._progress[spec.model] = (phase, done, total)

        try:
            found = await self._mend(spec, instance_id, on_progress)
            if found is None:
                stale = self._owned.monitors.pop(instance_id, None)
                if stale is not None:
                    await self._owned.end(stale)
                found = await self._placer.place(
                    card, spec, instance_id, self._owned.known.above(instance_id), on_progress
                )
        finally:
            self._progress.pop(spec.model, None)
        monitor, instance = found
        instance = replace(instance, is_auto=spec.is_auto or instance.is_auto)
        self._owned.take(monitor, instance)
        return instance

    async def _mend(
        self, spec: InstanceSpec, instance_id: str, on_progress: OnProgress
    ) -> tuple[RingMonitor, InstanceInfo] | None:
        """Recover an abandoned ring from its remaining stages; None if no such ring matches the spec, or recovery
        fails.

        Raises BallotBeatenError if another peer is recovering it.
        """
        left = self._owned.known.lapsed(instance_id) or self._distrusted(instance_id)
        if left is None or not suits(left, spec):
            return None
        above = max(self._owned.known.above(instance_id), left.ballot)
        stale = self._owned.monitors.pop(instance_id, None)
        if stale is not None:  # its watch would report this recovery as a loss
            await stale.close()
        try:
            monitor, instance = await self._recoverer.recover(left.plan, above, on_progress, only_what_is_left=True)
            return monitor, replace(instance, is_auto=left.is_auto)
        except MeshError as exc:
            if stale is not None:
                self._membership.put_instance(instance_id, None)
            if isinstance(exc, BallotBeatenError):
                raise
            _log.info("%s cannot be recovered, placing it again: %s", instance_id, exc)
            return None

    def _distrusted(self, instance_id: str) -> InstanceInfo | None:
        """The instance in the view that its owner reports as ready and this node avoids."""
        for _, one in self.all():
            if one.plan.instance_id == instance_id and one.state is InstanceState.READY and not self.is_trusted(one):
                return one
        return None

    async def _join(self, instance_id: str, spec: InstanceSpec, ballot: Ballot) -> InstanceInfo:
        """Wait for the instance that another peer is placing. Raises StageLostError if it does not become ready, and at
        once if its driver is out of reach of this node, which could not use it."""
        clock = asyncio.get_running_loop().time
        give_up_at = clock() + WINNER_S
        while True:
            for _, instance in self.all():
                if instance.plan.instance_id != instance_id or instance.ballot < ballot:
                    continue
                if self._is_out_of_reach(instance):
                    driver = instance.plan.peer_ids[-1]
                    raise StageLostError(f"peer {driver[:8]}, which drives {instance_id}, does not answer this node")
                if instance.state is InstanceState.READY and suits(instance, spec):
                    return instance
                if instance.state is InstanceState.LOADING:
                    give_up_at = clock() + WINNER_S
            if clock() > give_up_at:
                raise StageLostError(f"placing {instance_id} failed: the plan of ballot {ballot} was never committed")
            await self._membership.changed.wait(0.5)
