"""Describes a model of the mesh as an entry of a list: where it is, whether it runs, and what its card says."""

from __future__ import annotations

from collections.abc import Sequence

from exo_mesh.domain.model import ModelCard
from exo_mesh.domain.view import InstanceState
from exo_mesh.domain.whole.served import SERVED_ARCHITECTURE, SERVED_DIGEST
from exo_mesh.models.entry import ModelEntry
from exo_mesh.models.wiring import ModelParts
from exo_mesh.rings.placing.instances import Instances


def listed_model(
    name: str, peers: Sequence[str], card: ModelCard, models: ModelParts, instances: Instances
) -> ModelEntry:
    """A model as the lists of models show it. peers: ids of the live peers that have it."""
    ready = tuple(instance.plan.instance_id for instance in instances.of_model(name))
    is_loading = bool(instances.of_model(name, InstanceState.LOADING))
    aliases, profile = models.profiles.of(card)
    about = models.shelf.card(card.name)
    served, is_served = models.served, card.architecture == SERVED_ARCHITECTURE
    return ModelEntry(
        name,
        tuple(peers),
        ready,
        card.context_length,
        card.eos_ids,
        is_loading,
        aliases,
        profile,
        num_bytes=0 if is_served else card.total_bytes,
        num_layers=0 if is_served else card.num_layers,
        quantization=card.quantization or (about.quantization if about is not None else None) or "",
        dtype=card.dtype,
        digest=card.digest.removeprefix(SERVED_DIGEST),
        served=served.find(name) if is_served else None,
        stand_ins=tuple(one for other in served.standing_for(name) if (one := served.find(other)) is not None),
        tasks=models.shelf.tasks_of(card),
        is_partial=models.catalogue.is_partial(name),
        disk_bytes=card.disk_bytes,
    )
