"""A peer from which another one copies a model is killed: the copy goes on at a third, from where it was."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.checkpoints import TinyModel, write_checkpoint
from tests.support.peers import Peer, mesh
from tests.support.processes import eventually

MODEL = TinyModel(layers=16, hidden=1024, heads=16, kv_heads=8, intermediate=3072, vocab=600, shards=4)
"""820 MB: copying it takes seconds."""


@pytest.mark.slow
def test_a_copy_goes_on_elsewhere_when_its_source_is_killed(tmp_path: Path) -> None:
    original = write_checkpoint(tmp_path / "models" / "big", MODEL, repeat=True)
    size = sum(file.stat().st_size for file in original.glob("*.safetensors"))
    holder = ["--models-dir", str(tmp_path / "models")]
    with mesh(tmp_path, [holder, holder, holder, []], engine="dummy") as (*holders, last):
        assert eventually(lambda: sum("big" in peer["models"] for peer in last.state()["view"]["peers"]) == 3, 20)
        last.api.post("/download/start", {"model": "big", "peers": [last.id], "whole": True})
        directory = tmp_path / "peer-3" / "models" / "big"
        assert eventually(lambda: written_bytes(directory) > 20_000_000, 30)
        source = source_of(last, holders)
        os.kill(source.child.pid, signal.SIGKILL)
        assert written_bytes(directory) < 0.9 * size, "it was killed too late"
        assert eventually(lambda: download(last)["state"] in ("completed", "failed"), 60)
        done = download(last)
        assert done["state"] == "completed", done
        received = done["from_peers_bytes"]
        print(f"{received / size:.4f} of {size} bytes received in all")
        assert done["from_hub_bytes"] == 0 and received <= 1.05 * done["total_bytes"], done


def written_bytes(directory: Path) -> int:
    """Blocks of the files of the weights, whole or not."""
    return sum(512 * file.stat().st_blocks for file in directory.glob("*.safetensors*") if ".json" not in file.name)


def download(peer: Peer) -> dict[str, Any]:
    (entry,) = peer.api.get("/v1/download/progress")["data"]
    return dict(entry)


def source_of(reader: Peer, holders: list[Peer]) -> Peer:
    """The peer to which the fetcher of another one has a connection."""
    (fetcher,) = [
        one for one in psutil.Process(reader.child.pid).children() if "exo_mesh.models.fetcher" in one.cmdline()
    ]
    ports = {one.laddr.port for one in fetcher.net_connections("tcp") if one.raddr}
    for peer in holders:
        if any(one.raddr and one.raddr.port in ports for one in psutil.Process(peer.child.pid).net_connections("tcp")):
            return peer
    raise AssertionError("it reads from nobody")
