"""A model as the mesh lists it. Pure."""

from __future__ import annotations

import msgspec

from exo_mesh.domain.embedding import DECODER_TASKS
from exo_mesh.domain.whole.served import ServedModel
from exo_mesh.models.cards.profile import CapabilityProfile


class ModelEntry(msgspec.Struct, frozen=True):
    """A model that some live peer has on disk, or parts of it. context_length: of the checkpoint.

    instance_ids: the instances that are ready. is_loading: another instance is starting, or recovering from a loss.
    aliases: other names in its card. profile: its capabilities, as far as known. num_bytes, num_layers: of all weights;
    0 if only a model server has them. disk_bytes: of those that stay on disk. quantization: of the weights, "" if
    unknown. dtype: of the activations. digest: SHA-256 by which peers recognise the model, 64 hex digits. served: set
    if a model server has it, and no peer has its files. stand_ins: models of model servers that can answer for it.
    tasks: what it is for, by the names on cards. is_partial: no peer has all its files.
    """

    name: str
    peers: tuple[str, ...]
    instance_ids: tuple[str, ...]
    context_length: int
    eos_ids: tuple[int, ...]
    is_loading: bool = False
    aliases: tuple[str, ...] = ()
    profile: CapabilityProfile | None = None
    num_bytes: int = 0
    num_layers: int = 0
    quantization: str = ""
    dtype: str = ""
    digest: str = ""
    served: ServedModel | None = None
    stand_ins: tuple[ServedModel, ...] = ()
    tasks: tuple[str, ...] = DECODER_TASKS
    is_partial: bool = False
    disk_bytes: int = 0
