"""Fixtures of all tests of the command line."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from exo_mesh.settings.aliases import ALIASES


@pytest.fixture(autouse=True)
def no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What the person who runs the tests has in the environment does not count. A verb's umask ends with its test."""
    names = {alias.variable for alias in ALIASES}
    for name in [name for name in os.environ if name.startswith("EXO_MESH_") or name in names]:
        monkeypatch.delenv(name)
    os.umask(umask := os.umask(0))
    yield
    os.umask(umask)
