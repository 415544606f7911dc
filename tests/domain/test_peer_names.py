"""Peers are found by id, name or the beginning of an id, and told apart where names are equal."""

from __future__ import annotations

import pytest

from exo_mesh.base.printable import counted
from exo_mesh.domain.device import PeerInfo
from exo_mesh.domain.model import CardRules
from exo_mesh.domain.peer_names import MAX_LISTED, peer_named, peers_named, told_apart
from exo_mesh.errors import InputError, UnknownPeerError

IDS = {"0123456789": "vm", "01239999": "vm", "abcdef01": "studio", "dddd0000": "abcdef01"}
PEERS = [PeerInfo(peer_id, 1, name, "0.1", 1, "default", ()) for peer_id, name in IDS.items()]


@pytest.mark.parametrize(
    ("text", "found"), [("abcdef01", "abcdef01"), ("studio", "abcdef01"), ("abcd", "abcdef01"), ("01234", "0123456789")]
)
def test_a_peer_is_found_by_id_name_or_the_beginning_of_its_id(text: str, found: str) -> None:
    assert peer_named(text, PEERS).id == found


@pytest.mark.parametrize("text", ["abc", "nobody", "", "vm2"])
def test_an_error_lists_the_peers_if_nobody_is_called_so(text: str) -> None:
    with pytest.raises(
        UnknownPeerError, match=r'no peer is called .*; known peers: "abcdef01" \(dddd0000\), "studio"'
    ) as caught:
        peer_named(text, PEERS, "on")
    assert (caught.value.code, caught.value.param) == ("not_found", "on")


@pytest.mark.parametrize("text", ["vm", "0123"])
def test_two_peers_of_one_name_are_never_confused(text: str) -> None:
    with pytest.raises(InputError, match=r"2 peers are called .* use an id \(0123456789, 01239999\)"):
        peer_named(text, PEERS)


def test_a_peer_that_is_named_in_two_ways_counts_once() -> None:
    assert [peer.id for peer in peers_named(["abcd", "01234", "studio"], PEERS)] == ["abcdef01", "0123456789"]


def test_an_error_stays_short_in_a_large_mesh() -> None:
    many = [PeerInfo(f"{number:08}", 1, "n" * 300, "0.1", 1, "default", ()) for number in range(500)]
    for text in ("x" * 9999, "n" * 300):
        with pytest.raises(InputError) as caught:
            peer_named(text, many)
        assert len(str(caught.value)) < 150 * MAX_LISTED


@pytest.mark.parametrize(("text", "is_out"), [("studio", True), ("abcdef01", True), ("abcd", True), ("abc", False)])
def test_a_card_excludes_peers_by_the_same_rule(text: str, is_out: bool) -> None:
    assert (CardRules(excluded=(text,)).why_not(PEERS[2], 0) != "") == is_out


def test_equal_names_are_told_apart() -> None:
    shown = told_apart(IDS.items())
    assert shown["0123456789"] == "vm (012345)" and shown["01239999"] == "vm (012399)"
    assert shown["abcdef01"] == "studio"


def test_one_is_singular() -> None:
    assert [counted(number, "other peer") for number in (0, 1, 2, "?")] == [
        "0 other peers", "1 other peer", "2 other peers", "? other peers",
    ]  # fmt: skip
