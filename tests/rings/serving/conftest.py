"""The ring that the tests of a file share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.rings.serving.dispatchers import MODEL, ROOM, SMALL, Ring
from tests.support.checkpoints import TinyModel, write_checkpoint
from tests.support.peers import mesh


@pytest.fixture(scope="module")  # not longer: its nodes read their memory ten times a second
def ring(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ring]:
    folder = tmp_path_factory.mktemp("memory")
    for name, context in ((MODEL, 200_000), (SMALL, 2000)):
        write_checkpoint(folder / name, TinyModel(layers=4, hidden=16, intermediate=32, context=context))
    files = [folder / "memory-0", folder / "memory-1"]
    flags = []
    for file in files:
        file.write_text(ROOM)
        own = ["--models-dir", str(folder), "--engine-option", "cost_ms=1", "--memory-poll-interval", "0.1"]
        flags.append([*own, "--fake-mem-file", str(file)])
    with mesh(tmp_path_factory.mktemp("pressed"), flags, engine="dummy") as peers:
        peers[0].place(model=MODEL, min_peers=2, context_limit=100_000)
        yield Ring(peers, files, folder)
