"""What a card names besides the model itself."""

from __future__ import annotations

from exo_mesh.models.cards.companions import Companion, companions_of
from exo_mesh.models.cards.toml_card import RuntimeSection, TomlCard, VisionSection


def test_a_card_names_its_companions_the_required_ones_first_and_each_once() -> None:
    card = TomlCard(
        id="org/name",
        vision=VisionSection(weights_repo="org/eyes", processor_repo="org/eyes"),
        runtime=RuntimeSection(assistant_model_repo="org/small@v1", mtp_sidecar_repo="org/name"),
    )
    assert companions_of(card) == [
        Companion("org/eyes", "vision.weights_repo", is_required=True),
        Companion("org/small@v1", "runtime.assistant_model_repo", is_required=False),
    ]
    assert companions_of(TomlCard(id="org/name")) == []
