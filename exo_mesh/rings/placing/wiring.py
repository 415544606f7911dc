"""Wires the parts of a node that decide what the mesh runs."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping

import msgspec

from exo_mesh.base.clock import Clock
from exo_mesh.base.telemetry.metrics import Metrics
from exo_mesh.domain.model import ModelCard
from exo_mesh.domain.plan import Plan
from exo_mesh.domain.runner_limits import RunnerLimits
from exo_mesh.engine.registry import Registry
from exo_mesh.mesh.membership.service import Membership
from exo_mesh.models.wiring import ModelParts
from exo_mesh.rings.hosting.stage_host import StageHost
from exo_mesh.rings.placing.auto_replicas import AutoReplicas
from exo_mesh.rings.placing.candidate_pool import CandidatePool, Here
from exo_mesh.rings.placing.group_facts import GroupKnowledge
from exo_mesh.rings.placing.instances import Instances
from exo_mesh.rings.placing.members import Members
from exo_mesh.rings.placing.owned_rings import OwnedRings
from exo_mesh.rings.placing.placer import Placer
from exo_mesh.rings.placing.planner import Planner
from exo_mesh.rings.placing.recoverer import Recoverer
from exo_mesh.rings.placing.ring_use import RingUse
from exo_mesh.settings.effective import EffectiveSettings


class InstanceParts(msgspec.Struct, frozen=True):
    """The parts that manage instances. members: the only way from here to stages. owned_rings: this node's rings.
    instances: those of the whole mesh. auto_replicas: None if that is off."""

    members: Members
    planner: Planner
    placer: Placer
    owned_rings: OwnedRings
    instances: Instances
    auto_replicas: AutoReplicas | None

    @staticmethod
    def build(
        effective: EffectiveSettings,
        registry: Registry,
        membership: Membership,
        models: ModelParts,
        host: StageHost,
        engines_for: Callable[[ModelCard], tuple[str, ...]],
        metrics: Metrics,
        limits: RunnerLimits,
        clock: Clock,
        rng: random.Random,
        own_requests: Callable[[], Mapping[str, int]],
    ) -> InstanceParts:
        """engines_for: the engines that run a model on this machine, best first. own_requests: see RingUse."""
        settings = effective.own
        members = Members(host, membership)
        use = RingUse(membership, members, own_requests)
        here = Here(host.usable_bytes, host.memory.capacity_bytes, engines_for)
        pool = CandidatePool(membership, here, models.shelf.rules_of)
        groups = GroupKnowledge(
            settings, registry, membership.view.peers, plans_in_force(membership), models.texts.directory, clock
        )
        planner = Planner(effective, membership, models.surveys, models.mixing, pool, groups)
        placer = Placer(planner, membership, members, metrics, pool, limits, groups, use)
        recoverer = Recoverer(membership, members, models.catalogue, planner, models.mixing, metrics, limits, use)
        owned_rings = OwnedRings(membership, members, recoverer, limits, use, settings.idle_unload)
        instances = Instances(membership, owned_rings, placer, models.catalogue, recoverer, rng, clock)
        auto_replicas = None
        if settings.auto_replicas == "on":
            auto_replicas = AutoReplicas(membership, instances, owned_rings, planner, models.catalogue, clock)
        return InstanceParts(members, planner, placer, owned_rings, instances, auto_replicas)

    def start(self) -> None:
        """Watch the instances of this node, and place further ones if that is on."""
        self.owned_rings.start()
        if self.auto_replicas is not None:
            self.auto_replicas.start()

    @property
    def ended_tasks(self) -> dict[str, str]:
        """Long-lived tasks that ended because of a bug; see TaskOwner."""
        parts: list[OwnedRings | AutoReplicas] = [
            self.owned_rings,
            *([] if self.auto_replicas is None else [self.auto_replicas]),
        ]
        return {name: exception for part in parts for name, exception in part.ended_tasks.items()}

    async def stop(self) -> None:
        """Stop placing, and leave the instances that this node owns to their other members."""
        if self.auto_replicas is not None:
            await self.auto_replicas.stop()
        await self.instances.stop()


def plans_in_force(membership: Membership) -> Callable[[], list[Plan]]:
    """The plans of all instances that this node knows, each time it is called."""
    return lambda: [instance.plan for _, instance in membership.view.instances()]
