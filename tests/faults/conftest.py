"""Fixtures of the fault tests: meshes of real processes behind a proxy."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tools.faults.mesh import Meshes, why_not


@pytest.fixture(scope="session", autouse=True)
def addresses() -> None:
    if reason := why_not():
        pytest.skip(f"every node needs an address of its own: {reason}")


@pytest.fixture(scope="module")
def meshes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Meshes]:
    """Shared by all tests of a module, in the order of their sizes: starting a mesh costs seconds. Not longer, for the
    tests of nodes inside this process count its runners."""
    made = Meshes(tmp_path_factory.mktemp("meshes"))
    yield made
    made.close()
