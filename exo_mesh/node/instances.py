"""The instances of the mesh as this node uses them: choose one, place one, watch its own, end one."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import re
from weakref import WeakValueDictionary

from exo_mesh.domain.device import PeerInfo
from exo_mesh.domain.model import ModelCard
from exo_mesh.domain.plan import NO_BALLOT, Ballot
from exo_mesh.domain.view import InstanceInfo, InstanceState, Record, RecordKey
from exo_mesh.errors import DeadlineError, MeshError, StageLostError, TransportError
from exo_mesh.membership.service import Membership
from exo_mesh.node.catalogue import Catalogue
from exo_mesh.node.members import Members
from exo_mesh.node.ownership import Claim, Orphans, adopter, beaten, claim
from exo_mesh.node.placer import BallotBeatenError, Placer
from exo_mesh.node.ring_keeper import RingKeeper
from exo_mesh.node.service import InstanceSpec
from exo_mesh.node.stage_host import StageHost
from exo_mesh.node.supervisor import Limits
from exo_mesh.tasks import TaskOwner

MAX_ATTEMPTS = 6
WINNER_S = 2.0
"""After a lost race: how long the winner's record may take to get here. Records travel at once, probes take 1 s."""

RELEASE_S = 2.0
"""At a stop: how long the members may take to end their stages. What is left at a peer that does not answer ends there
when its owner has been gone for a while."""

_log = logging.getLogger(__name__)


def replica_id(model: str, replica: int) -> str:
    """The same on every peer, so that two peers placing a model at once mean one instance: `org--name-1`."""
    slug = re.sub(r"[^A-Za-z0-9._]+", "-", model.replace("/", "--")).strip("-")
    return f"{slug[-80:]}-{replica}"


def suits(instance: InstanceInfo, spec: InstanceSpec) -> bool:
    """Does an instance fulfil a wish? What the wish leaves open is fulfilled by anything."""
    plan = instance.plan
    return (
        plan.model == spec.model
        and len(plan.stages) >= (spec.min_peers or 1)
        and plan.context_limit >= (spec.context_limit or 0)
        and all(spec.engine in (None, stage.engine) for stage in plan.stages)
        and not set(spec.exclude_peers) & set(plan.peer_ids)
    )


class Instances:
    """Everybody may use any instance in the view; the peer that placed one (its owner) watches and ends it."""

    def __init__(
        self,
        membership: Membership,
        members: Members,
        placer: Placer,
        catalogue: Catalogue,
        host: StageHost,
        runner_limits: Limits,
        rng: random.Random,
    ) -> None:
        self._membership = membership
        self._members = members
        self._placer = placer
        self._catalogue = catalogue
        self._host = host
        self._runner_limits = runner_limits
        self._rng = rng
        self._keepers: dict[str, RingKeeper] = {}
        self._flights: dict[InstanceSpec, asyncio.Task[InstanceInfo]] = {}
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._progress: dict[str, tuple[int, int]] = {}
        self._highest: dict[str, Ballot] = {}
        self._distrusted: dict[str, Ballot] = {}
        self._orphans = Orphans()
        self._tasks = TaskOwner()

    async def stop(self) -> None:
        """End every instance this node owns, at all members that answer within RELEASE_S."""
        keepers = list(self._keepers.values())
        self._keepers.clear()
        await asyncio.gather(*(keeper.close() for keeper in keepers))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(RELEASE_S):
                await self._tasks.close()
                await asyncio.gather(*(keeper.release() for keeper in keepers))

    def all(self) -> list[tuple[str, InstanceInfo]]:
        """(owner, instance) of the view whose stages all live, by instance id."""
        return [
            (owner, instance)
            for owner, instance in self._membership.view.instances()
            if all(self._membership.is_alive(peer_id) for peer_id in instance.plan.peer_ids)
        ]

    def of_model(self, model: str, state: InstanceState = InstanceState.READY) -> list[InstanceInfo]:
        return [instance for _, instance in self.all() if instance.plan.model == model and instance.state is state]

    def progress(self, model: str) -> tuple[int, int]:
        """(done, total) of the placement of a model that this node has under way; zeros if unknown."""
        return self._progress.get(model, (0, 0))

    @property
    def is_placing(self) -> bool:
        return bool(self._flights)

    def distrust(self, instance: InstanceInfo) -> None:
        """This plan has failed a request here: use it no more, and place the model by a higher ballot if need be."""
        plan = instance.plan
        self._distrusted[plan.instance_id] = max(plan.ballot, self._distrusted.get(plan.instance_id, NO_BALLOT))

    def is_trusted(self, instance: InstanceInfo) -> bool:
        return instance.plan.ballot > self._distrusted.get(instance.plan.instance_id, NO_BALLOT)

    async def ensure(self, spec: InstanceSpec) -> InstanceInfo:
        """A ready instance that suits the wish: one there is, or one that is placed now; all who ask at once share it.

        Raises PlacementError, UnknownModelError, or the failure of a stage.
        """
        ready = [one for one in self.of_model(spec.model) if suits(one, spec) and self.is_trusted(one)]
        if ready:
            return self._rng.choice(ready)
        flight = self._flights.get(spec)
        if flight is None:
            flight = self._tasks.start(self._place_or_join(spec), f"place {spec.model}", for_request=True)
            self._flights[spec] = flight
            flight.add_done_callback(lambda _: self._flights.pop(spec, None))
        try:
            return await asyncio.shield(flight)
        except asyncio.CancelledError:
            if flight.cancelled():  # not the caller was cancelled, but the placement: somebody deleted the instance
                raise StageLostError(f"{spec.model}: the instance was deleted while it was being placed") from None
            raise

    async def delete(self, instance_id: str) -> bool:
        """End an instance everywhere, whoever owns it; False if nobody does."""
        if await self.delete_own(instance_id):
            return True
        owners = [owner for owner, instance in self.all() if instance.plan.instance_id == instance_id]
        peer = self._membership.peer(owners[0]) if owners else None
        return await peer.client.delete_instance(instance_id) if peer is not None else False

    async def delete_own(self, instance_id: str) -> bool:
        """End an instance that this node owns; False if it owns none of this id."""
        keeper = self._keepers.pop(instance_id, None)
        if keeper is not None:
            # whoever asked may hang up before all members have answered
            await asyncio.shield(self._tasks.start(self._end(instance_id, keeper), f"end {instance_id}"))
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

    def owner_left(self, peer: PeerInfo, records: list[Record]) -> None:
        """A peer is gone: adopt those of its rings that fall to this node."""
        for record in records:
            instance = record.value
            if not isinstance(instance, InstanceInfo) or record.key.id in self._keepers:
                continue
            if adopter(instance, self._membership.is_alive) == self._membership.own.id:
                _log.info("adopting %s from %s", record.key.id, peer.name)
                self._keep(RingKeeper(instance.plan, self._members, lambda done, total: None, self._runner_limits))
                self._keepers[record.key.id].watch()
                self._membership.put_instance(record.key.id, instance)

    async def settle(self, now: float) -> None:
        """Yield rings that others own with more right, and end stages here that nobody owns. Call it each round."""
        records = self._membership.view.records_of_instances()
        for keeper in list(self._keepers.values()):
            match claim(self._membership.own.id, keeper.plan, records):
                case Claim.HAND_OVER:
                    await self._hand_over(keeper)
                case Claim.END:
                    _log.info("%s is ready by a higher ballot; ending %s", keeper.plan.instance_id, keeper.plan.ballot)
                    if self._keepers.get(keeper.plan.instance_id) is keeper:
                        await self.delete_own(keeper.plan.instance_id)
        for instance_id, ballot in self._orphans.due(self._host.stages(), [one for _, one in records], now):
            _log.warning("ending the stage of %s (ballot %s): nobody owns it", instance_id, ballot)
            await self._host.release(instance_id, ballot)

    async def free_beaten(self) -> None:
        """Before this node says that it lives after all: end the stages whose place others have taken."""
        instances = [one for _, one in self._membership.view.records_of_instances()]
        for instance_id, ballot in beaten(self._host.stages(), instances):
            _log.info("ending the stage of %s (ballot %s): a higher ballot is ready", instance_id, ballot)
            await self._host.release(instance_id, ballot)

    async def _hand_over(self, keeper: RingKeeper) -> None:
        instance_id = keeper.plan.instance_id
        if self._keepers.get(instance_id) is keeper:
            _log.info("%s has another owner; leaving it to that", instance_id)
            del self._keepers[instance_id]
            self._membership.put_instance(instance_id, None)
            await keeper.close()

    async def _place_or_join(self, spec: InstanceSpec) -> InstanceInfo:
        turn = self._turns.setdefault(spec.model, asyncio.Lock())
        async with turn:
            card = await self._catalogue.card(spec.model)
            failure: MeshError = StageLostError(f"{spec.model} could not be placed")
            for attempt in range(MAX_ATTEMPTS):
                instance_id, held = self._id_for(spec)
                if held is not None and held.state is InstanceState.READY:
                    return held
                try:
                    if held is not None and held.state is InstanceState.LOADING:
                        return await self._join(instance_id, spec, held.plan.ballot)
                    return await self._place(card, spec, instance_id)
                except BallotBeatenError as exc:
                    failure = exc
                    self._note(instance_id, exc.ballot)
                    try:
                        return await self._join(instance_id, spec, exc.ballot)
                    except (StageLostError, DeadlineError) as lost:
                        failure = lost
                except (StageLostError, TransportError, DeadlineError) as exc:
                    failure = exc
                _log.info("%s: attempt %d: %s", instance_id, attempt + 1, failure)
                await asyncio.sleep(self._rng.uniform(0.05, 0.5) * (attempt + 1))
            raise failure

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
        def on_progress(done: int, total: int) -> None:
            self._progress[spec.model] = (done, total)

        stale = self._keepers.pop(instance_id, None)
        if stale is not None:
            await self._end(instance_id, stale)
        try:
            keeper, instance = await self._placer.place(card, spec, instance_id, self._above(instance_id), on_progress)
        finally:
            self._progress.pop(spec.model, None)
        self._note(instance_id, instance.plan.ballot)
        self._keep(keeper)
        self._membership.put_instance(instance_id, instance)
        return instance

    async def _join(self, instance_id: str, spec: InstanceSpec, ballot: Ballot) -> InstanceInfo:
        """Wait for the instance that another peer is placing. Raises StageLostError when it does not come to be."""
        clock = asyncio.get_running_loop().time
        give_up_at = clock() + WINNER_S
        while True:
            for _, instance in self.all():
                if instance.plan.instance_id != instance_id or instance.plan.ballot < ballot:
                    continue
                if instance.state is InstanceState.READY and suits(instance, spec):
                    return instance
                if instance.state is InstanceState.LOADING:
                    give_up_at = clock() + WINNER_S
            if clock() > give_up_at:
                raise StageLostError(f"the plan of ballot {ballot} for {instance_id} did not come to be")
            await self._membership.changed.wait(0.5)

    def _keep(self, keeper: RingKeeper) -> None:
        self._keepers[keeper.plan.instance_id] = keeper
        self._tasks.start(self._watch(keeper), f"watch {keeper.plan.instance_id}")

    async def _watch(self, keeper: RingKeeper) -> None:
        """When a stage is lost the instance ends; the next request places it again."""
        instance_id = keeper.plan.instance_id
        error = await keeper.lost
        if self._keepers.get(instance_id) is not keeper:
            return
        del self._keepers[instance_id]
        failed = InstanceInfo(keeper.plan, InstanceState.FAILED, reason=str(error))
        self._membership.put_instance(instance_id, failed)
        await self._end(instance_id, keeper)

    async def _end(self, instance_id: str, keeper: RingKeeper) -> None:
        self._note(instance_id, keeper.plan.ballot)
        await keeper.release()
        record = self._membership.view.get(RecordKey("instance", instance_id, self._membership.own.id))
        # by now this node may have begun to place it again
        if record and isinstance(record.value, InstanceInfo) and record.value.plan.ballot <= keeper.plan.ballot:
            self._membership.put_instance(instance_id, None)

    def _above(self, instance_id: str) -> Ballot:
        in_view = [held.plan.ballot for _, held in self._membership.view.instances()
                   if held.plan.instance_id == instance_id]  # fmt: skip
        return max([self._highest.get(instance_id, NO_BALLOT), self._host.promised(instance_id), *in_view])

    def _note(self, instance_id: str, ballot: Ballot) -> None:
        self._highest[instance_id] = max(ballot, self._highest.get(instance_id, NO_BALLOT))
