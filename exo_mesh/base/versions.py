"""Versions of the peer-to-peer protocol and of installed packages.

Each side speaks a range of the protocol, and two sides use the newest that both speak.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from exo_mesh import OLDEST_PROTOCOL, PROTOCOL_VERSION


class ProtocolRange(NamedTuple):
    """Versions from `oldest` to `newest`, both included."""

    oldest: int
    newest: int

    @classmethod
    def said(cls, oldest: int, newest: int) -> ProtocolRange:
        """Builds the range from a message. Packages before version 5 send one number: `newest` is then 0."""
        return cls(oldest, max(oldest, newest))

    def agreed(self, other: ProtocolRange) -> int | None:
        """The version that the two sides use with each other; None if they have none in common."""
        newest = min(self.newest, other.newest)
        return newest if newest >= max(self.oldest, other.oldest) else None

    def __str__(self) -> str:
        return str(self.newest) if self.oldest == self.newest else f"{self.oldest} to {self.newest}"


SPOKEN = ProtocolRange(OLDEST_PROTOCOL, PROTOCOL_VERSION)
"""The versions that this package speaks."""


def library_versions(names: Iterable[str]) -> dict[str, str | None]:
    """Returns the installed version by library; None for an absent library."""
    from importlib import metadata

    versions: dict[str, str | None] = {}
    for name in names:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = None
    return versions
