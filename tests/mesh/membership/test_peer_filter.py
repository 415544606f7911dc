"""`--node-id-filter` and `--interface-type-filter`: who is taken in, and where it is dialled."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from exo_mesh.domain.addresses import Interface, LinkKind
from exo_mesh.domain.device import PeerInfo
from exo_mesh.mesh.membership.peer_filter import PeerFilter

OWN = PeerInfo("a" * 32, 1, "alpha", "0.1.0", 4, "default", ("10.0.0.1:5000",), newest_protocol=5)
OTHER = replace(OWN, id="0123abcd" + 24 * "e", name="beta", addresses=("10.0.0.2:5000",))
CABLES = [
    Interface("en0", "10.0.0.1", 24, LinkKind.ETHERNET),
    Interface("wl0", "192.168.1.1", 24, LinkKind.WIFI),
    Interface("bridge0", "169.254.3.1", 16, LinkKind.THUNDERBOLT),
]


@pytest.mark.parametrize(
    ("words", "is_taken"),
    [
        ((), True),
        (("beta",), True),
        (("gamma", "beta"), True),
        (("0123abcd",), True),
        ((OTHER.id,), True),
        (("gamma",), False),
        (("0123",), True),
        (("012",), False),
        (("alpha",), False),
    ],
)
def test_only_peers_that_are_named_are_taken_in(words: tuple[str, ...], is_taken: bool) -> None:
    said = PeerFilter(words).refusal(OWN, OTHER)
    assert said == ("" if is_taken else "the --node-id-filter of alpha does not name it")


def test_a_peer_of_another_namespace_stays_refused_though_it_is_named() -> None:
    assert "namespace" in PeerFilter(("beta",)).refusal(OWN, replace(OTHER, namespace="other"))


@pytest.mark.parametrize(
    ("types", "dialled"),
    [
        ((), ["10.0.0.2:1", "192.168.1.7:1", "169.254.9.9:1", "100.64.0.1:1", "8.8.8.8:1", "127.0.0.1:1", "box:1"]),
        (("ethernet",), ["10.0.0.2:1"]),
        (("thunderbolt", "wifi"), ["192.168.1.7:1", "169.254.9.9:1"]),
        (("vpn", "loopback"), ["100.64.0.1:1", "127.0.0.1:1"]),
        (("other",), ["8.8.8.8:1", "box:1"]),
    ],
)
def test_only_addresses_on_links_of_the_named_kinds_are_dialled(types: tuple[str, ...], dialled: list[str]) -> None:
    every = ["10.0.0.2:1", "192.168.1.7:1", "169.254.9.9:1", "100.64.0.1:1", "8.8.8.8:1", "127.0.0.1:1", "box:1"]
    assert PeerFilter(types=types, read=lambda: CABLES).dialable(every) == dialled


def test_a_peer_with_no_address_on_such_a_link_is_refused_with_the_reason() -> None:
    door = PeerFilter(types=("thunderbolt", "ethernet"), read=lambda: CABLES)
    assert door.obstacle(["192.168.1.7:1", "10.0.0.2:1"]) == ""
    assert door.obstacle(["192.168.1.7:1"]) == (
        "none of its addresses is on thunderbolt or ethernet, as --interface-type-filter requires"
    )
