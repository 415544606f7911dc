"""Twenty times a rank of a tensor group is lost: killed, frozen or never there, the leader or another one, while it
serves and while it is idle. MLX's ring collectives between real processes; the text is right each time.

The collectives spin a core per rank, so how long it took is printed, and no bar. A run takes half a minute.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from exo_mesh.errors import MeshError
from tools.faults.invariants import check_end, one_view
from tools.faults.mesh import MODEL, FaultMesh, Node, mesh_of, wait_until
from tools.faults.record import Row, keep
from tools.faults.stream import Stream, counting

pytest.importorskip("mlx.core")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

TEST = "faults/test_group_losses.py"
PLACE_S = 300.0
GONE_S = 10.0
ANSWER_S = 240.0
SIGNS = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}
WHO = {"the leader": 0, "rank 1": 1}
WHOSE = {"of the peer that was asked": 0, "of the other one": 1}
QUESTION = counting(3, 60)


@pytest.fixture
def group(tmp_path: Path) -> Iterator[FaultMesh]:
    """Two peers that may become a group, and a third one. A mesh of its own each time: peers that have failed twice as
    a group become stages, which is another test's subject."""
    flags = ["--group-backend", "ring", "--max-memory", "2GB"]
    with mesh_of(tmp_path, [("--engine", "mlx")] * 3, *flags) as mesh:
        yield mesh


def place(mesh: FaultMesh) -> dict[str, Any]:
    wish = {"model": MODEL, "tensor_group": 2, "engine": "mlx", "exclude_peers": [mesh.nodes[2].id]}
    instance: dict[str, Any] = mesh.nodes[0].api.post("/instance", wish, PLACE_S)
    wait_until(lambda: all(node.instances() == [instance] for node in mesh.nodes), 30, "all see the instance")
    return instance


def rank_of(mesh: FaultMesh, instance: dict[str, Any], rank: int) -> Node:
    return mesh.node_of(instance["stages"][0]["group"]["peers"][rank])


def check(mesh: FaultMesh, stream: Stream, lost: list[int], what: str, struck_at: float) -> None:
    """The text is right, nothing that was lost is left, all agree, and the next request works."""
    stream.await_end(ANSWER_S)
    check_end(stream)
    assert stream.is_right, f"{stream.outcome}: {stream.message}"
    wait_until(lambda: not any(map(psutil.pid_exists, lost)), GONE_S, "what was lost has ended")
    wait_until(lambda: one_view(mesh.serving), 60, "all live peers have one view")
    after = Stream(mesh.nodes[2], counting(7, 12))
    after.await_end(ANSWER_S)
    assert after.is_right, after.message
    assert not mesh.orphans()
    signs = [at for node in mesh.nodes for at, _ in node.signs(struck_at)]
    detected_s = min(signs) - struck_at if signs else None
    keep(Row("F5", what, TEST, detected_s, stream.gap_s(struck_at), tokens_lost=0))


@pytest.mark.parametrize("entry", [0, 2], ids=["asked at a member", "asked at another peer"])
@pytest.mark.parametrize("busy", [True, False], ids=["serving", "idle"])
@pytest.mark.parametrize("rank", WHO.values(), ids=WHO)
@pytest.mark.parametrize("sign", SIGNS.values(), ids=SIGNS)
def test_a_rank_is_lost(group: FaultMesh, sign: signal.Signals, rank: int, busy: bool, entry: int) -> None:
    instance = place(group)
    (lost,) = rank_of(group, instance, rank).runners()
    stream = Stream(group.nodes[entry], QUESTION) if busy else None
    if stream is not None:
        assert stream.await_text(len(QUESTION.answer) // 3)
    struck_at = time.time()
    os.kill(lost, sign)
    if stream is None:
        stream = Stream(group.nodes[entry], QUESTION)
    what = f"{'the leader' if rank == 0 else 'rank 1'} {sign.name} {'while it serves' if busy else 'idle'}"
    check(group, stream, [lost], what, struck_at)


@pytest.mark.parametrize("whose", WHOSE.values(), ids=WHOSE)
@pytest.mark.parametrize("sign", SIGNS.values(), ids=SIGNS)
def test_a_rank_never_comes(group: FaultMesh, sign: signal.Signals, whose: int) -> None:
    """Its process is struck as soon as it is there; the group is formed by new processes, or its peers are stages."""
    node = group.nodes[whose]
    with ThreadPoolExecutor(1) as pool:
        placing = pool.submit(place, group)
        wait_until(lambda: node.runners() or placing.done(), PLACE_S, "a process of the group")
        (lost,) = node.runners()
        assert not placing.done(), "it was placed before its process was seen"
        struck_at = time.time()
        os.kill(lost, sign)
        with contextlib.suppress(MeshError):  # "try again" would be an answer, too
            placing.result(PLACE_S)
    what = f"a rank {sign.name} before it is ready"
    check(group, Stream(group.nodes[2], QUESTION), [lost], what, struck_at)
