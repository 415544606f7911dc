"""Which addresses are advertised, dialled and used: tables, checkable by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exo_mesh.domain.addresses import (
    Interface,
    LinkKind,
    Path,
    advertised,
    best_path,
    dialable,
    kind_of_interface,
    link_kind,
)

ETH, WIFI, VPN, BRIDGE, LO = LinkKind.ETHERNET, LinkKind.WIFI, LinkKind.VPN, LinkKind.BRIDGE, LinkKind.LOOPBACK

LAPTOP = [
    Interface("docker0", "172.17.0.1", 16, BRIDGE, 5),
    Interface("eth0", "192.168.1.20", 24, ETH, 2),
    Interface("eth0", "2001:db8::20", 64, ETH, 2),
    Interface("eth0", "fe80::20", 64, ETH, 2),
    Interface("lo", "127.0.0.1", 8, LO, 1),
    Interface("lo", "::1", 128, LO, 1),
    Interface("tailscale0", "100.64.0.20", 32, VPN, 6),
    Interface("tailscale0", "fe80::99", 64, VPN, 6),
    Interface("wlan0", "192.168.2.20", 23, WIFI, 3),
]


@pytest.mark.parametrize(
    ("address", "prefix_len", "broadcast"),
    [
        ("192.168.1.20", 24, "192.168.1.255"),
        ("192.168.1.20", 23, "192.168.1.255"),
        ("192.168.2.20", 23, "192.168.3.255"),
        ("10.1.2.3", 8, "10.255.255.255"),
        ("172.16.5.4", 20, "172.16.15.255"),
        ("10.0.0.5", 30, "10.0.0.7"),
        ("10.0.0.4", 31, None),
        ("10.0.0.4", 32, None),
        ("2001:db8::1", 64, None),
    ],
)
def test_the_broadcast_address_follows_the_netmask(address: str, prefix_len: int, broadcast: str | None) -> None:
    assert Interface("eth0", address, prefix_len, ETH).broadcast == broadcast


@pytest.mark.parametrize(
    ("name", "system", "traits", "kind"),
    [
        ("eth0", "Linux", {}, ETH),
        ("enp3s0", "Linux", {}, ETH),
        ("wlp2s0", "Linux", {"wireless": True}, WIFI),
        ("enp7s0", "Linux", {"wireless": True}, WIFI),
        ("docker0", "Linux", {"bridge": True}, BRIDGE),
        ("br-3f2a", "Linux", {"bridge": True}, BRIDGE),
        ("veth12ab", "Linux", {}, BRIDGE),
        ("tailscale0", "Linux", {}, VPN),
        ("wg0", "Linux", {}, VPN),
        ("lo", "Linux", {}, LO),
        ("thunderbolt0", "Linux", {}, LinkKind.THUNDERBOLT),
        ("en0", "Darwin", {}, ETH),
        ("bridge0", "Darwin", {}, LinkKind.THUNDERBOLT),
        ("bridge100", "Darwin", {}, BRIDGE),
        ("utun4", "Darwin", {}, VPN),
        ("lo0", "Darwin", {}, LO),
        ("awdl0", "Darwin", {}, None),
        ("llw0", "Darwin", {}, None),
    ],
)
def test_the_kind_of_an_interface(name: str, system: str, traits: dict[str, bool], kind: LinkKind | None) -> None:
    assert kind_of_interface(name, system, **traits) is kind


def test_all_usable_addresses_are_advertised_best_first_and_the_loopback_is_not() -> None:
    assert advertised("0.0.0.0", 5000, LAPTOP) == (
        "192.168.1.20:5000",
        "[2001:db8::20]:5000",
        "192.168.2.20:5000",
        "[fe80::20]:5000",
        "172.17.0.1:5000",
        "100.64.0.20:5000",
    )


@pytest.mark.parametrize(
    ("host", "addresses"),
    [
        ("127.0.0.1", ("127.0.0.1:5000",)),
        ("::1", ("[::1]:5000",)),
        ("192.168.1.20", ("192.168.1.20:5000",)),
        ("studio.local", ("studio.local:5000",)),
    ],
)
def test_a_node_bound_to_one_address_advertises_that(host: str, addresses: tuple[str, ...]) -> None:
    assert advertised(host, 5000, LAPTOP) == addresses


def test_a_machine_without_a_network_advertises_the_loopback() -> None:
    assert advertised("0.0.0.0", 5000, [item for item in LAPTOP if item.kind is LO]) == ("127.0.0.1:5000",)


def test_a_pile_of_ipv6_addresses_is_cut() -> None:
    pile = [Interface("eth0", f"2001:db8::{n}", 64, ETH, 2) for n in range(1, 30)]
    assert advertised("::", 1, pile) == ("[2001:db8::1]:1", "[2001:db8::2]:1")


@pytest.mark.parametrize(
    ("address", "ways"),
    [
        ("192.168.9.9:5000", ("192.168.9.9:5000",)),
        ("studio.local:5000", ("studio.local:5000",)),
        ("[2001:db8::1]:5000", ("[2001:db8::1]:5000",)),
        ("[fe80::7]:5000", ("[fe80::7%eth0]:5000",)),
        ("[fe80::7%eth0]:5000", ("[fe80::7%eth0]:5000",)),
        ("[fe80::7%2]:5000", ("[fe80::7%eth0]:5000",)),
        ("[fe80::7%eth9]:5000", ()),
        ("169.254.7.7:5000", ()),
    ],
)
def test_link_local_addresses_are_dialled_only_on_a_matching_interface(address: str, ways: tuple[str, ...]) -> None:
    assert dialable(address, LAPTOP) == ways


def test_an_ipv4_link_local_address_needs_an_interface_with_one() -> None:
    cable = Interface("en5", "169.254.1.1", 16, ETH, 9)
    assert dialable("169.254.7.7:5000", [*LAPTOP, cable]) == ("169.254.7.7:5000",)


@pytest.mark.parametrize(
    ("address", "kind"),
    [
        ("192.168.1.7:5000", ETH),
        ("192.168.3.7:5000", WIFI),
        ("172.17.0.2:5000", BRIDGE),
        ("100.99.1.2:5000", VPN),
        ("[fd7a:115c:a1e0::1]:5000", VPN),
        ("127.0.0.1:5000", LO),
        ("[::1]:5000", LO),
        ("[fe80::7%eth0]:5000", ETH),
        ("10.9.9.9:5000", LinkKind.UNKNOWN),
        ("studio.local:5000", LinkKind.UNKNOWN),
    ],
)
def test_the_kind_of_a_way_is_that_of_the_network_it_is_in(address: str, kind: LinkKind) -> None:
    assert link_kind(address, LAPTOP) is kind


FAST = Path("fast:1", ETH, 0.4, 110.0)
SLOW = Path("slow:1", WIFI, 6.0, 20.0)
TUNNEL = Path("vpn:1", VPN, 0.2, 500.0)
DOCKER = Path("docker:1", BRIDGE, 0.1, 900.0)
HERE = Path("127.0.0.1:1", LO, 0.1, 900.0)
DEAD = Path("dead:1", LinkKind.THUNDERBOLT, failed=True)
UNKNOWN = Path("new:1", ETH)


@pytest.mark.parametrize(
    ("paths", "current", "best"),
    [
        ([SLOW, FAST], None, FAST),
        ([SLOW, FAST], "slow:1", FAST),
        ([TUNNEL, DOCKER, HERE, SLOW], "vpn:1", SLOW),
        ([HERE, TUNNEL, DOCKER], None, DOCKER),
        ([DEAD, TUNNEL], "dead:1", TUNNEL),
        ([DEAD, UNKNOWN], "dead:1", None),
        ([], None, None),
        # round trips wander: a third less, or a tenth of a millisecond, is no reason to move
        ([Path("a:1", ETH, 0.6), Path("b:1", ETH, 0.4)], "a:1", Path("a:1", ETH, 0.6)),
        ([Path("a:1", WIFI, 9.0), Path("b:1", WIFI, 7.0)], "a:1", Path("a:1", WIFI, 9.0)),
        ([Path("a:1", WIFI, 9.0), Path("b:1", WIFI, 5.0)], "a:1", Path("b:1", WIFI, 5.0)),
        # alike in time: the better cable, then the order given
        ([Path("w:1", WIFI, 0.5), Path("e:1", ETH, 0.5)], None, Path("e:1", ETH, 0.5)),
        ([Path("e:1", ETH, 0.5), Path("f:1", ETH, 0.5)], None, Path("e:1", ETH, 0.5)),
        # a short round trip on a thin pipe: 64 KiB take 66 ms at 1 MB/s
        ([Path("thin:1", ETH, 0.4, 1.0), Path("wide:1", ETH, 2.0, 100.0)], "thin:1", Path("wide:1", ETH, 2.0, 100.0)),
        # goodput counts only if it is known of all
        ([Path("thin:1", ETH, 0.4, 1.0), Path("wide:1", ETH, 2.0)], None, Path("thin:1", ETH, 0.4, 1.0)),
    ],
)
def test_the_best_path(paths: list[Path], current: str | None, best: Path | None) -> None:
    assert best_path(paths, current) == best


_paths = st.lists(
    st.builds(
        Path,
        st.sampled_from(["a:1", "b:1", "c:1", "d:1"]),
        st.sampled_from(LinkKind),
        st.none() | st.floats(0, 1e4),
        st.none() | st.floats(1e-3, 1e5),
        st.booleans(),
    ),
    max_size=6,
    unique_by=lambda path: path.address,
)


@given(_paths)
def test_the_choice_is_one_that_works_and_it_rests(paths: list[Path]) -> None:
    best = best_path(paths)
    assert (best is None) == (not any(path.works for path in paths))
    if best is not None:
        assert best.works and best_path(paths, best.address) == best, "the best is not left for another"
        if any(path.works and not path.kind.comes_last for path in paths):
            assert not best.kind.comes_last
