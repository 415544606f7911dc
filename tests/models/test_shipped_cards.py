"""The cards that come with exo-mesh: all can be read, and what they state is what the installed libraries state."""

from __future__ import annotations

import importlib.util
import math
import re
from functools import cache
from importlib import metadata
from pathlib import Path

import pytest

from exo_mesh.models.cards.card_store import shipped_cards
from exo_mesh.models.cards.toml_card import TomlCard

FIELDS = {"n_layers": "num_hidden_layers", "hidden_size": "hidden_size", "kv_heads": "num_key_value_heads",
          "context_length": "max_position_embeddings"}  # fmt: skip
"""Figures of a card, and how transformers calls them."""


def package(name: str) -> Path:
    """Where an optional library is installed, without importing it."""
    found = importlib.util.find_spec(name)
    if found is None or not found.submodule_search_locations:
        pytest.skip(f"{name} is not installed")
    return Path(found.submodule_search_locations[0])


@cache
def config_sources() -> dict[str, str]:
    """The source of each configuration class of transformers, by name."""
    found: dict[str, str] = {}
    for file in (package("transformers") / "models").glob("*/configuration_*.py"):
        text = file.read_text(encoding="utf-8")
        for source in re.split(r"^(?=class )", text, flags=re.M)[1:]:
            found[re.match(r"class (\w+)", source)[1]] = source  # type: ignore[index]
    return found


def class_of(card: TomlCard) -> str | None:
    """The class of transformers that states a card's figures; None if a public thread states them."""
    found = re.fullmatch(
        r"defaults of (\w+) in transformers [\d.]+|github\.com/[\w.-]+/[\w.-]+/issues/\d+", card.source or ""
    )
    assert found, f"{card.id}: {card.source}"
    return found[1]


def default_of(name: str, field: str) -> int:
    found = re.search(rf"^    {field}: .*? = ([\d_ *]+)", config_sources()[name], re.M)
    assert found, f"{name} has no {field}"
    return math.prod(int(factor) for factor in found[1].split("*"))


def test_there_are_many_and_each_name_stands_for_one() -> None:
    cards = shipped_cards()
    assert len(cards) >= 60
    names = [name.lower() for card in cards for name in (card.id, *card.aliases)]
    assert len(names) == len(set(names))
    families = {card.family for card in cards}
    assert families >= {"llama", "qwen", "mistral", "gemma", "phi", "deepseek", "kimi", "glm", "gpt-oss", "minimax",
                        "nemotron", "granite", "lfm", "smollm"}  # fmt: skip
    assert not any(card.is_custom or card.trust_remote_code for card in cards)


def test_every_architecture_is_one_that_an_installed_library_loads() -> None:
    """mlx_lm has a module for it, perhaps after renaming it; or transformers has a configuration for it."""
    mlx = package("mlx_lm")
    known = {file.stem for file in (mlx / "models").glob("*.py")}
    known |= set(
        re.findall(r'"([\w.\-]+)": "[\w.\-]+",', (mlx / "utils.py").read_text().partition("MODEL_REMAPPING")[2])
    )
    for source in config_sources().values():
        known |= set(re.findall(r'^    model_type(?:: \w+)? = "([\w.\-]+)"', source, re.M))
    named = {card.id: card.architecture for card in shipped_cards() if card.architecture}
    assert len(named) >= 60
    assert {name: word for name, word in named.items() if word not in known} == {}


def test_every_figure_is_the_one_of_its_source() -> None:
    package("transformers")
    installed = metadata.version("transformers")
    if not any(card.source and card.source.endswith(f" {installed}") for card in shipped_cards()):
        pytest.skip(f"the cards were checked against another transformers than {installed}")
    figures = [(card, figure, value) for card in shipped_cards() for figure, value in card.figures.items()]
    assert len(figures) > 60
    stated = [(card, name, value, of) for card, name, value in figures if (of := class_of(card)) is not None]
    assert len(stated) > len(figures) - 5
    wrong = [(card.id, name) for card, name, value, of in stated if value != default_of(of, FIELDS[name])]
    assert wrong == []
