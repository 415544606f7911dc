"""Peers are found by id, name or the beginning of an id, and told apart where names are equal."""

from __future__ import annotations

import pytest

from exo_mesh.base.printable import counted
from exo_mesh.domain.device import PeerInfo
from exo_mesh.errors import InputError
from exo_mesh.mesh.membership.naming import peer_called, told_apart

IDS = {"0123456789": "vm", "01239999": "vm", "abcdef01": "studio", "dddd0000": "abcdef01"}
PEERS = [PeerInfo(peer_id, 1, name, "0.1", 1, "default", ()) for peer_id, name in IDS.items()]


@pytest.mark.parametrize(
    ("name", "found"),
    [("abcdef01", "abcdef01"), ("studio", "abcdef01"), ("abcd", "abcdef01"), ("abc", None), ("01234", "0123456789"),
     ("nobody", None), ("", None)],
)  # fmt: skip
def test_a_peer_is_found_by_id_name_or_the_beginning_of_its_id(name: str, found: str | None) -> None:
    peer = peer_called(name, PEERS)
    assert (peer.id if peer is not None else None) == found


@pytest.mark.parametrize("name", ["vm", "0123"])
def test_two_peers_of_one_name_are_never_confused(name: str) -> None:
    with pytest.raises(InputError, match=r"2 peers are called .* use an id \(0123456789, 01239999\)"):
        peer_called(name, PEERS)


def test_equal_names_are_told_apart() -> None:
    shown = told_apart(IDS.items())
    assert shown["0123456789"] == "vm (012345)" and shown["01239999"] == "vm (012399)"
    assert shown["abcdef01"] == "studio"


def test_one_is_singular() -> None:
    assert [counted(number, "other peer") for number in (0, 1, 2, "?")] == [
        "0 other peers", "1 other peer", "2 other peers", "? other peers",
    ]  # fmt: skip
