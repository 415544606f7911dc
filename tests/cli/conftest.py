"""Fixtures of all tests of the command line."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator

import pytest

from exo_mesh.setting_aliases import ALIASES


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    """Every verb sets up logging for its process; here the process goes on."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:], root.level = handlers, level
    logging.captureWarnings(False)


@pytest.fixture(autouse=True)
def no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the person who runs the tests has in the environment does not count."""
    names = {alias.variable for alias in ALIASES}
    for name in [name for name in os.environ if name.startswith("EXO_MESH_") or name in names]:
        monkeypatch.delenv(name)
