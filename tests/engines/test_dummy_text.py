"""The dummy text engine passes the suite of every whole-model engine; its "server" is a file that exists or not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from exo_mesh.engine.conformance_whole import *  # noqa: F403
from exo_mesh.engine.conformance_whole import WholeSubject


class UpFile:
    """A pretended server, which is up while its file exists."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def start(self) -> None:
        self._path.touch()

    def kill(self) -> None:
        self._path.unlink(missing_ok=True)

    def num_running(self) -> int | None:
        return None


@pytest.fixture(scope="module", params=["true", "false"], ids=["continues", "repeats"])
def whole_subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[WholeSubject]:
    path = tmp_path_factory.mktemp("server") / "up"
    options = {"models": "parrot", "words": "200", "delay_ms": "6", "up_file": str(path), "continues": request.param}
    yield WholeSubject("exo_mesh_dummy:text_provider", UpFile(path), options)
