"""Programs that the tests of monitoring/ need; without them the tests are skipped and say so."""

from __future__ import annotations

import shutil

import pytest


def _program(name: str) -> str:
    found = shutil.which(name, path="/usr/local/bin:/usr/bin:/opt/homebrew/bin") or shutil.which(name)
    if found is None:
        pytest.skip(f"not installed: {name}")
    return found


@pytest.fixture(scope="session")
def promtool() -> str:
    return _program("promtool")


@pytest.fixture(scope="session")
def prometheus() -> str:
    return _program("prometheus")
