"""The engines that run each model on this machine: which, in what order, and what this node publishes about them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from msgspec.structs import replace

from exo_mesh.domain.model import ModelCard
from exo_mesh.domain.view import InstanceState
from exo_mesh.domain.whole.served import SERVED_ARCHITECTURE
from exo_mesh.engine.contract import NamesQuantisations
from exo_mesh.engine.registry import Registry
from exo_mesh.machine import this_machine
from exo_mesh.mesh.membership.service import Membership
from exo_mesh.models.engine_speeds import SpeedNeeds
from exo_mesh.models.wiring import ModelParts
from exo_mesh.rings.hosting.stage_host import StageHost
from exo_mesh.settings.config import Settings

MAX_LOOKS = 3
"""Most rescans at once while models keep changing; the next round continues."""

ModelEngines = tuple[tuple[str, tuple[str, ...]], ...]
"""The engines that run each model on this machine; see PeerInfo.model_engines."""


class OwnEngines:
    """Orders the engines of this machine per model: first the user's choice, then by measured speed. Publishes the
    models with them."""

    def __init__(self, settings: Settings, registry: Registry, membership: Membership, models: ModelParts) -> None:
        self._settings = settings
        self._registry = registry
        self._membership = membership
        self._models = models

    def of_card(self, card: ModelCard) -> tuple[str, ...]:
        """The engines that run a model here, best first."""
        if card.architecture == SERVED_ARCHITECTURE:
            return self._membership.own.engines_for(card.name)
        return self._of_model(card.name, card.architecture)

    def of_local_models(self) -> ModelEngines:
        """The engines that run each model of this machine; see PeerInfo.model_engines. Blocking."""
        methods = self._models.catalogue.local_quant_methods()
        architectures = self._models.catalogue.local_architectures.items()
        return tuple(
            (name, tuple(filter(self._reads(methods.get(name, "")), self._of_model(name, architecture))))
            for name, architecture in architectures
        )

    def _reads(self, method: str) -> Callable[[str], bool]:
        """Whether an engine reads checkpoints of a quantisation, as far as it says; see NamesQuantisations."""

        def reads(engine: str) -> bool:
            provider = self._registry.provider(engine)
            return not method or not isinstance(provider, NamesQuantisations) or method in provider.quant_methods

        return reads

    async def announce_models(self, *, is_sure: bool = False) -> None:
        """Rescans the local models and publishes them if they changed.

        is_sure: files have just changed, so a rescan that already runs is not enough.
        """
        catalogue = self._models.catalogue
        if is_sure:
            catalogue.look_soon()
        has_news = await catalogue.rescan()
        for _ in range(MAX_LOOKS):
            if not catalogue.is_due:
                break
            has_news |= await catalogue.rescan()
        if has_news:
            engines = await asyncio.to_thread(self.of_local_models)
            names, partial = catalogue.local_names, catalogue.partial_names
            own = replace(self._membership.own, models=names, partial_models=partial, model_engines=engines)
            self._membership.describe(own)

    def needs(self, host: StageHost, has_work: Callable[[], bool]) -> SpeedNeeds:
        """What the measurement of engines needs to know. has_work: whether this node serves requests."""
        membership = self._membership

        def is_busy() -> bool:
            loads = any(
                held.state is InstanceState.LOADING and membership.own.id in held.plan.member_ids
                for _, held in membership.view.instances()
            )
            return loads or has_work() or any(stage.beat.sequences for stage in host.beats())

        return SpeedNeeds(
            self._of_model,
            is_busy,
            host.usable_bytes,
            lambda: [(held.plan.model, held.plan.model_digest) for _, held in membership.view.instances()],
            lambda: next(iter(membership.own.devices), None),
            self._announce_speeds,
        )

    def _of_model(self, model: str, architecture: str) -> tuple[str, ...]:
        wanted = self._settings.model_engines.get(model)
        engines = this_machine.engines_for(self._registry, self._settings.engine, wanted, architecture)
        return self._models.speeds.ordered(model, engines, num_chosen=int(engines[:1] == (wanted,)))

    async def _announce_speeds(self) -> None:
        """Publishes the measured speeds, and the order of the engines that follows from them."""
        engines = await asyncio.to_thread(self.of_local_models)
        speeds = self._models.speeds.published()
        self._membership.describe(replace(self._membership.own, model_engines=engines, engine_speeds=speeds))
