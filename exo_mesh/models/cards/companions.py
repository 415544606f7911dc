"""Repositories that a card names besides the model's own: they are fetched with it."""

from __future__ import annotations

from dataclasses import dataclass

from exo_mesh.models.cards.toml_card import TomlCard


@dataclass(frozen=True, slots=True)
class Companion:
    """repo: hub id, or ID@REVISION. field: of the card, for people. is_required: without it the model is not whole;
    without the others it answers as well, only slower."""

    repo: str
    field: str
    is_required: bool


def companions_of(card: TomlCard) -> list[Companion]:
    """The companions of a model, the required ones first, each repository once; the model itself is none."""
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
