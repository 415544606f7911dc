"""A model without a card gets one from its configuration and its headers."""

from __future__ import annotations

from typing import Any

import pytest

from exo_mesh.domain.model import ModelCard
from exo_mesh.models.cards.from_checkpoint import card_from_checkpoint
from exo_mesh.models.cards.profile import TemplateFacts
from exo_mesh.models.cards.toml_card import card_to_toml, read_card_text

MODEL = ModelCard(
    "org/name", "qwen3", 2, 64, 100, 4096, (1000, 1000), 300, 400, False, 32, "bfloat16", (1,), (1,), "digest"
)


def test_it_has_every_figure_with_its_source() -> None:
    config = {"model_type": "qwen3", "num_key_value_heads": 2, "quantization": {"bits": 4, "group_size": 64}}
    card = card_from_checkpoint(MODEL, config, TemplateFacts(tools=True, thinks=True, toggle=True))
    assert read_card_text(card_to_toml(card), "x.toml") == card
    figures = {"n_layers": 2, "hidden_size": 64, "kv_heads": 2, "context_length": 4096, "storage_size": 2700}
    assert card.figures == figures and card.source == "config.json and headers of org/name"
    assert (card.family, card.quantization, card.is_custom) == ("qwen", "4bit", True)
    assert card.capabilities == ("text", "thinking", "thinking_toggle", "tools")


@pytest.mark.parametrize(
    ("config", "quantization"),
    [
        ({}, None),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "gptq-4bit"),
        ({"text_config": {"quantization_config": {"quant_method": "fp8"}}}, "fp8"),
        ({"quantization_config": {"quant_method": "a b\n"}}, None),
        ({"quantization": {"bits": "4"}, "quantization_config": 3}, None),
    ],
)
def test_the_quantisation_is_as_the_format_says_it(config: dict[str, Any], quantization: str | None) -> None:
    assert card_from_checkpoint(MODEL, config).quantization == quantization


def test_nothing_in_a_configuration_turns_remote_code_on() -> None:
    hostile = {"trust_remote_code": True, "auto_map": {"AutoModel": "x.Y"}, "num_key_value_heads": True,
               "vision_config": {}}  # fmt: skip
    card = card_from_checkpoint(MODEL, hostile)
    assert not card.trust_remote_code and card.kv_heads is None and card.capabilities == ("text", "vision")
