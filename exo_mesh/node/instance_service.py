"""Places models, and previews placements, for people who name models and peers by any of their names."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from exo_mesh.domain.model import ModelCard
from exo_mesh.domain.reports import InstanceReport
from exo_mesh.domain.view import InstanceState
from exo_mesh.errors import PlacementError
from exo_mesh.mesh.membership.service import Membership
from exo_mesh.models.wiring import ModelParts
from exo_mesh.node.inspection.describe import describe_instance
from exo_mesh.rings.placing.previews import preview, previews, with_peer_ids
from exo_mesh.rings.placing.spec import InstanceSpec
from exo_mesh.rings.placing.wiring import InstanceParts


class InstanceService:
    """Places models, shows how they would be placed, and ends instances. All failures are MeshErrors."""

    def __init__(self, membership: Membership, models: ModelParts, owning: InstanceParts) -> None:
        self._membership = membership
        self._models = models
        self._owning = owning

    async def delete(self, instance_id: str) -> bool:
        """Stops an instance on all peers; False if it is unknown."""
        return await self._owning.instances.delete(instance_id)

    def keep_loaded(self, instance_id: str, idle_s: float) -> None:
        """Sets how long an instance may be unused before it is unloaded; negative: for ever; 0: as soon as its requests
        have ended. Returns at once."""
        self._owning.instances.keep_alive(instance_id, idle_s)

    def idle_left_s(self, instance_id: str) -> float | None:
        """Seconds until an instance is unloaded if nobody uses it; None: never. For an instance that another peer owns,
        the time that this node's setting allows."""
        return self._owning.instances.idle_left_s(instance_id)

    async def create(self, spec: InstanceSpec) -> InstanceReport:
        """Places a model and waits until it is ready; returns the instance as `/state` lists it."""
        spec = replace(spec, model=(await self._models.catalogue.card(spec.model)).name)
        instance = await self._owning.instances.ensure(with_peer_ids(spec, self._membership.view.peers()))
        owners = [owner for owner, held in self._owning.instances.all() if held.plan.digest == instance.plan.digest]
        owner = owners[0] if owners else instance.plan.ballot.proposer
        return describe_instance(instance, owner, self._owning.instances.phases)

    async def create_replicas(self, spec: InstanceSpec, count: int) -> list[InstanceReport]:
        """Calls create `count` times on disjoint peers; existing instances count. If one cannot be placed, those before
        it stay."""
        spec = with_peer_ids(spec, self._membership.view.peers())
        made: list[InstanceReport] = []
        while len(made) < count:
            used = {peer_id for one in made for stage in one.stages for peer_id in stage.peers}
            made.append(await self.create(replace(spec, exclude_peers=(*spec.exclude_peers, *sorted(used)))))
        return made

    async def previews(self, spec: InstanceSpec) -> list[dict[str, Any]]:
        """Every sensible placement of a model now, with the arithmetic per peer, or the reason why there is none."""
        card, spec = await self._to_preview(spec)
        return await previews(self._owning.planner, card, spec, self._membership.view.peers())

    async def preview(self, spec: InstanceSpec) -> dict[str, Any]:
        """The placement that create would make now, with the arithmetic per peer. Raises PlacementError."""
        card, spec = await self._to_preview(spec)
        return await preview(self._owning.planner, card, spec, self._membership.view.peers())

    async def _to_preview(self, spec: InstanceSpec) -> tuple[ModelCard, InstanceSpec]:
        """The card of the model, and the spec with the ids of its peers. Engines are measured with the model later."""
        card = await self._models.catalogue.card(spec.model)
        self._models.speeds.wish(card)
        return card, with_peer_ids(replace(spec, model=card.name), self._membership.view.peers())

    async def context_limit(self, name: str) -> int:
        """Most tokens of prompt + output of a request for this model, as it is placed or would be placed."""
        instances = self._owning.instances
        placed = instances.of_model(name) or instances.of_model(name, InstanceState.LOADING)
        if placed:  # a request waits for a ring that recovers, and that ring keeps its limit
            return max(instance.plan.context_limit for instance in placed)
        card, spec = await self._models.catalogue.card(name), InstanceSpec(name)
        try:
            return (await self._owning.planner.propose(card, spec)).context_limit
        except PlacementError as exc:
            raise await self._owning.planner.judge(card, spec, exc) from exc
