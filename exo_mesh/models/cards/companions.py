"""Repositories that a card names besides the model's own: they are fetched with the model."""

from __future__ import annotations

import msgspec

from exo_mesh.models.cards.toml_card import TomlCard


class Companion(msgspec.Struct, frozen=True):
    """A repository that a card names. repo: hub id, or ID@REVISION. field: the card's field, for people. is_required:
    the model is incomplete without it; without the others it gives the same answers, only slower."""

    repo: str
    field: str
    is_required: bool


def companions_of(card: TomlCard) -> list[Companion]:
    """Returns the companions of a model, the required ones first, each repository once, without the model itself."""
    vision, runtime = card.vision, card.runtime
    named = [
        ("vision.weights_repo", None if vision is None else vision.weights_repo, True),
        ("vision.processor_repo", None if vision is None else vision.processor_repo, True),
        ("runtime.assistant_model_repo", None if runtime is None else runtime.assistant_model_repo, False),
        ("runtime.mtp_sidecar_repo", None if runtime is None else runtime.mtp_sidecar_repo, False),
    ]
    found: dict[str, Companion] = {}
    for field, repo, is_required in named:
        if repo is not None and repo != card.id:
            found.setdefault(repo, Companion(repo, field, is_required))
    return list(found.values())
