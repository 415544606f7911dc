"""The instances of the mesh as this node uses them: choose one, place one, delete one."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from weakref import WeakValueDictionary

from exo_mesh.clock import Clock, monotonic
from exo_mesh.domain.group_placement import FAILED, groups_of
from exo_mesh.domain.model import ModelCard
from exo_mesh.domain.pinning import Pin
from exo_mesh.domain.plan import Ballot, Plan
from exo_mesh.domain.view import InstanceInfo, InstanceState, RecordKey
from exo_mesh.errors import (
    DeadlineError,
    InstanceDeletedError,
    MemoryPressureError,
    MeshError,
    StageLostError,
    TransportError,
)
from exo_mesh.instances.avoided_rings import Distrust
from exo_mesh.instances.owned_rings import OwnedRings
from exo_mesh.instances.placer import BallotBeatenError, Placer, StageFailedError
from exo_mesh.instances.recoverer import Recoverer
from exo_mesh.instances.ring_monitor import OnProgress, RingMonitor
from exo_mesh.instances.short_peers import refusal_of, short_members
from exo_mesh.instances.spec import InstanceSpec
from exo_mesh.instances.stage_phases import StagePhase
from exo_mesh.membership.fences import FENCE_S, LEAP, Fence
from exo_mesh.membership.messages import fence_to_proto
from exo_mesh.membership.service import Membership
from exo_mesh.models.catalogue import Catalogue
from exo_mesh.tasks import TaskOwner

PRELOAD_SETTLE_S = 5.0
"""After the start of a node, before it places what it preloads: its peers may be starting, too."""

PRELOAD_RETRY_S = 15.0

MAX_ATTEMPTS = 6
WINNER_S = 2.0
"""After a lost race: how long the winner's record may take to get here. Records travel at once, probes take 1 s."""

OWNER_S = 8.0
"""How long the owner of a ring that failed here, or whoever is to take it over, may take to find out: a machine that is
suddenly off is known to be after 3 s of unanswered pings, and its stage given up after another 3 s."""

SHORTAGE_S = 3.0
"""How long the word of a peer that it is short of memory may take to get here after its ring has refused a request."""

SHORT_RETRY_S = 10.0
"""After a refusal for memory: other programs end, and weights are unloaded, in such times."""

_log = logging.getLogger(__name__)


def replica_id(model: str, replica: int) -> str:
    """The same on every peer, so that two peers placing a model at once mean one instance: `org--name-1`."""
    slug = re.sub(r"[^A-Za-z0-9._]+", "-", model.replace("/", "--")).strip("-")
    return f"{slug[-80:]}-{replica}"


_MIXED = {None: (False, True), "auto": (False, True), "never": (False,), "always": (True,)}
"""By wish for mixed rings: may the engines of a ring differ?"""


def suits(instance: InstanceInfo, spec: InstanceSpec) -> bool:
    """Does an instance fulfil a wish? What the wish leaves open is fulfilled by anything."""
    plan = instance.plan
    return (
        plan.model == spec.model
        and len(plan.member_ids) >= (spec.min_peers or 1)
        and plan.context_limit >= (spec.context_limit or 0)
        and all(spec.engine in (None, stage.engine) for stage in plan.stages)
        and (len(plan.engines) > 1) in _MIXED[spec.mixed_rings]
        and not set(spec.exclude_peers) & set(plan.member_ids)
        and (not spec.pins or _as_pinned(plan, spec.pins))
        and (FAILED in instance.reason or _as_grouped(plan, spec))
    )


def _as_pinned(plan: Plan, pins: Sequence[Pin]) -> bool:
    ordered = sorted(pins, key=lambda pin: pin.start)
    held = [(stage.peers, stage.shard.start, stage.shard.stop) for stage in plan.stages]
    return held == [(pin.group or (pin.peer_id,), pin.start, pin.stop) for pin in ordered] and all(
        pin.engine in (None, stage.engine) for pin, stage in zip(ordered, plan.stages, strict=True)
    )


@dataclass(frozen=True, slots=True)
class Load:
    """What is known when an instance is chosen for a request. own: live requests of this entry peer by instance.
    tokens: of prompt and output, that it may come to."""

    own: Counter[str] = field(default_factory=Counter)
    tokens: int = 0


def _as_grouped(plan: Plan, spec: InstanceSpec) -> bool:
    groups = groups_of(plan)
    if spec.groups:
        return {group.peers for group in groups} >= set(spec.groups)
    return spec.tensor_group is None or max((group.size for group in groups), default=1) == spec.tensor_group


async def _tell(telling: Awaitable[bool]) -> None:
    """Without an error: of a deletion a peer that does not hear now learns by anti-entropy, and a wish is lost."""
    with contextlib.suppress(MeshError):
        await telling


class Instances:
    """Everybody may use any instance in the view; the peer that placed one owns it (see `owned_rings`)."""

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
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._progress: dict[str, tuple[str, int, int]] = {}
        self._distrust = Distrust()
        self._out_of_reach: set[str] = set()
        self._tasks = TaskOwner()

    async def stop(self) -> None:
        """Place no more, and leave what this node owns to others."""
        await self._tasks.close()
        await self._owned.stop()

    def all(self) -> list[tuple[str, InstanceInfo]]:
        """(owner, instance) of the view, by instance id, without the deleted ones. The owner of each lives, and takes
        back its word when a stage is lost; that the node of a stage does not answer says nothing of its runner."""
        return [(owner, one) for owner, one in self._membership.view.instances() if not self.is_deleted(one)]

    def is_deleted(self, instance: InstanceInfo) -> bool:
        """Whether somebody has deleted this instance; one that is placed later has a higher ballot."""
        return self._membership.fences.covers(instance.plan.instance_id, instance.ballot)

    def of_model(self, model: str, state: InstanceState = InstanceState.READY) -> list[InstanceInfo]:
        return [instance for _, instance in self.all() if instance.plan.model == model and instance.state is state]

    def progress(self, model: str) -> tuple[str, int, int]:
        """(phase, done, total) of the placement of a model that this node has under way, see OnProgress; of one that
        another peer has under way, what the view has of its downloads. "placing": no plan has been agreed on yet."""
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
        """How far each stage of an instance is that this node brings up; () of others."""
        return self._placer.phases(instance_id)

    @property
    def is_placing(self) -> bool:
        return bool(self._flights)

    def distrust(self, instance: InstanceInfo) -> None:
        """It has failed a request here: use it no more for a while, and place the model by a higher ballot if need be.

        If it is adopted later, its new owner has reached all its stages, and it gets another chance.
        """
        self._distrust.note(instance, self._clock())
        driver = instance.plan.peer_ids[-1]
        if self._membership.unanswered_s(driver):
            self._out_of_reach.add(driver)
        self._owned.note(instance.plan.instance_id, instance.ballot)  # also when its record is gone by then

    def is_trusted(self, instance: InstanceInfo) -> bool:
        return not (self._distrust.includes(instance, self._clock()) or self._is_out_of_reach(instance))

    def _is_out_of_reach(self, instance: InstanceInfo) -> bool:
        """Is its driver at a peer that failed a request because it does not answer here, and that still does not?

        The others may be well with it, so that nobody mends this."""
        self._out_of_reach = {peer_id for peer_id in self._out_of_reach if self._membership.unanswered_s(peer_id)}
        return instance.plan.peer_ids[-1] in self._out_of_reach

    def ready_for(self, model: str, tokens: int = 0) -> list[InstanceInfo]:
        """Those that a request could run on now: the ones that can hold so many tokens, if there are any, and of these
        the ones without a peer that is short of memory."""
        trusted = [one for one in self.of_model(model) if self.is_trusted(one)]
        ready = [one for one in trusted if one.plan.context_limit >= tokens] or trusted
        readings = self._membership.telemetry if len(ready) > 1 else {}
        return [one for one in ready if not short_members(one.plan, readings)] or ready

    async def elsewhere(self, refused: InstanceInfo, refusal: MemoryPressureError, load: Load) -> InstanceInfo:
        """A ready instance of the same model without the peers of this one that are short of memory, placed now if
        there is none. Raises MemoryPressureError with peer, numbers and remedy."""
        clock = asyncio.get_running_loop().time
        give_up_at = clock() + SHORTAGE_S
        while not (short := short_members(refused.plan, self._membership.telemetry)):
            if clock() >= give_up_at:
                raise refusal
            await self._membership.changed.wait(0.1)
        spec = InstanceSpec(refused.plan.model, exclude_peers=tuple(sorted(short)))
        _log.info(
            "%s is short of memory: using peers besides %s", refused.plan.instance_id, ", ".join(spec.exclude_peers)
        )
        try:
            return await self.ensure(spec, load)
        except MeshError as exc:
            peers = {peer.id: peer for peer in self._membership.view.peers()}
            text = refusal_of(refused.plan, short, peers, f"nor can other peers take it: {exc}")
            raise MemoryPressureError(text, retry_after_s=max(SHORT_RETRY_S, refusal.retry_after_s)) from exc

    def _least_busy(self, ready: Sequence[InstanceInfo], load: Load) -> InstanceInfo:
        """The one with the fewest requests that wait or run: as its driver says, which is a second old, or as this node
        knows of its own ones; then the one with the fewest of its own; of equals any, so that many entry peers do not
        all take the same."""
        said: Counter[str] = Counter()
        for reading in self._membership.telemetry.values() if len(ready) > 1 else ():
            said.update(reading.outstanding)

        def busy(one: InstanceInfo) -> tuple[int, int]:
            own = load.own[one.plan.instance_id]
            return max(said[one.plan.instance_id], own), own

        least = min(map(busy, ready))
        return self._rng.choice([one for one in ready if busy(one) == least])

    async def ensure(self, spec: InstanceSpec, load: Load | None = None) -> InstanceInfo:
        """A ready instance that suits the wish: one there is, or one that is placed now; all who ask at once share it.

        Raises PlacementError, UnknownModelError, or the failure of a stage.
        """
        load = load or Load()
        ready = [one for one in self.ready_for(spec.model, load.tokens) if suits(one, spec)]
        if ready:
            return self._least_busy(ready, load)
        flight = self._flights.get(spec)
        if flight is None:
            flight = self._tasks.start(self._place_or_join(spec), f"place {spec.model}", for_request=True)
            self._flights[spec] = flight
            flight.add_done_callback(lambda _: self._flights.pop(spec, None))
        try:
            return await asyncio.shield(flight)
        except asyncio.CancelledError:
            if flight.cancelled():  # not the caller was cancelled, but the placement: somebody deleted the instance
                raise InstanceDeletedError(
                    f"{spec.model}: the instance was deleted while it was being placed"
                ) from None
            raise

    async def preload(self, models: Sequence[str], find: Callable[[str], Awaitable[ModelCard]]) -> None:
        """Place these models once, unless there are instances of them; try again until each was placed: after a power
        cut its peers come back one by one. What is deleted later stays deleted. find: the model of a name."""
        missing, told = list(models), set[str]()
        pause_s = PRELOAD_SETTLE_S
        while missing:
            await asyncio.sleep(pause_s)
            pause_s = PRELOAD_RETRY_S
            for name in list(missing):
                try:
                    await self.ensure(InstanceSpec((await find(name)).name))
                    missing.remove(name)
                except InstanceDeletedError:
                    missing.remove(name)
                except MeshError as exc:
                    _log.log(logging.DEBUG if name in told else logging.WARNING, "cannot preload %s yet: %s", name, exc)
                    told.add(name)

    def keep_alive(self, instance_id: str, idle_s: float) -> None:
        """Let the owner of an instance know how long it may have nothing to do before it is unloaded; negative: for
        ever. Returns at once; an owner that does not know this call goes by its own setting."""
        if self.wish_idle(instance_id, idle_s):
            return
        owners = {owner for owner, one in self.all() if one.plan.instance_id == instance_id}
        for peer in self._membership.peers:
            if peer.id in owners:
                self._tasks.start(_tell(peer.client.keep_instance(instance_id, idle_s)), f"keep {instance_id}")

    def wish_idle(self, instance_id: str, idle_s: float) -> bool:
        """As keep_alive, of an instance that this node owns; False if it does not."""
        return self._owned.wish_idle(instance_id, idle_s)

    async def delete(self, instance_id: str) -> bool:
        """End an instance everywhere, whoever owns it; False if nobody does.

        Every peer remembers the deletion (see Fences) and ends what it has of the instance. Where two have placed it at
        once and one has yet to give way, both end it. Returns when the owners have ended it.
        """
        records = self._membership.view.records_of_instances()
        owners = {owner for owner, instance in records if instance.plan.instance_id == instance_id}
        if not owners and self._owned.lapsed(instance_id) is None:
            return False
        above = self._owned.above(instance_id)
        fence = Fence(instance_id, Ballot(above.counter + LEAP, self._membership.own.id), FENCE_S)
        self._membership.take_fence(fence)
        waited = []
        for peer in self._membership.peers:
            telling = peer.client.delete_instance(fence_to_proto(fence))
            if peer.id in owners:
                waited.append(telling)
            else:
                self._tasks.start(_tell(telling), f"delete {instance_id}")
        await asyncio.gather(self.delete_own(instance_id), *waited, return_exceptions=True)
        return True  # whatever they answer: they may have heard of the fence before, and who was not reached will hear

    async def delete_own(self, instance_id: str) -> bool:
        """End an instance that this node owns; False if it owns none of this id."""
        monitor = self._owned.monitors.pop(instance_id, None)
        if monitor is not None:
            await self._owned.end(monitor, for_good=True)
            return True
        if await self._owned.stop_recovery(instance_id):
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
                if held is None and await self._somebody_mends(instance_id):
                    continue
                if held is not None and held.state is InstanceState.READY:
                    return held
                try:
                    if held is not None and held.state is InstanceState.LOADING:
                        return await self._join(instance_id, spec, held.ballot)
                    return await self._place(card, spec, instance_id)
                except BallotBeatenError as exc:
                    failure = exc
                    self._owned.note(instance_id, exc.ballot)
                    if exc.ballot.proposer == self._membership.own.id:
                        continue  # used before this node's present start: nobody places by it now
                    try:
                        return await self._join(instance_id, spec, exc.ballot)
                    except (StageLostError, DeadlineError) as lost:
                        failure = lost
                except (StageLostError, StageFailedError, TransportError, DeadlineError) as exc:
                    failure = exc
                if self._membership.fences.noted_since(instance_id, started):
                    raise InstanceDeletedError(f"{instance_id} was deleted while it was being placed") from failure
                _log.info("%s: attempt %d: %s", instance_id, attempt + 1, failure)
                await asyncio.sleep(self._rng.uniform(0.05, 0.5) * (attempt + 1))
            raise failure

    async def _somebody_mends(self, instance_id: str) -> bool:
        """A ring that failed here is somebody's, who may go on with what is left of it: wait for that. True if there is
        something new of it that is of use here."""
        give_up_at = asyncio.get_running_loop().time() + OWNER_S
        while self._owned.is_awaited(instance_id):
            if self._is_there_again(instance_id):
                return True
            is_late = asyncio.get_running_loop().time() > give_up_at or self._is_well_without_us(instance_id)
            if is_late and not self._owned.is_recovering(instance_id):  # two recoveries here would end each other
                return False
            await self._membership.changed.wait(0.1)
        return self._is_there_again(instance_id)

    def _is_there_again(self, instance_id: str) -> bool:
        """Is there a ring of this instance by now that has not failed here?"""
        rings = [one for _, one in self.all() if one.plan.instance_id == instance_id]
        return any(one.state is not InstanceState.FAILED and self.is_trusted(one) for one in rings)

    def _is_well_without_us(self, instance_id: str) -> bool:
        """Is it ready, as far as its owner knows, and only its driver cannot be reached from here?"""
        rings = [one for _, one in self.all() if one.plan.instance_id == instance_id]
        return any(one.state is InstanceState.READY and self._is_out_of_reach(one) for one in rings)

    def _id_for(self, spec: InstanceSpec) -> tuple[str, InstanceInfo | None]:
        """The first replica that suits or is free to be placed, and what the view has of it."""
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
                found = await self._placer.place(card, spec, instance_id, self._owned.above(instance_id), on_progress)
        finally:
            self._progress.pop(spec.model, None)
        self._owned.take(*found)
        return found[1]

    async def _mend(
        self, spec: InstanceSpec, instance_id: str, on_progress: OnProgress
    ) -> tuple[RingMonitor, InstanceInfo] | None:
        """Go on with what is left of a ring that nobody has mended; None if there is none that suits, or it cannot be.

        Raises BallotBeatenError if somebody is at it by now."""
        left = self._owned.lapsed(instance_id) or self._distrusted(instance_id)
        if left is None or not suits(left, spec):
            return None
        above = max(self._owned.above(instance_id), left.ballot)
        stale = self._owned.monitors.pop(instance_id, None)
        if stale is not None:  # it would take what is done now for a loss
            await stale.close()
        try:
            return await self._recoverer.recover(left.plan, above, on_progress, only_what_is_left=True)
        except MeshError as exc:
            if stale is not None:
                self._membership.put_instance(instance_id, None)
            if isinstance(exc, BallotBeatenError):
                raise
            _log.info("nothing is left of %s to go on with: %s", instance_id, exc)
            return None

    def _distrusted(self, instance_id: str) -> InstanceInfo | None:
        """What the view has of an instance that is said to be ready, and is not trusted here."""
        for _, one in self.all():
            if one.plan.instance_id == instance_id and one.state is InstanceState.READY and not self.is_trusted(one):
                return one
        return None

    async def _join(self, instance_id: str, spec: InstanceSpec, ballot: Ballot) -> InstanceInfo:
        """Wait for the instance that another peer is placing. Raises StageLostError when it does not come to be."""
        clock = asyncio.get_running_loop().time
        give_up_at = clock() + WINNER_S
        while True:
            for _, instance in self.all():
                if instance.plan.instance_id != instance_id or instance.ballot < ballot:
                    continue
                if instance.state is InstanceState.READY and suits(instance, spec):
                    return instance
                if instance.state is InstanceState.LOADING:
                    give_up_at = clock() + WINNER_S
            if clock() > give_up_at:
                raise StageLostError(f"the plan of ballot {ballot} for {instance_id} did not come to be")
            await self._membership.changed.wait(0.5)
