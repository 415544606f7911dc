"""Fixtures for tests of whole nodes."""

from __future__ import annotations

import pytest

from exo_mesh.membership.paths import PathKeeper


@pytest.fixture
def nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the test does it: otherwise the direct way might win before the model is placed."""
    monkeypatch.setattr(PathKeeper, "_is_due", lambda self, peer: False)
