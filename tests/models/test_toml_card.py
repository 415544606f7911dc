"""A card file is read strictly: what is wrong in it is an error that names file, card and field."""

from __future__ import annotations

import pytest

from exo_mesh.domain.view import MAX_CARD_BYTES
from exo_mesh.errors import ModelError
from exo_mesh.models.cards.toml_card import (
    PlacementSection,
    ReasoningSection,
    TomlCard,
    card_to_toml,
    read_card_text,
    read_cards,
)

CARD = TomlCard(
    id="org/name@v1",
    family="fam",
    architecture="llama",
    aliases=("name:1b",),
    n_layers=16,
    source='config.json of "org/name"',
    reasoning=ReasoningSection(supports_toggle=True, format="token_delimited"),
    placement=PlacementSection(compatible_backends=("mlx-metal",), min_vram_gib=1.5),
)


def test_a_card_survives_being_written_and_read() -> None:
    assert read_card_text(card_to_toml(CARD), "x.toml") == CARD


def test_all_cards_of_a_file_share_its_defaults() -> None:
    text = '[defaults]\nfamily = "f"\n[[cards]]\nid = "a/b"\n[[cards]]\nid = "a/c"\nfamily = "g"\n'
    assert [(card.id, card.family) for card in read_cards(text, "f.toml")] == [("a/b", "f"), ("a/c", "g")]


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ('id = "a/b"\ncolour = 1', "f.toml: colour: there is no such field"),
        ('id = "a/b"\n[vision]\nfov = 1', "f.toml: vision.fov: there is no such field"),
        ('[[cards]]\nid = "a/b"\n[cards.runtime]\nx = 1', "f.toml: a/b: runtime.x: there is no such field"),
        ('id = "a/b"\nn_layers = "many"\nsource = "s"', "f.toml: n_layers: expected `int`, got `str`"),
        ('id = "a/b"\nhidden_size = 0\nsource = "s"', "f.toml: hidden_size: expected `int` >= 1"),
        ('id = "a/b"\n[reasoning]\nformat = "odd"', "f.toml: reasoning.format: invalid enum value 'odd'"),
        ('id = "a/b"\nn_layers = 3', "f.toml: n_layers: a figure needs a source"),
        ('family = "x"', "f.toml: id: this field is required"),
        ('id = "../etc"', "f.toml: id: expected `str` matching"),
        ('id = "a/b\\n"', "f.toml: id: expected `str` matching"),
        ('[[cards]]\nfamily = "x"', "f.toml: cards[0]: id: this field is required"),
        (
            '[[cards]]\nid = "a/b"\naliases = ["x"]\n[[cards]]\nid = "a/c"\naliases = ["X"]',
            "f.toml: x is a name of both a/b",
        ),
        ('extra = 1\n[[cards]]\nid = "a/b"', 'f.toml: unknown field "extra" beside [[cards]]'),
        ("cards = 1", "f.toml: `cards` must be a list"),
        ("id = ", "f.toml is not valid TOML"),
    ],
)
def test_an_error_names_the_file_and_the_field(text: str, error: str) -> None:
    with pytest.raises(ModelError) as caught:
        read_cards(text, "f.toml")
    assert str(caught.value).lower().startswith(error.lower())


def test_a_single_card_is_bounded() -> None:
    with pytest.raises(ModelError, match="longer than"):
        read_card_text(f'id = "a/b"\n#{"x" * MAX_CARD_BYTES}', "x.toml")
    with pytest.raises(ModelError, match="2 cards"):
        read_card_text('[[cards]]\nid = "a/b"\n[[cards]]\nid = "a/c"', "x.toml")
