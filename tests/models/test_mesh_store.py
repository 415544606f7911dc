"""The host of the model store is found as any other peer, and is never guessed."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from exo_mesh.domain.device import PeerInfo
from exo_mesh.errors import InputError, NotReadyError
from exo_mesh.models.mesh_store import MeshStore, StoreRules
from exo_mesh.settings.config import Settings

OWN = PeerInfo("ffff0000", 1, "own", "0.1", 1, "default", ())
STORES = [
    PeerInfo(peer_id, 1, name, "0.1", 1, "default", (), has_store=True)
    for peer_id, name in (("01234567", "vm"), ("01239999", "vm"), ("abcdef01", "studio"))
]


def store(host: str) -> MeshStore:
    peers = {info.id: SimpleNamespace(id=info.id, info=info) for info in STORES}
    membership: Any = SimpleNamespace(own=OWN, peers=list(peers.values()), peer=peers.get)
    return MeshStore(membership, StoreRules(host=host))


@pytest.mark.parametrize(
    ("host", "found"), [("studio", "abcdef01"), ("abcdef01", "abcdef01"), ("abcd", "abcdef01"), ("", "01234567")]
)
def test_the_host_is_named_by_its_id_its_name_or_four_digits(host: str, found: str) -> None:
    assert store(host).require_host().id == found


@pytest.mark.parametrize("host", ["vm", "0123"])
def test_two_stores_of_one_name_are_never_confused(host: str) -> None:
    assert store(host).remote is None, "copies are staged from no store by chance"
    with pytest.raises(InputError, match=r"2 peers are called .* use an id \(01234567, 01239999\)"):
        store(host).require_host()


def test_a_host_that_is_away_is_named() -> None:
    with pytest.raises(NotReadyError, match="the host of the model store, away, is not in the mesh"):
        store("away").require_host()


@pytest.mark.parametrize(("host", "is_here"), [("own", True), ("ffff", True), ("", True), ("fff", False)])
def test_a_node_knows_itself_by_the_same_rule(tmp_path: Path, host: str, is_here: bool) -> None:
    assert StoreRules.of(Settings(tmp_path, "own", store=tmp_path, store_host=host), OWN).is_here == is_here
