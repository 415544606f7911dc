"""A mesh of two peers for the clients, and what their own environments need."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.clients.test_clients import PYTHONS
from tests.support.peers import Peer, mesh


@pytest.fixture(scope="package")
def entry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Peer]:
    """The peer that does not drive the ring; the demo model is half on one and half on the other."""
    with mesh(tmp_path_factory.mktemp("clients"), [["--min-peers", "2"]] * 2) as peers:
        instance = peers[0].place()
        driver = instance["stages"][-1]["peer"]
        yield next(peer for peer in peers if peer.id != driver)


@pytest.fixture(scope="package")
def url(entry: Peer) -> str:
    return entry.url


@pytest.fixture(scope="module", params=PYTHONS)
def versions(request: pytest.FixtureRequest) -> str:
    """For clients that are tried in two versions: the variable of each Python in turn."""
    return str(request.param)
