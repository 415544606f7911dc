"""What holds in every test of whole nodes."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Iterator

import pytest

from exo_mesh.domain.view import Record, View


@pytest.fixture(autouse=True)
def _only_the_loop_reads_what_peers_say(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The view changes with every message: a thread that reads it now and then ends a request with an error."""
    elsewhere: list[str] = []
    live = View._live

    def watched(view: View) -> list[Record]:
        if threading.current_thread() is not threading.main_thread():
            elsewhere.append("".join(traceback.format_stack(limit=8)))
        return live(view)

    monkeypatch.setattr(View, "_live", watched)
    yield
    assert not elsewhere, elsewhere[0]
