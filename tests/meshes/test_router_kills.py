"""Real processes: two rings and two lone instances of one model are killed one after the other under load."""

from __future__ import annotations

import os
import signal
import threading
from http.client import HTTPException
from pathlib import Path

import pytest

from exo_mesh.errors import MeshError
from tests.support.peers import MODEL, PLACE_S, Peer, mesh, text_of
from tests.support.processes import eventually

COUNT = "Count from 3 to 40."
SPEEDS_MS = (4, 4, 8, 8, 6, 20)
"""Of the two stages of each ring, and of the two lone instances."""
SLOTS = ["--max-batch-size", "3"]
"""All four instances together run exactly as many requests at once as there are clients."""
GROUPS = ((1, 2), (3, 4), (5,), (6,))


class Clients:
    """Threads that ask the same question again and again, each without pause."""

    def __init__(self, peer: Peer, count: int) -> None:
        self._peer = peer
        self._stopping = threading.Event()
        self.texts: list[str] = []
        self.errors: list[BaseException] = []
        self._threads = [threading.Thread(target=self._ask, daemon=True) for _ in range(count)]
        for thread in self._threads:
            thread.start()

    def _ask(self) -> None:
        while not self._stopping.is_set():
            try:
                self.texts.append(text_of(self._peer.chat(COUNT, max_tokens=100)))
            except (MeshError, OSError, HTTPException) as exc:
                self.errors.append(exc)

    def answer_more(self, count: int) -> bool:
        """Wait until so many more requests have ended."""
        wanted = len(self.texts) + len(self.errors) + count
        return eventually(lambda: len(self.texts) + len(self.errors) >= wanted, 60)

    def stop(self) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join(60)
        assert not any(thread.is_alive() for thread in self._threads), "a request never ended"


@pytest.mark.slow
def test_no_request_is_lost_when_each_of_two_rings_and_two_replicas_is_killed(tmp_path: Path) -> None:
    flags = [["--role", "api"], *([*SLOTS, "--engine-option", f"cost_ms={cost_ms}"] for cost_ms in SPEEDS_MS)]
    with mesh(tmp_path, flags, engine="dummy") as peers:
        entry = peers[0]
        for group in GROUPS:
            others = [peer.id for index, peer in enumerate(peers) if index not in group]
            wish = {"model": MODEL, "min_peers": len(group), "exclude_peers": others}
            entry.api.post("/instance", wish, PLACE_S)
        assert len(entry.instances()) == len(GROUPS)
        whole = text_of(entry.chat(COUNT, max_tokens=100))
        clients = Clients(entry, 12)
        try:
            assert clients.answer_more(12)
            for group in GROUPS:  # the process of the driver alone
                driver = peers[group[-1]]
                assert eventually(driver.busy, 30), "the router uses every instance"
                os.kill(driver.runners()[0].pid, signal.SIGKILL)
                assert clients.answer_more(12)
            for index in (6, 2, 3):  # a whole machine: a lone instance, the driver of a ring, the first stage of one
                processes = [peers[index].child.pid, *(process.pid for process in peers[index].runners())]
                for pid in processes:
                    os.kill(pid, signal.SIGKILL)
                assert clients.answer_more(12)
        finally:
            clients.stop()
        assert not clients.errors
        assert set(clients.texts) == {whole}
        assert entry.api.get("/requests/stats")["errors"] == 0
