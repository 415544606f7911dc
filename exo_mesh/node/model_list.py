"""The models of the mesh as entries of a list: where each is, whether it runs, and what its card says."""

from __future__ import annotations

from collections.abc import Sequence

from exo_mesh.domain.model import ModelCard
from exo_mesh.domain.view import InstanceState
from exo_mesh.domain.whole.served import SERVED_ARCHITECTURE, SERVED_DIGEST
from exo_mesh.models.cards.toml_card import TomlCard
from exo_mesh.models.entry import ModelEntry
from exo_mesh.models.parts import ModelParts
from exo_mesh.rings.placing.instances import Instances


class ModelList:
    """Lists the models that live peers have. own_id: of this node."""

    def __init__(self, own_id: str, models: ModelParts, instances: Instances) -> None:
        self._own_id = own_id
        self._models = models
        self._instances = instances

    def all(self) -> list[ModelEntry]:
        """Every model that a live peer has on disk, sorted by name."""
        known = self._models.catalogue.known_card
        return [self._entry(name, peers, known(name)) for name, peers in self._models.catalogue.names().items()]

    def cards_without_files(self) -> list[TomlCard]:
        """The cards of models that no live peer has, sorted by id."""
        there = self._models.catalogue.names()
        return [card for card_id, card in sorted(self._models.shelf.cards().items()) if card_id not in there]

    async def of_name(self, name: str) -> ModelEntry:
        """A model by hub id or alias. Raises UnknownModelError, and ModelError if it cannot be used."""
        card = await self._models.catalogue.card(name)
        known = next((entry for entry in self.all() if entry.name == card.name), None)
        return known or self._entry(card.name, (self._own_id,), card)

    def _entry(self, name: str, peers: Sequence[str], card: ModelCard) -> ModelEntry:
        ready = tuple(instance.plan.instance_id for instance in self._instances.of_model(name))
        is_loading = bool(self._instances.of_model(name, InstanceState.LOADING))
        aliases, profile = self._models.profiles.of(card)
        about = self._models.shelf.card(card.name)
        served = self._models.served
        return ModelEntry(
            name,
            tuple(peers),
            ready,
            card.context_length,
            card.eos_ids,
            is_loading,
            aliases,
            profile,
            num_bytes=card.total_bytes,
            num_layers=card.num_layers,
            quantization=card.quantization or (about.quantization if about is not None else None) or "",
            dtype=card.dtype,
            digest=card.digest.removeprefix(SERVED_DIGEST),
            served=served.find(name) if card.architecture == SERVED_ARCHITECTURE else None,
            stand_ins=tuple(one for other in served.standing_for(name) if (one := served.find(other)) is not None),
            tasks=self._models.shelf.tasks_of(card),
            is_partial=self._models.catalogue.is_partial(name),
        )
