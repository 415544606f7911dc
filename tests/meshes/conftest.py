"""Fixtures of the end-to-end tests: a mesh of two peers that their modules share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.peers import Peer, mesh


@pytest.fixture(scope="package")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Peer]]:
    """Two peers with the demo model half on one and half on the other.

    A test that ends this instance must place the model again.
    """
    with mesh(tmp_path_factory.mktemp("pair"), [["--min-peers", "2"]] * 2) as peers:
        instance = peers[0].place()
        assert {stage["peer"] for stage in instance["stages"]} == {peer.id for peer in peers}
        yield peers
