"""Who owns a tensor group, what becomes of it when a node is killed, and what ranks know. Real nodes, no weights."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.support.peers import Peer, mesh
from tests.support.processes import eventually, gone

pytestmark = pytest.mark.extended

RING = ["--group-backend", "ring"]
SLOW = ["--engine-option", "cost_ms=60"]


MARK = "a question that nobody else may read"


def holds(pid: int, text: bytes) -> bool:
    """Does the memory of a process have these bytes anywhere?"""
    with open(f"/proc/{pid}/maps") as maps, open(f"/proc/{pid}/mem", "rb", 0) as memory:
        for line in maps:
            addresses, access, *_ = line.split()
            if not access.startswith("rw"):
                continue
            start, stop = (int(address, 16) for address in addresses.split("-"))
            with contextlib.suppress(OSError):  # not all of it can be read, and some of it is gone by now
                memory.seek(start)
                if text in memory.read(stop - start):
                    return True
    return False


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
def test_the_text_of_a_request_stays_at_the_entry_peer(tmp_path: Path) -> None:
    with mesh(tmp_path, [RING] * 3, engine="dummy") as peers:
        entry, *members = peers
        entry.place(groups=[[peer.id for peer in members]])
        assert entry.chat(MARK, max_tokens=5, ignore_eos=True)["usage"]["completion_tokens"] == 5
        ranks = [process.pid for peer in members for process in peer.runners()]
        assert len(ranks) == 2
        assert holds(entry.child.pid, MARK.encode()), "it is seen where it is"
        for pid in (*ranks, *(peer.child.pid for peer in members)):
            assert not holds(pid, MARK.encode())


def completion(peer: Peer, tokens: int) -> dict[str, Any]:
    return peer.chat("Count from 3 to 60.", max_tokens=tokens, ignore_eos=True)


def test_a_group_whose_owner_is_killed_is_adopted_and_serves_on(tmp_path: Path) -> None:
    with mesh(tmp_path, [RING, [*RING, *SLOW], [*RING, *SLOW]], engine="dummy") as peers:
        owner, *members = peers
        instance = owner.place(groups=[[peer.id for peer in members]])
        assert instance["owner"] == owner.id
        ranks = [process for peer in members for process in peer.runners()]
        with ThreadPoolExecutor(1) as pool:
            asking = pool.submit(completion, members[0], 60)
            assert eventually(members[0].busy, 30)
            os.kill(owner.child.pid, signal.SIGKILL)
            assert asking.result(60)["usage"]["completion_tokens"] == 60

        def adopted() -> bool:
            return all(
                [(one["owner"], one["digest"]) for one in peer.instances()]
                == [(min(peer.id for peer in members), instance["digest"])]
                for peer in members
            )

        assert eventually(adopted, 20), members[0].instances()
        assert not gone(ranks) and all(process.is_running() for process in ranks), "no rank has begun anew"
        assert completion(members[1], 5)["usage"]["completion_tokens"] == 5


def test_a_group_of_which_a_node_is_killed_is_placed_anew_on_the_others(tmp_path: Path) -> None:
    with mesh(tmp_path, [RING, [*RING, *SLOW], [*RING, *SLOW]], engine="dummy") as peers:
        entry, one, other = peers
        entry.place(groups=[[one.id, other.id]])
        ranks = [process for peer in (one, other) for process in peer.runners()]
        with ThreadPoolExecutor(1) as pool:
            asking = pool.submit(completion, entry, 60)
            assert eventually(one.busy, 30)
            os.kill(other.child.pid, signal.SIGKILL)
            assert asking.result(60)["usage"]["completion_tokens"] == 60
        assert eventually(lambda: gone(ranks), 5), "the rank that was left has ended, too"
        assert all(other.id not in str(instance["stages"]) for instance in entry.instances())
