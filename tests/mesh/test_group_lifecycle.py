"""Who owns a tensor group, and what becomes of it, when a whole node is killed. Real nodes, no weights."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.support.peers import Peer, mesh
from tests.support.processes import eventually, gone

pytestmark = pytest.mark.slow

RING = ["--group-backend", "ring"]
SLOW = ["--engine-option", "cost_ms=60"]


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
