"""The JSON objects of models in lists of models."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from exo_mesh.domain.whole.served import ServedModel
from exo_mesh.models.cards.estimate import estimated_bytes
from exo_mesh.models.cards.toml_card import TomlCard
from exo_mesh.models.entry import ModelEntry

SCHEMA = {"supported": True, "kinds": ["json_object", "json_schema", "regex", "lark", "choice"]}
"""Kinds of grammar that can constrain the answers of any model."""


def model_object(entry: ModelEntry, created: int) -> dict[str, Any]:
    """A model of the mesh. created: the Unix time of the node's start, because OpenAI's clients expect a time."""
    return {
        "id": entry.name,
        "object": "model",
        "created": created,
        "owned_by": "exo-mesh",
        "context_length": entry.context_length,
        "num_bytes": entry.num_bytes,
        "disk_bytes": entry.disk_bytes,
        "num_layers": entry.num_layers,
        "quantization": entry.quantization,
        "dtype": entry.dtype,
        "status": status_of(entry),
        "peers": list(entry.peers),
        "instance_ids": list(entry.instance_ids),
        "aliases": list(entry.aliases),
        "tasks": list(entry.tasks),
        "served_by": [_server(one) for one in (entry.served, *entry.stand_ins) if one is not None],
        "capabilities": None if entry.profile is None else {**entry.profile.to_json(), "schema": SCHEMA},
    }


def status_of(entry: ModelEntry) -> str:
    """loaded, served by a model server, downloaded, or partial: peers have its headers, maybe some of its weights."""
    if entry.instance_ids:
        return "loaded"
    if entry.served is not None:
        return "served"
    return "partial" if entry.is_partial else "downloaded"


def _server(model: ServedModel) -> dict[str, Any]:
    """A model server that answers for the model; prompts and answers leave the mesh there, as text."""
    return {"engine": model.engine, "server": model.server, "model": model.served_name, "gets_text": True}


def known_object(card: TomlCard, created: int, engines: Iterable[str] = ()) -> dict[str, Any]:
    """A model that no peer has, as its card describes it; numbers that the card does not give are 0.

    estimated_bytes: about the size of the weights, by the parameters that the card or its id names. features: the
    capabilities on its card, such as tools and thinking. engines: those that run its architecture, whether or not a
    peer has them.
    """
    return {
        "id": card.id,
        "object": "model",
        "created": created,
        "owned_by": "exo-mesh",
        "context_length": card.context_length or 0,
        "num_bytes": card.storage_size or 0,
        "disk_bytes": card.disk_size or 0,
        "estimated_bytes": estimated_bytes(card),
        "num_layers": card.n_layers or 0,
        "quantization": card.quantization or "",
        "dtype": "",
        "status": "known",
        "peers": [],
        "instance_ids": [],
        "aliases": list(card.aliases),
        "tasks": list(card.tasks),
        "family": card.family or "",
        "features": list(card.capabilities),
        "engines": list(engines),
    }
