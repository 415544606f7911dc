"""A node publishes which layers it has on its disk: KV that its stages could use today, and fetched weights."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import ItemsView, Sequence
from pathlib import Path

import pytest

from exo_mesh import __version__
from exo_mesh.domain.shard import KeptLayers
from exo_mesh.engine.registry import provider
from exo_mesh.machine.disk import Disk
from exo_mesh.models import local_files
from exo_mesh.models.local_files import LocalFiles
from exo_mesh.rings.hosting import kept_here
from exo_mesh.rings.hosting.kept_here import KeptHere, OnDisk
from exo_mesh.rings.prefix_disk.makers import KvMaker
from exo_mesh.weights.card import read_card
from exo_mesh.weights.fetched import MANIFEST_FILE
from exo_mesh.weights.random_checkpoint import TinyModel, write_checkpoint
from exo_mesh.weights.safetensors import TensorInfo
from exo_mesh.weights.store import ModelStore
from exo_mesh.weights.tensors import read_stage_tensors
from tests.rings.prefix_disk.test_makers import write
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


class _CountedTable(dict[str, TensorInfo]):
    passes = 0

    def items(self) -> ItemsView[str, TensorInfo]:
        self.passes += 1
        return super().items()


def test_the_tensors_of_a_model_are_gone_through_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = write_checkpoint(tmp_path / "whole", TinyModel(layers=LAYERS, tied=False))
    copied = copy_partly(whole, tmp_path / "models" / "m", layer_pieces(whole, 1, 3, LAYERS))
    store = ModelStore([tmp_path / "models"])
    table = _CountedTable(read_stage_tensors(copied))
    monkeypatch.setattr(local_files, "read_stage_tensors", lambda model_dir: table)
    files = LocalFiles(tmp_path / "models", store.card, store.find, Disk(tmp_path))
    assert files.whole_layers("m") == [range(1, 3)] and table.passes == 1


async def test_a_node_says_what_it_has_from_its_start_on_and_when_that_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    beats = asyncio.Event()

    async def next_wakeup(period_s: float) -> None:
        await beats.wait()
        beats.clear()

    monkeypatch.setattr(kept_here, "next_wakeup", next_wakeup)
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
        assert node.membership.own.kept_of(digest) == (weights, KeptLayers("dummy", 2, 4, 512, keys=(600,)))
        write(tmp_path / "disk", "m/one/rank-0", maker(), 700)
        beats.set()
        both = (weights, KeptLayers("dummy", 2, 4, 1024, keys=(600, 700)))
        await until(lambda: node.membership.own.kept_of(digest) == both)
    finally:
        await node.stop()


async def test_a_node_starts_before_its_disk_was_looked_at_and_says_then_what_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_read = threading.Event()
    kept = (("d" * 32, (KeptLayers("", 0, 2),)),)

    def slow(self: KeptHere) -> OnDisk:
        may_read.wait(30)
        return kept

    monkeypatch.setattr(KeptHere, "_read", slow)
    monkeypatch.setattr(kept_here, "FIRST_LOOK_S", 0.01)
    node = make_node(tmp_path / "n", "n", Machine(), prefix_disk=tmp_path / "disk")
    try:
        await node.start()
        assert node.membership.own.on_disk == ()
        may_read.set()
        await until(lambda: node.membership.own.on_disk == kept)
    finally:
        may_read.set()
        await node.stop()


async def test_two_stages_that_are_used_in_turn_are_said_in_one_order(tmp_path: Path) -> None:
    version = (__version__, "dummy", provider("dummy").version())
    node = make_node(tmp_path / "n", "n", Machine(), prefix_disk=tmp_path / "disk")
    found: set[OnDisk] = set()
    for start in (0, 2, 0):
        maker = KvMaker("m", "d" * 64, "", start, start + 2, LAYERS, version, {})
        write(tmp_path / "disk", f"m/{start}/rank-0", maker, 600)
        (file,) = (tmp_path / "disk" / "m" / str(start)).rglob("*.kv")
        os.utime(file, (time.time() + start, time.time() + start))
        found.add(node._parts.on_disk.read())
    assert len(found) == 2
    os.utime(tmp_path / "disk" / "m" / "0" / "rank-0", (1, 1))  # as a new file there would
    for file in (tmp_path / "disk" / "m" / "0").rglob("*.kv"):
        os.utime(file, (time.time() + 9, time.time() + 9))
    assert node._parts.on_disk.read() in found
