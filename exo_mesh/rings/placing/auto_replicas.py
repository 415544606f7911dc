"""Places further instances of models whose requests queue or whose peers drain, and gives them back; see
domain/routing/replicas.

Every owner of an instance follows its models. The owner with the lowest id places; each owner gives back its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections.abc import Iterable, Mapping

from exo_mesh.base.clock import Clock
from exo_mesh.base.tasks import TaskOwner
from exo_mesh.base.wakeups import next_wakeup
from exo_mesh.domain.device import API, PeerInfo, Telemetry
from exo_mesh.domain.plan import NO_BALLOT, Plan
from exo_mesh.domain.routing.replicas import SMALL, ModelLoad, ReplicaAction, ReplicaPolicy, ReplicaUse
from exo_mesh.domain.view import InstanceInfo, InstanceState
from exo_mesh.domain.whole.served import SERVED_ARCHITECTURE
from exo_mesh.errors import MeshError, PlacementError
from exo_mesh.mesh.membership.service import Membership
from exo_mesh.models.catalogue import Catalogue
from exo_mesh.rings.placing.choosing import slots_of
from exo_mesh.rings.placing.instances import Instances
from exo_mesh.rings.placing.owned_rings import OwnedRings
from exo_mesh.rings.placing.planner import Planner
from exo_mesh.rings.placing.short_peers import draining_members, is_short
from exo_mesh.rings.placing.spec import InstanceSpec

LOOK_EVERY_S = 1.0
"""Readings of other peers are up to this old anyway."""

_log = logging.getLogger(__name__)


class AutoReplicas:
    """Follows the models with an instance that this node owns."""

    def __init__(
        self,
        membership: Membership,
        instances: Instances,
        owned_rings: OwnedRings,
        planner: Planner,
        catalogue: Catalogue,
        clock: Clock,
    ) -> None:
        self._membership = membership
        self._instances = instances
        self._owned = owned_rings
        self._planner = planner
        self._catalogue = catalogue
        self._clock = clock
        self._policies: dict[str, ReplicaPolicy] = {}
        self._is_free: dict[str, bool] = {}
        self._placing: dict[str, asyncio.Task[None]] = {}
        self._tasks = TaskOwner()

    def start(self) -> None:
        self._tasks.keep(self._follow, "automatic instances")

    @property
    def ended_tasks(self) -> Mapping[str, str]:
        """Long-lived tasks that ended because of a bug; see TaskOwner."""
        return self._tasks.ended

    async def stop(self) -> None:
        """Stop placing; what was placed stays."""
        await self._tasks.close()

    async def _follow(self) -> None:
        while True:
            await next_wakeup(LOOK_EVERY_S)
            await self._look()

    async def _look(self) -> None:
        models = {monitor.plan.model for monitor in self._owned.monitors.values()}
        self._policies = {model: self._policies.get(model) or ReplicaPolicy() for model in sorted(models)}
        if not models:
            return
        readings = self._membership.last_telemetry
        await self._learn(models)
        for model in self._is_free:
            policy, use = self._policies[model], self._use(model, readings)
            action = policy.step(use, self._clock())
            if action in (ReplicaAction.PLACE, ReplicaAction.REPLACE):
                is_for_drain = action is ReplicaAction.REPLACE
                task = self._tasks.start(
                    self._place(model, use, policy, is_for_drain=is_for_drain), f"one more instance of {model}"
                )
                self._placing[model] = task
                task.add_done_callback(functools.partial(self._ended, model))
            elif action is ReplicaAction.GIVE_BACK and use.last_auto is not None:
                _log.info("giving back %s: the load of %s has been low", use.last_auto.instance_id, model)
                self._owned.unload(use.last_auto.instance_id)

    def _ended(self, model: str, task: asyncio.Task[None]) -> None:
        if self._placing.get(model) is task:
            del self._placing[model]

    async def _learn(self, models: Iterable[str]) -> None:
        """Find out which models a server has anyway; a model whose card cannot be read now is left for later."""
        self._is_free = {model: is_free for model, is_free in self._is_free.items() if model in self._policies}
        for model in models:
            if model not in self._is_free:
                with contextlib.suppress(MeshError):
                    card = await self._catalogue.card(model)
                    self._is_free[model] = card.architecture == SERVED_ARCHITECTURE

    def _use(self, model: str, readings: Mapping[str, Telemetry]) -> ModelLoad:
        """The instances of a model and their load."""
        own_id = self._membership.own.id
        held = [(owner, one) for owner, one in self._instances.all() if one.plan.model == model]
        ready = [(owner, one) for owner, one in held if one.state is InstanceState.READY]
        ready.sort(key=lambda item: (len(item[1].plan.instance_id), item[1].plan.instance_id))
        loading = any(one.state is InstanceState.LOADING for _, one in held)
        return ModelLoad(
            [self._replica(owner, one, readings) for owner, one in ready],
            may_place=min((owner for owner, _ in ready), default="") == own_id,
            is_changing=loading or model in self._placing,
            max_instances=sum(info.role != API for info in self._infos()),
            is_free=self._is_free[model],
        )

    def _replica(self, owner: str, instance: InstanceInfo, readings: Mapping[str, Telemetry]) -> ReplicaUse:
        instance_id, is_mine = instance.plan.instance_id, owner == self._membership.own.id
        reading = readings.get(instance.plan.peer_ids[-1])
        is_kept = is_mine and self._owned.unused.is_kept(instance_id)
        return ReplicaUse(
            instance_id,
            0 if reading is None else reading.waiting.get(instance_id, 0),
            0 if reading is None else reading.outstanding.get(instance_id, 0),
            slots_of(instance, reading),
            is_auto=instance.is_auto and not is_kept,
            is_mine=is_mine,
            is_leaving=bool(draining_members(instance.plan, readings)),
        )

    async def _place(self, model: str, use: ModelLoad, policy: ReplicaPolicy, *, is_for_drain: bool) -> None:
        why = "its peers drain" if is_for_drain else "requests had to wait"
        try:
            spec = self._spec_elsewhere(model) if is_for_drain else await self._spec(model, is_free=use.is_free)
            instance = await self._instances.ensure(spec)
        except MeshError as exc:
            policy.failed(self._clock())
            _log.info("no further instance of %s because %s: %s", model, why, exc)
            return
        policy.placed()
        _log.info("%s serves %s too, because %s", instance.plan.instance_id, model, why)

    def _spec_elsewhere(self, model: str) -> InstanceSpec:
        """The same model on peers that neither drain nor are short of memory. It may take as much memory as a request
        could ask for: it replaces an instance, whose context it keeps."""
        held = [one.plan for _, one in self._instances.all() if one.plan.model == model]
        unable = _unable({info.id for info in self._infos()}, self._membership.telemetry)
        context = max((plan.context_limit for plan in held), default=None)
        return InstanceSpec(model, context_limit=context, exclude_peers=tuple(sorted(unable)), is_auto=True)

    async def _spec(self, model: str, *, is_free: bool) -> InstanceSpec:
        """What to place. Raises PlacementError if there is no room for it.

        Candidates are the peers with the files that do not serve the model, do not drain and have memory. Nothing is
        downloaded for an automatic replica.
        """
        held = [one.plan for _, one in self._instances.all() if one.plan.model == model]
        readings = self._membership.telemetry
        everybody = {info.id for info in self._infos()}
        busy = {peer_id for plan in held for peer_id in plan.member_ids} | _unable(everybody, readings)
        context = None if is_free else max((plan.context_limit for plan in held), default=None)
        spec = InstanceSpec(model, context_limit=context, exclude_peers=tuple(sorted(busy)), is_auto=True)
        card = await self._catalogue.card(model)
        ballot = NO_BALLOT.next_for(self._membership.own.id)
        plan = await self._planner.propose(card, spec, "preview", ballot, hopeless=True)
        if not is_free:
            _require_small(plan)
        return InstanceSpec(
            model,
            context_limit=context,
            exclude_peers=tuple(sorted(everybody - set(plan.member_ids))),
            is_auto=True,
        )

    def _infos(self) -> list[PeerInfo]:
        return [self._membership.own, *(peer.info for peer in self._membership.peers)]


def _unable(peer_ids: Iterable[str], readings: Mapping[str, Telemetry]) -> set[str]:
    """The peers that drain or are short of memory."""
    return {
        peer_id
        for peer_id in peer_ids
        if peer_id in readings and (readings[peer_id].is_draining or is_short(readings[peer_id]))
    }


def _require_small(plan: Plan) -> None:
    """Raise PlacementError if a plan takes more than its share of the free memory of a peer."""
    usable = dict(plan.inputs.candidates)
    for stage in plan.stages:
        free = min(usable.get(peer_id, 0) for peer_id in stage.peers)
        if stage.reserve_bytes > SMALL * free:
            raise PlacementError(
                f"{stage.peer_id[:8]} would give it {stage.reserve_bytes} of {free} free bytes, more than {SMALL:.0%}"
            )
