"""A node publishes which layers it has on its disk: KV that its stages could use today, and fetched weights."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from exo_mesh import __version__
from exo_mesh.domain.shard import KeptLayers
from exo_mesh.engine.registry import provider
from exo_mesh.machine.disk import Disk
from exo_mesh.models import kept_here
from exo_mesh.models.local_files import LocalFiles
from exo_mesh.prefix_disk.makers import KvMaker
from exo_mesh.weights.card import read_card
from exo_mesh.weights.fetched import MANIFEST_FILE
from exo_mesh.weights.random_checkpoint import TinyModel, write_checkpoint
from exo_mesh.weights.store import ModelStore
from tests.prefix_disk.test_makers import write
from tests.support.nodes import Machine, make_node, until
from tests.support.partial import copy_partly, layer_pieces

LAYERS = 4


@pytest.mark.parametrize(
    ("start", "stop", "tied"), [(0, 2, False), (1, 3, False), (2, 4, False), (0, 2, True), (2, 4, True)]
)
def test_the_layers_that_were_fetched_are_found(tmp_path: Path, start: int, stop: int, tied: bool) -> None:
    whole = write_checkpoint(tmp_path / "whole", TinyModel(layers=LAYERS, tied=tied))
    copy_partly(whole, tmp_path / "models" / "m", layer_pieces(whole, start, stop, LAYERS))
    store = ModelStore([tmp_path / "models"])
    files = LocalFiles(tmp_path / "models", store.card, store.find, Disk(tmp_path))
    assert files.whole_layers("m") == [range(start, stop)]


def test_two_parts_are_two_ranges_and_a_whole_model_has_none(tmp_path: Path) -> None:
    whole = write_checkpoint(tmp_path / "models" / "whole", TinyModel(layers=LAYERS, tied=False))
    ends = [layer_pieces(whole, 0, 1, LAYERS), layer_pieces(whole, 2, 4, LAYERS)]
    pieces = {file: tuple(span for end in ends for span in end.get(file, ())) for file in ends[0]}
    copy_partly(whole, tmp_path / "models" / "m", pieces)
    copy_partly(whole, tmp_path / "models" / "none", {}, "none")
    store = ModelStore([tmp_path / "models"])
    files = LocalFiles(tmp_path / "models", store.card, store.find, Disk(tmp_path))
    assert files.whole_layers("m") == [range(1), range(2, 4)]
    assert files.whole_layers("none") == files.whole_layers("whole") == []


async def test_a_node_says_what_it_has_from_its_start_on_and_when_that_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    beats = asyncio.Event()

    async def next_beat(period_s: float) -> None:
        await beats.wait()
        beats.clear()

    monkeypatch.setattr(kept_here, "next_beat", next_beat)
    whole = write_checkpoint(tmp_path / "whole", TinyModel(layers=LAYERS, tied=False))
    digest = read_card(whole, "m").digest
    fetched = copy_partly(whole, tmp_path / "n" / "models" / "m", layer_pieces(whole, 0, 2, LAYERS))
    os.utime(fetched / MANIFEST_FILE, (1, 1))
    version = (__version__, "dummy", provider("dummy").version())

    def maker(options: Sequence[tuple[str, str]] = ()) -> KvMaker:
        return KvMaker("m", digest, "", 2, 4, LAYERS, version, dict(options))

    write(tmp_path / "disk", "m/one/rank-0", maker(), 600)
    write(tmp_path / "disk", "m/two/rank-0", maker([("cost_ms", "10")]), 600)
    node = make_node(tmp_path / "n", "n", Machine(), prefix_disk=tmp_path / "disk")
    try:
        await node.start()
        weights = KeptLayers("", 0, 2)
        assert node.membership.own.kept_of(digest) == (KeptLayers("dummy", 2, 4, 512), weights)
        write(tmp_path / "disk", "m/one/rank-0", maker(), 700)
        beats.set()
        await until(lambda: node.membership.own.kept_of(digest) == (KeptLayers("dummy", 2, 4, 1024), weights))
    finally:
        await node.stop()
