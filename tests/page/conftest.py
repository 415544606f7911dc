"""Fixtures of the page's tests: a scripted service with a server over it."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from exo_mesh.api.access import AccessPolicy
from exo_mesh.api.context import ApiOptions
from tests.api.scripted_mesh import ScriptedMesh, Served, served
from tests.text.text_models import write_text_model


@pytest.fixture(scope="session")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> ScriptedMesh:
    """For tests that ask nothing of a model."""
    return ScriptedMesh(write_text_model(tmp_path_factory.mktemp("text-model")))


@pytest.fixture
async def api(scripted: ScriptedMesh) -> AsyncIterator[Served]:
    options = ApiOptions(access=AccessPolicy(open_admin=True), live_interval_s=0.02)
    async with served(scripted, options) as server:
        yield server
