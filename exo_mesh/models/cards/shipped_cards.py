"""The cards that are shipped with exo-mesh, read at their first use."""

from __future__ import annotations

from functools import cache
from importlib import resources

from exo_mesh.models.cards.toml_card import TomlCard, read_cards


@cache
def shipped_cards() -> tuple[TomlCard, ...]:
    """Returns all shipped cards, in the order of their files. The first call blocks for some 20 ms. Raises ModelError
    if a shipped file is invalid."""
    folder = resources.files("exo_mesh.models.cards") / "shipped"
    files = sorted((file for file in folder.iterdir() if file.name.endswith(".toml")), key=lambda file: file.name)
    return tuple(card for file in files for card in read_cards(file.read_text(encoding="utf-8"), file.name))
