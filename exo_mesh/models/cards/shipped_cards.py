"""The cards that come with exo-mesh, read when somebody first asks for one."""

from __future__ import annotations

from functools import cache
from importlib import resources

from exo_mesh.models.cards.toml_card import TomlCard, read_cards


@cache
def shipped_cards() -> tuple[TomlCard, ...]:
    """All of them, in the order of their files. Blocking at first, for some 20 ms. Raises ModelError if one of our own
    files is wrong."""
    folder = resources.files("exo_mesh.models.cards") / "shipped"
    files = sorted((file for file in folder.iterdir() if file.name.endswith(".toml")), key=lambda file: file.name)
    return tuple(card for file in files for card in read_cards(file.read_text(encoding="utf-8"), file.name))
