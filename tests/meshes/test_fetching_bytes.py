"""Bytes from the hub and on disks, counted over real processes: each byte once, and each peer what its layers need.

`pytest -m slow -s tests/meshes/test_fetching_bytes.py` prints the figures of a checkpoint of 1 GB.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from exo_mesh.domain.spans import num_bytes
from exo_mesh.weights.card import layer_of
from exo_mesh.weights.safetensors import read_tensor_table
from tests.support.checkpoints import TinyModel, write_checkpoint
from tests.support.heavy import SIZES, checkpoint_bytes, eight_layers
from tests.support.hub import LoopbackHub
from tests.support.peers import Peer, bootstrap, mesh, start_node, text_of
from tests.support.processes import eventually, gone

REPO = "org/big"
MB = 10**6
TAKE_OVER_S = 90.0
SMALL = TinyModel(layers=8, hidden=256, heads=8, kv_heads=4, intermediate=768, vocab=600, shards=4)
"""26 MB in four files."""


@pytest.mark.extended
def test_each_byte_comes_from_the_hub_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    count_bytes(tmp_path, monkeypatch, SMALL)


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_each_byte_of_a_gigabyte_comes_from_the_hub_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    count_bytes(tmp_path, monkeypatch, eight_layers(checkpoint_bytes(6.0, SIZES[1:])))


def count_bytes(root: Path, monkeypatch: pytest.MonkeyPatch, model: TinyModel) -> None:
    original = write_checkpoint(root / "original", model, repeat=True)
    size = sum(file.stat().st_size for file in original.iterdir())
    with LoopbackHub() as hub:
        hub.add(REPO, original)
        for name, value in {**hub.environment, "HF_HOME": str(root / "hf")}.items():
            monkeypatch.setenv(name, value)
        with mesh(root, [[]] * 3, engine="numpy") as peers:
            began = time.monotonic()
            placed = peers[0].place(model=REPO, min_peers=3)
            print(f"\n{size / MB:.1f} MB in {model.shards} files over 3 peers in {time.monotonic() - began:.1f} s")
            stages = {stage["peer"]: stage for stage in placed["stages"]}
            assert len(stages) == 3
            said = answer(peers[0])
            print(f"the hub sent {hub.sent_bytes / MB:.1f} MB: {hub.sent_bytes / size:.4f} of the checkpoint")
            assert hub.sent_bytes <= 1.02 * size
            for peer in peers:
                taken, needed = disk_bytes(peer), layer_bytes(original, stages[peer.id], model.layers)
                print(f"{peer.ready['name']} stores {taken / MB:.1f} MB: {taken / needed:.4f} of its layers")
                assert taken <= 1.1 * needed

            before = hub.sent_bytes
            pull_whole(peers[0])
            with fourth_peer(root, peers) as fourth:
                victim = next(peer for peer in reversed(peers) if peer.id in stages)
                runners = victim.runners()
                os.kill(victim.child.pid, signal.SIGKILL)
                began = time.monotonic()
                assert eventually(lambda: fourth.id in members(peers[0]) and gone(runners), TAKE_OVER_S)
                print(f"the fourth peer took over {time.monotonic() - began:.1f} s after a kill -9")
                assert victim.id not in members(peers[0]) and len(members(peers[0])) == 3
                assert answer(fourth) == said
                print(f"the hub sent {hub.sent_bytes - before} bytes for that")
                assert hub.sent_bytes == before


def answer(peer: Peer) -> str:
    return text_of(peer.chat("Hello", model=REPO, max_tokens=4))


def members(peer: Peer) -> set[str]:
    """Peers of the ring that is ready."""
    ready = [instance for instance in peer.instances() if instance["state"] == "ready"]
    return {stage["peer"] for instance in ready for stage in instance["stages"]}


def pull_whole(peer: Peer) -> None:
    peer.api.post("/download/start", {"model": REPO, "peers": [peer.id], "whole": True})
    assert eventually(lambda: any(is_whole(peer.id, entry) for entry in downloads(peer)), 60), downloads(peer)


def is_whole(peer_id: str, entry: dict[str, Any]) -> bool:
    return bool(entry["peer_id"] == peer_id and entry["is_whole"] and entry["state"] == "completed")


def downloads(peer: Peer) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = peer.api.get("/v1/download/progress")["data"]
    return found


@contextmanager
def fourth_peer(root: Path, peers: list[Peer]) -> Iterator[Peer]:
    child = start_node(root / "fourth", bootstrap(peers), engine="numpy")
    try:
        peer = Peer(child, child.wait_ready(60))
        assert eventually(lambda: all(peer.id in one.state()["telemetry"] for one in peers), 30)
        yield peer
    finally:
        child.stop()


def disk_bytes(peer: Peer) -> int:
    """Blocks that the files of the model take at a peer, its skeleton included."""
    files = (Path(peer.ready["home"]) / "models" / REPO).iterdir()
    return sum(512 * file.stat().st_blocks for file in files)


def layer_bytes(original: Path, stage: dict[str, Any], num_layers: int) -> int:
    """Bytes of the tensors that a stage loads."""
    start, stop = stage["layers"]

    def is_needed(name: str) -> bool:
        layer = layer_of(name)
        if layer is not None:
            return bool(start <= layer < stop)
        return start == 0 if "embed" in name else stop == num_layers

    return num_bytes((info.start, info.stop) for name, info in read_tensor_table(original).items() if is_needed(name))
