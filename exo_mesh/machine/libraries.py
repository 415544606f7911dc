"""Versions of the Python packages that are installed here."""

from __future__ import annotations

from collections.abc import Iterable


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
