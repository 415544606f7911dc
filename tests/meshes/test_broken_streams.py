"""Real nodes and real clients: a connection that is cut costs neither a ring nor a word."""

from __future__ import annotations

import sys
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.cutting import cut_connections_to
from tests.support.peers import Peer, await_all, mesh, text_of
from tests.support.processes import eventually

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="sockets of another process can be reached on Linux only"),
]

QUESTION = "Count from one to fifty."
SLOW = ["--engine-option", "cost_ms=10"]


def redials(peer: Peer) -> float:
    """Broken streams that this peer has opened again, as its metrics say."""
    with urllib.request.urlopen(f"{peer.url}/metrics", timeout=10) as reply:
        lines = reply.read().decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("exo_mesh_driver_redials_total{"))


def test_the_stream_from_the_driver_is_cut_in_the_middle_of_answers(tmp_path: Path) -> None:
    """The entry peer is not in the ring. Only its connection to the driver is cut, three times under four answers."""
    with mesh(tmp_path, [SLOW, SLOW, []], engine="dummy") as peers, ThreadPoolExecutor(4) as pool:
        entry = peers[2]
        before = peers[0].place(min_peers=2, exclude_peers=[entry.id])
        assert entry.id not in {stage["peer"] for stage in before["stages"]}
        await_all(peers, lambda peer: peer.instances() == [before])
        port = int(before["stages"][-1]["endpoint"].rpartition(":")[2])
        expected = text_of(entry.chat(QUESTION, max_tokens=100))
        answers = [pool.submit(entry.chat, QUESTION, max_tokens=100) for _ in range(4)]
        for _ in range(3):
            assert eventually(lambda: cut_connections_to(port, entry.child.pid), 10)
        assert [text_of(answer.result(60)) for answer in answers] == [expected] * 4
        assert all(peer.instances() == [before] for peer in peers), "the same ballot, owner and processes"
        assert redials(entry) >= 3 and redials(peers[0]) == 0
        await_all(peers, Peer.idle)
