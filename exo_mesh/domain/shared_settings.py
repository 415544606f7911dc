"""Settings that the whole mesh shares: one text per name, merged in any order to the same result. Pure.

A change gets a counter above every counter seen, so no clock decides which of two changes is the newer one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated

import msgspec

from exo_mesh.domain.fields import SentAs, Size, Tidied

MAX_SETTINGS = 32
"""Most names in one table. This version shares a dozen."""
MAX_TEXT_BYTES = 4096
"""Longest text of one setting. The only long one is the system prompt."""
MAX_COUNTER = 2**53


class SharedSetting(msgspec.Struct, frozen=True):
    """One shared setting. text: the value as an environment variable would hold it; None: withdrawn, so that each node
    uses its own value again. author: the id of the peer that made the change."""

    name: str
    text: str | None
    counter: int
    author: str

    @property
    def rank(self) -> tuple[int, str, bool, str]:
        """The order of versions: the version with the higher rank is in force."""
        return self.counter, self.author, self.text is not None, self.text or ""


def _highest(entries: Iterable[SharedSetting]) -> tuple[SharedSetting, ...]:
    """The highest-ranked entry of each name, by name."""
    best: dict[str, SharedSetting] = {}
    for entry in entries:
        held = best.get(entry.name)
        if held is None or entry.rank > held.rank:
            best[entry.name] = entry
    return tuple(best[name] for name in sorted(best))


class SharedSettings(msgspec.Struct, frozen=True):
    """A table of shared settings, by name. Withdrawn settings stay in it: an older peer may still have the value."""

    entries: Annotated[tuple[SharedSetting, ...], SentAs("settings"), Size(MAX_SETTINGS), Tidied(_highest)] = ()

    @classmethod
    def of(cls, entries: Iterable[SharedSetting]) -> SharedSettings:
        """Builds the table with the highest-ranked entry of each name."""
        return cls(_highest(entries))

    def merged(self, *others: SharedSettings) -> SharedSettings:
        """Merges this table and others to one."""
        return SharedSettings.of(entry for table in (self, *others) for entry in table.entries)

    def changed(self, texts: Mapping[str, str | None], author: str) -> SharedSettings:
        """Returns the table after a change; None withdraws a value."""
        counter = 1 + max((entry.counter for entry in self.entries), default=0)
        return self.merged(SharedSettings.of(SharedSetting(*item, counter, author) for item in texts.items()))

    def only(self, names: Iterable[str]) -> SharedSettings:
        """Returns the table with these names only."""
        wanted = frozenset(names)
        return SharedSettings(tuple(entry for entry in self.entries if entry.name in wanted))

    @property
    def texts(self) -> dict[str, str]:
        """The values, without withdrawn settings."""
        return {entry.name: entry.text for entry in self.entries if entry.text is not None}
