"""Whole machines stop or vanish: a large model goes on with few bytes read, and a stopped node costs nothing."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from exo_mesh.weights.card import read_card
from exo_mesh.weights.random_checkpoint import model_of_size, write_checkpoint
from tests.support.heavy import checkpoint_bytes
from tests.support.peers import Peer, mesh
from tests.support.processes import eventually

pytestmark = pytest.mark.slow

STOPPED_S = 10.0
WORDS = "once upon a time there was"


def counted(peer: Peer, name: str) -> float:
    """The sum of a metric of a node over its labels."""
    families = text_string_to_metric_families(peer.api.text("/metrics"))
    samples = (sample for family in families for sample in family.samples)
    return sum(sample.value for sample in samples if sample.name == f"exo_mesh_{name}")


def stream(peer: Peer, model: str, max_tokens: int) -> Iterator[str]:
    """The pieces of text of a greedy completion."""
    body = {
        "model": model, "messages": [{"role": "user", "content": WORDS}], "temperature": 0, "stream": True,
        "max_tokens": max_tokens, "ignore_eos": True,
    }  # fmt: skip
    for event in peer.api.stream("/v1/chat/completions", body):
        if event.get("choices") and (text := event["choices"][0]["delta"].get("content")):
            yield text


def placed_on(peers: list[Peer], model: str, cuts: tuple[int, ...]) -> dict[str, Any]:
    pins = {peer.id: [start, stop] for peer, start, stop in zip(peers, cuts, cuts[1:], strict=False)}
    instance: dict[str, Any] = peers[0].api.post("/instance", {"model": model, "pins": pins}, 300.0)
    return instance


def pids(instance: dict[str, Any]) -> list[int]:
    return [stage["pid"] for stage in instance["stages"]]


@pytest.mark.timeout(900)
def test_of_a_large_model_only_the_lost_share_is_read_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """1.6 GB on three peers, the middle one killed with all its processes, a fourth idle."""
    wanted = checkpoint_bytes(3.0)  # twice for the weights as float32, and eight processes
    models = tmp_path / "models"
    write_checkpoint(models / "large", model_of_size(wanted // 2), repeat=True)
    card = read_card(models / "large", "large")
    size = card.shard_bytes(0, card.num_layers)
    assert size >= 0.9 * wanted
    cuts = (0, card.num_layers // 3, 2 * card.num_layers // 3, card.num_layers)
    with mesh(tmp_path / "peers", [["--models-dir", str(models)]] * 4, engine="numpy") as peers:
        before = placed_on(peers, "large", cuts)
        expected = "".join(stream(peers[0], "large", 24))
        pieces: list[str] = []
        killed_at = recovered_at = 0.0
        for piece in stream(peers[0], "large", 24):
            if killed_at and not recovered_at:
                recovered_at = time.monotonic()
            pieces.append(piece)
            if not killed_at and len("".join(pieces)) > len(expected) // 3:
                killed_at = time.monotonic()
                for process in [*peers[1].runners(), psutil.Process(peers[1].child.pid)]:
                    process.kill()
        assert "".join(pieces) == expected
        (after,) = peers[0].instances()
        assert [stage["peer"] for stage in after["stages"]] == [peers[n].id for n in (0, 3, 2)]
        assert (pids(after)[0], pids(after)[2]) == (pids(before)[0], pids(before)[2]), "they keep their processes"
        loaded = counted(peers[0], "recovery_loaded_bytes_total")
        share = card.shard_bytes(cuts[1], cuts[2])
        with capsys.disabled():
            line = next(
                line for line in peers[0].log.splitlines() if "recovered by ballot" in line and "loaded" in line
            )
            print(
                f"\n{size / 1e9:.2f} GB, lost share {share / 1e9:.2f} GB; gap {recovered_at - killed_at:.1f} s\n{line}"
            )
        assert loaded == 2 * share, "this engine holds two bytes of a file as four"


@pytest.mark.parametrize("stopped", [1, 2], ids=["middle", "last"])
def test_a_node_stopped_for_ten_seconds_costs_no_token_and_nothing_is_planned_anew(
    tmp_path: Path, stopped: int
) -> None:
    flags = ["--engine-option", "cost_ms=10"]
    with mesh(tmp_path, [flags] * 3, engine="dummy") as peers:
        before = placed_on(peers, "exo-mesh-demo", (0, 3, 5, 8))
        expected = "".join(stream(peers[0], "exo-mesh-demo", 500))
        node = psutil.Process(peers[stopped].child.pid)
        pieces: list[str] = []
        resume_at = 0.0
        for piece in stream(peers[0], "exo-mesh-demo", 500):
            pieces.append(piece)
            if len(pieces) == 10:
                os.kill(node.pid, signal.SIGSTOP)
                resume_at = time.monotonic() + STOPPED_S
            if resume_at and time.monotonic() > resume_at:
                os.kill(node.pid, signal.SIGCONT)
                resume_at = 0.0
        while resume_at and time.monotonic() < resume_at:  # the answer was faster than the node
            time.sleep(0.1)
        os.kill(node.pid, signal.SIGCONT)
        assert "".join(pieces) == expected
        assert eventually(lambda: [len(peer.state()["view"]["peers"]) for peer in peers] == [3] * 3, 30)
        for peer in peers:
            (after,) = peer.instances()
            assert (after["ballot"], after["owner"], pids(after)) == (before["ballot"], before["owner"], pids(before))
        assert [counted(peer, "requests_resumed_total") for peer in peers] == [0, 0, 0]
        assert [counted(peer, "driver_redials_total") for peer in peers] == [0, 0, 0]
