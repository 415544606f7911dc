"""A node without an HTTP API is a member like any other: it holds a stage of a ring, and requests enter elsewhere."""

from __future__ import annotations

from collections.abc import Iterator

import psutil
import pytest

from tests.support.own_memory import own_bytes
from tests.support.peers import Peer, mesh, text_of
from tests.support.slope import second_half

QUESTION = "What is 7 plus 5?"
ALLOWANCE_BYTES = 2**20
"""Python takes memory from the system in pieces of 1 MiB."""


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Peer]]:
    with mesh(tmp_path_factory.mktemp("no-api"), [[], ["--no-api"]], engine="numpy") as peers:
        yield peers


@pytest.fixture(params=[pytest.param("first", marks=pytest.mark.extended), "last"])
def silent(two: list[Peer], request: pytest.FixtureRequest) -> Iterator[Peer]:
    """The peer without an API, as the first stage of a ring, or as the last one, which draws the tokens."""
    speaking, silent = two
    assert speaking.url and not silent.url
    order = [silent, speaking] if request.param == "first" else [speaking, silent]
    pins = {peer.id: layers for peer, layers in zip(order, ([0, 3], [3, 8]), strict=True)}
    instance = speaking.place(pins=pins)
    assert [stage["peer"] for stage in instance["stages"]] == [peer.id for peer in order]
    yield silent
    speaking.api.delete(f"/instance/{instance['id']}", 15)


@pytest.fixture(scope="module")
def expected(two: list[Peer]) -> str:
    """What the peer with an API answers without the other one."""
    alone = two[0].place(pins={two[0].id: [0, 8]})
    text = text_of(two[0].chat(QUESTION))
    two[0].api.delete(f"/instance/{alone['id']}", 15)
    assert text
    return text


def test_requests_through_another_peer_are_answered_with_its_layers(
    two: list[Peer], expected: str, silent: Peer
) -> None:
    assert [text_of(two[0].chat(QUESTION)) for _ in range(5)] == [expected] * 5


@pytest.mark.slow
def test_a_hundred_requests_leave_nothing_in_it(two: list[Peer], silent: Peer) -> None:
    processes = [psutil.Process(silent.child.pid), *silent.runners()]
    assert len(processes) > 1
    counts, samples = [], []
    for number in range(1, 101):
        two[0].chat(f"What is {number} plus 5?")
        if number % 5 == 0:
            counts.append(number)
            samples.append([own_bytes(process) for process in processes])
    found = [second_half(counts, list(figures)) for figures in zip(*samples, strict=True)]
    print([f"{one.growth / 1e6:+.2f} MB over the last {counts[-1] // 2} requests" for one in found])
    assert not [one for one in found if one.rises(ALLOWANCE_BYTES)]
