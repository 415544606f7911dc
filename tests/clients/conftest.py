"""A mesh of two peers for the clients, and what their own environments need."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

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
