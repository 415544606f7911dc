"""`exo-mesh show` says what the messages of a model may contain, and Ollama's clients learn it as a capability."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from exo_mesh.api.ollama.describing import capabilities_of
from exo_mesh.cli.verbs.models.facts import input_modalities
from exo_mesh.models.cards.profile import CapabilityProfile
from exo_mesh.models.entry import ModelEntry

SEES = CapabilityProfile("gemma3", supports_image_input=True)


@pytest.mark.parametrize(
    ("profile", "shown"), [(SEES, "text, image"), (replace(SEES, supports_image_input=False), "text")]
)
def test_show_names_what_a_model_takes(profile: CapabilityProfile, shown: str) -> None:
    assert input_modalities({"capabilities": profile.to_json()}) == shown


@pytest.mark.parametrize("model", [{}, {"capabilities": None}])
def test_a_model_of_which_nobody_knows_it_has_a_question_mark(model: dict[str, None]) -> None:
    assert input_modalities(model) == "?"


def test_ollama_clients_learn_that_a_model_takes_images() -> None:
    entry = ModelEntry("m", (), (), 100, (), profile=SEES)
    assert "vision" in capabilities_of(entry)
    assert "vision" not in capabilities_of(replace(entry, profile=replace(SEES, supports_image_input=False)))
