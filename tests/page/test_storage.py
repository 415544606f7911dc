"""What the page keeps in the browser: preferences and conversations for good, the key for the life of a tab."""

from __future__ import annotations

import re

from exo_mesh.api.web.assets import FOLDER

SOURCES = {path.name: path.read_text() for path in (FOLDER / "app").glob("*.js")}
FOR_GOOD = {'"exo.theme"', '"exo.language"', '"exo.presets"', '"exo.members"', "name"}
"""`name`: of an entry in which a version before this one kept a conversation; it is moved."""


def kept(storage: str) -> set[str]:
    calls = rf"{storage}\.(?:get|set|remove)Item\(([^,)]+)"
    return {name for text in SOURCES.values() for name in re.findall(calls, text)}


def test_preferences_and_conversations_outlive_the_tab_and_the_key_does_not() -> None:
    assert kept("localStorage") == FOR_GOOD
    assert '"exo.key"' in kept("sessionStorage") and not kept("sessionStorage") & FOR_GOOD
    assert 'const OLD_PREFIX = "exo.conversation.";' in SOURCES["conversations.js"]
    others = {name for name, text in SOURCES.items() if re.search(r"indexedDB|document\.cookie|caches\.", text)}
    assert others == {"conversations.js"}, "no other place"
    assert "caches." in (FOLDER / "worker.js").read_text(), "which keeps the files of the page, and no data"
