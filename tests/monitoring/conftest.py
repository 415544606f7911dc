"""Programs that the tests of monitoring/ need; without them the tests are skipped and say so."""

from __future__ import annotations

import shutil

import pytest


def program(name: str) -> str:
    found = shutil.which(name, path="/usr/local/bin:/usr/bin:/opt/homebrew/bin") or shutil.which(name)
    if found is None:
        pytest.skip(f"not installed: {name}")
    return found


@pytest.fixture(scope="session")
def promtool() -> str:
    return program("promtool")


@pytest.fixture(scope="session")
def prometheus() -> str:
    return program("prometheus")


@pytest.fixture(scope="session")
def exporter() -> str:
    return program("prometheus-node-exporter")
