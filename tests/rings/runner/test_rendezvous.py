"""The ranks of a tensor group meet before their library does, or learn who is missing."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from exo_mesh.cli.bench.local_ring import free_endpoints
from exo_mesh.domain.plan import Ballot, Plan, PlanInputs, StagePlan
from exo_mesh.domain.shard import Shard
from exo_mesh.domain.tensor_group import RankWiring
from exo_mesh.errors import RankLostError
from exo_mesh.rings.runner.group.rendezvous import group_key, meet

KEY = b"k" * 32
PATIENCE_S = 20.0


def wirings(size: int) -> list[RankWiring]:
    endpoints = free_endpoints(size)
    return [RankWiring("ring", rank, endpoints) for rank in range(size)]


def start(
    pool: ThreadPoolExecutor, wiring: RankWiring, key: bytes = KEY, patience_s: float = PATIENCE_S
) -> Future[None]:
    return pool.submit(meet, wiring, key, patience_s)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)], ids=str)
def test_all_go_on_when_the_last_has_come(order: tuple[int, ...]) -> None:
    ranks = wirings(3)
    with ThreadPoolExecutor(3) as pool:
        first = [start(pool, ranks[rank]) for rank in order[:-1]]
        assert not any(future.done() for future in first)
        last = start(pool, ranks[order[-1]])
        for future in (*first, last):
            future.result(PATIENCE_S)


def test_the_port_is_free_again_at_once() -> None:
    ranks = wirings(2)
    with ThreadPoolExecutor(2) as pool:
        for future in [start(pool, wiring) for wiring in ranks]:
            future.result(PATIENCE_S)
    host, port = ranks[0].endpoints[0].split(":")
    with socket.socket() as plain:  # without SO_REUSEADDR: a connection that lingered there would be in the way
        plain.bind((host, int(port)))


@pytest.mark.extended
def test_the_leader_names_who_did_not_come() -> None:
    ranks = wirings(4)
    with ThreadPoolExecutor(2) as pool:
        leader, other = start(pool, ranks[0], patience_s=0.6), start(pool, ranks[2], patience_s=0.9)
        with pytest.raises(RankLostError, match="rank 1, 3 of 4 did not connect in 1 s"):
            leader.result(PATIENCE_S)
        with pytest.raises(RankLostError, match=r"rank 2 waited at .*, but not all ranks connected"):
            other.result(PATIENCE_S)


def test_a_rank_without_a_leader_says_so() -> None:
    with pytest.raises(RankLostError, match="the leader did not answer in 0 s"):
        meet(wirings(2)[1], KEY, 0.3)


def test_a_taken_port_is_told() -> None:
    ranks = wirings(2)
    host, port = ranks[0].endpoints[0].split(":")
    with (
        socket.create_server((host, int(port))),
        pytest.raises(RankLostError, match="rank 0 cannot meet the other ranks"),
    ):
        meet(ranks[0], KEY, 1.0)


def say(what: bytes) -> Callable[[str], None]:
    def call(endpoint: str) -> None:
        host, port = endpoint.split(":")
        with socket.create_connection((host, int(port)), PATIENCE_S) as caller:
            caller.sendall(what)
            caller.settimeout(PATIENCE_S)
            with contextlib.suppress(ConnectionResetError):  # if it had said more than anybody read
                assert caller.recv(1) == b"", "a stranger is not told to go"

    return call


STRANGERS = {
    "another group": b"x" * 32 + b"\1\0\0\0",
    "no such rank": KEY + b"\7\0\0\0",
    "a second leader": KEY + b"\0\0\0\0",
    "a browser": b"GET / HTTP/1.1\r\nHost: somebody.else\r\n\r\n",
}


@pytest.mark.parametrize("stranger", [say(what) for what in STRANGERS.values()], ids=list(STRANGERS))
def test_a_stranger_is_sent_away_and_the_ranks_meet(stranger: Callable[[str], None]) -> None:
    ranks = wirings(2)
    with ThreadPoolExecutor(3) as pool:
        leader = start(pool, ranks[0])
        while True:
            try:
                stranger(ranks[0].endpoints[0])
                break
            except ConnectionRefusedError:
                assert not leader.done()
        follower = start(pool, ranks[1])
        leader.result(PATIENCE_S)
        follower.result(PATIENCE_S)


def test_another_ballot_is_another_group() -> None:
    def key(counter: int, stage: int) -> bytes:
        stages = (StagePlan("a", "mlx", Shard("m", 0, 2, 2), 0),)
        return group_key(Plan("i", Ballot(counter, "a"), "m", "d", stages, 64, PlanInputs((), "memory", 1)), stage)

    assert len({key(1, 0), key(2, 0), key(1, 1)}) == 3
    assert key(1, 0) == key(1, 0) and len(key(1, 0)) == 32
