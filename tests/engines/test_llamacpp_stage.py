"""The llama.cpp engine passes the conformance suite."""

from __future__ import annotations

import pytest

from exo_mesh.engine.conformance import *  # noqa: F403
from exo_mesh.engine.conformance import Subject


@pytest.fixture(scope="module")
def subject() -> Subject:
    return Subject("exo_mesh_llamacpp:provider", options={"kv": "f32", "threads": "1"})
