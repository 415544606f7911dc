"""Models that no peer has are listed with an estimate of their size, wherever the card or its id says enough."""

from __future__ import annotations

from typing import Any

import pytest

from exo_mesh.api.listed import known_object
from exo_mesh.cli.verbs.models import facts
from exo_mesh.models.cards.card_store import shipped_cards
from exo_mesh.models.cards.estimate import estimated_bytes
from exo_mesh.models.cards.toml_card import TomlCard


@pytest.mark.parametrize(
    ("card", "billions_of_bytes"),
    [
        (TomlCard(id="org/m-0.5B-Instruct"), 1.0),
        (TomlCard(id="org/m-135M"), 0.27),
        (TomlCard(id="org/m-30B-A3B"), 60.0),
        (TomlCard(id="org/command-r7b-12-2024"), 14.0),
        (TomlCard(id="org/OLMoE-1B-7B-0924"), 14.0),
        (TomlCard(id="org/Mixtral-8x7B-v0.1"), 91.84),
        (TomlCard(id="org/m-4B-4bit", quantization="4bit"), 2.25),
        (TomlCard(id="org/m-4B-8bit"), 4.25),
        (TomlCard(id="org/m-8B-FP8"), 8.0),
        (TomlCard(id="org/m-8B-1bit", quantization="1bit"), 1.5),
        (TomlCard(id="org/m-17B-16E"), 0.0),
        (TomlCard(id="org/m-17B-16E", parameters_billions=109), 218.0),
        (TomlCard(id="org/m-E2B-it"), 0.0),
        (TomlCard(id="org/m-A13B"), 0.0),
        (TomlCard(id="org/phi-4"), 0.0),
        (TomlCard(id="org/nick", base_model="org/m-2B"), 4.0),
        (TomlCard(id="org/m-7B", storage_size=5, source="a test"), 5e-9),
    ],
    ids=lambda value: value.id if isinstance(value, TomlCard) else "",
)
def test_the_size_follows_from_parameters_and_bits(card: TomlCard, billions_of_bytes: float) -> None:
    assert estimated_bytes(card) == pytest.approx(billions_of_bytes * 1e9)


def test_few_shipped_cards_have_no_size() -> None:
    unknown = [card.id for card in shipped_cards() if not estimated_bytes(card)]
    assert len(unknown) < len(shipped_cards()) / 10, unknown


def test_an_estimate_is_shown_as_one() -> None:
    peers = [{"id": "p", "name": "p"}]
    state: dict[str, Any] = {"view": {"peers": peers}, "telemetry": {"p": {"usable_bytes": 2 * 10**9}}}
    model = known_object(TomlCard(id="org/m-0.5B", n_layers=24, source="a test"), 0)
    assert (model["num_bytes"], model["estimated_bytes"]) == (0, 10**9)
    assert facts.size_text(model["num_bytes"], model["estimated_bytes"]) == f"~{facts.size_text(10**9)}"
    assert facts.held_layers(model, state, []) == "0/24"
    assert facts.fit_text(0, state, model["estimated_bytes"]) == "yes, 1 peer"
    assert facts.fit_text(0, state, 3 * 10**9) == "no: ~3.0 GB of weights, 2.0 GB usable"
    assert facts.size_text(0) == "?"


def test_whether_a_model_fits_is_asked_without_what_stays_on_disk() -> None:
    card = next(card for card in shipped_cards() if card.id == "deepseek-ai/DeepSeek-V4.1-Flash")
    model = known_object(card, 0)
    assert facts.size_text(model["num_bytes"]) == "510.3 GB"
    assert facts.memory_bytes(model["num_bytes"], model) == 510_313_353_565 - 202_758_032_400
    peers = [{"id": "p", "name": "p"}]
    state: dict[str, Any] = {"view": {"peers": peers}, "telemetry": {"p": {"usable_bytes": 400 * 10**9}}}
    assert facts.fit_text(facts.memory_bytes(model["num_bytes"], model), state) == "yes, 1 peer"
