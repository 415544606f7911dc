"""Tensor groups on real nodes, formed without anybody logging in anywhere: MLX's ring collectives on the loopback.

They spin a core per rank, so models are small, answers short, and nothing here says how fast a group is.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil
import pytest

from exo_mesh.errors import MeshError
from tests.support.peers import MODEL, Peer, mesh, text_of
from tests.support.processes import eventually, gone
from tests.support.questions import QUESTIONS, Reference, ask

pytest.importorskip("mlx.core")

pytestmark = pytest.mark.timeout(900)

PLACE_S = 300.0
KV_HEADS = 2  # of the demo model
NAMES = ("count up", "spell", "add")
LONG = (*NAMES, "long")
FIGURES = ("stage_memory_bytes", "step_all_reduce_seconds")


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Peer]]:
    """Two peers with MLX, and one that would rather use another engine. All may form groups over TCP."""
    flags = ["--group-backend", "ring", "--max-memory", "2GB"]
    with mesh(tmp_path_factory.mktemp("groups"), [flags, flags, [*flags, "--engine", "numpy"]]) as peers:
        yield peers


@pytest.fixture(autouse=True)
def nothing_is_left(three: list[Peer]) -> Iterator[None]:
    """One test that fails must not leave its ring to the next. What its owner has ended already may still be in the
    view of another peer for a moment."""
    yield
    for instance in three[0].instances():
        with contextlib.suppress(MeshError):
            three[0].api.delete(f"/instance/{instance['id']}", 30)


def place(peers: list[Peer], **wish: Any) -> dict[str, Any]:
    assert eventually(lambda: not any(peer.instances() for peer in peers))
    assert eventually(lambda: all(t["reserved_bytes"] == 0 for t in peers[0].state()["telemetry"].values()))
    instance: dict[str, Any] = peers[0].api.post("/instance", {"model": MODEL, **wish}, PLACE_S)
    assert eventually(lambda: all(peer.instances() == [instance] for peer in peers))
    return instance


def end(peers: list[Peer], instance: dict[str, Any]) -> None:
    family = [process for peer in peers for process in peer.runners()]
    peers[0].api.delete(f"/instance/{instance['id']}", 15)
    assert eventually(lambda: gone(family), 5), "a rank outlived its group"


def shape(instance: dict[str, Any]) -> list[tuple[int, str]]:
    return [(len(s["group"]["peers"]) if "group" in s else 1, s["engine"]) for s in instance["stages"]]


def answers_right(peers: list[Peer], whole: Reference, names: tuple[str, ...]) -> None:
    for name in names:
        answer = ask(peers[-1], QUESTIONS[name][0])
        assert (name, answer.text, answer.tokens) == (name, whole[name].text, whole[name].tokens)
        assert answer.logprobs == pytest.approx(whole[name].logprobs, abs=1e-3)


def stages(peers: list[Peer], pin: dict[str, Any], other: dict[str, Any]) -> list[dict[str, Any]]:
    group = {"peers": [peer.id for peer in peers[:2]], "backend": "ring"}
    one = {"peer": peers[0].id, "engine": "mlx", "group": group, **pin}
    return sorted([one, {"peer": peers[2].id, **other}], key=lambda stage: stage["layers"])


@pytest.mark.slow
@pytest.mark.parametrize(
    "names",
    [
        pytest.param(NAMES, id="short"),
        pytest.param(LONG, id="long"),
    ],
)
def test_two_peers_are_one_group_where_one_would_not_do(
    three: list[Peer], whole: Reference, names: tuple[str, ...]
) -> None:
    instance = place(three, min_peers=2, engine="mlx", exclude_peers=[three[2].id])
    assert shape(instance) == [(2, "mlx")]
    held = [peer.api.get("/memory", 10)["stages"][0]["group"] for peer in three[:2]]
    assert sorted(one["rank"] for one in held) == [0, 1]
    assert {one["kv_heads"] * one["ranks"] for one in held} == {KV_HEADS}, "each rank keeps half of the heads"
    answers_right(three, whole, names)
    end(three, instance)


@pytest.mark.parametrize(
    ("group_first", "engine", "names"),
    [
        pytest.param(True, "mlx", NAMES, id="2-1-mlx", marks=pytest.mark.extended),
        pytest.param(True, "mlx", LONG, id="2-1-mlx-long", marks=pytest.mark.slow),
        pytest.param(True, "numpy", LONG, id="2-1-numpy", marks=pytest.mark.slow),
        pytest.param(False, "mlx", LONG, id="1-2-mlx", marks=pytest.mark.slow),
        pytest.param(False, "numpy", LONG, id="1-2-numpy", marks=pytest.mark.slow),
    ],
)
def test_a_group_and_a_peer_of_any_engine_share_a_ring(
    three: list[Peer], whole: Reference, engine: str, group_first: bool, names: tuple[str, ...]
) -> None:
    ranges = ([0, 5], [5, 8]) if group_first else ([3, 8], [0, 3])
    wish = stages(three, {"layers": ranges[0]}, {"layers": ranges[1], "engine": engine})
    instance = place(three, stages=wish)
    assert shape(instance) == ([(2, "mlx"), (1, engine)] if group_first else [(1, engine), (2, "mlx")])
    answers_right(three, whole, names)
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda _: ask(three[0], QUESTIONS["spell"][0]).text, range(8)))
    assert together == ["r-o-b-o-t"] * 8
    for rank, peer in enumerate(three[:2]):
        shown = peer.api.text("/metrics")
        memory, reduces = (re.findall(rf'^exo_mesh_{name}{{.*rank="{rank}".*}} (\S+)', shown, re.M) for name in FIGURES)
        assert [float(value) > 0 for value in (*memory, *reduces)] == [True, True], shown
    end(three, instance)


@pytest.mark.slow
@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_lost_under_a_stream_costs_a_pause(three: list[Peer], rank: int, sign: signal.Signals) -> None:
    instance = place(three, tensor_group=2, engine="mlx", exclude_peers=[three[2].id])
    owner = {peer.id: peer for peer in three}[instance["stages"][0]["group"]["peers"][rank]]
    victims = owner.runners()
    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(three[2].chat, "Count from 3 to 60.", max_tokens=200)
        assert eventually(three[0].busy, 30)
        for process in victims:
            os.kill(process.pid, sign)
        reply = asking.result(180)
    assert text_of(reply) == ", ".join(map(str, range(3, 61)))
    assert eventually(lambda: gone(victims), 5) or all(map(has_ended, victims))
    (instance,) = three[0].instances()
    end(three, instance)


def has_ended(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


@pytest.mark.extended
def test_heads_that_do_not_divide_are_refused_with_the_numbers(three: list[Peer]) -> None:
    found = three[0].api.get(f"/instance/previews?model={MODEL}&tensor_group=3&engine=mlx", PLACE_S)["previews"]
    refusals = [entry["refused"]["message"] for entry in found if "refused" in entry]
    assert refusals and all("3 ranks cannot share out evenly: 4 attention heads" in text for text in refusals)
