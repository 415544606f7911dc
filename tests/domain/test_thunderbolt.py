"""What macOS says of ports and cables, understood. tests/support/thunderbolt/README.md has where the words are from."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from exo_mesh.domain.device import PeerInfo, RdmaPort, StaticRank
from exo_mesh.domain.fast_synch import resolve, runner_environment
from exo_mesh.domain.rdma_links import (
    MAX_QUEUE_PAIRS,
    bridge_cycle,
    broken_cable,
    cables,
    queue_pairs_left,
    queue_pairs_needed,
    rdma_devices,
    static_groups,
)
from exo_mesh.domain.tensor_group import TensorGroup
from exo_mesh.domain.thunderbolt import (
    ThunderboltReading,
    is_new_enough,
    parse_hardware_ports,
    parse_ibv_devices,
    parse_ibv_devinfo,
    parse_max_queue_pairs,
    parse_rdma_ctl,
    parse_sw_vers,
    parse_thunderbolt,
    rdma_ports,
)

WORDS = Path(__file__).parents[1] / "support" / "thunderbolt"


def words(name: str) -> str:
    return (WORDS / name).read_text()


READING = ThunderboltReading(
    words("ibv_devices.txt"),
    words("ibv_devinfo.txt"),
    words("rdma_ctl.txt"),
    words("thunderbolt.json"),
    words("hardware_ports.txt"),
    words("sw_vers.txt"),
    words("ibv_devinfo_v.txt"),
)


def a_peer(name: str, *ports: RdmaPort, rank: StaticRank | None = None) -> PeerInfo:
    return PeerInfo(name, 1, name, "1", 1, "default", (), rdma_ports=ports, static_rank=rank)


def port(name: str, other: str, *, active: bool = True, device: str | None = None) -> RdmaPort:
    return RdmaPort(f"rdma_{name}" if device is None else device, active, name, other, "80 Gb/s")


def test_each_tool_is_understood() -> None:
    assert parse_ibv_devices(READING.ibv_devices) == ("rdma_en2", "rdma_en3", "rdma_en4")
    assert parse_ibv_devinfo(READING.ibv_devinfo) == {
        "rdma_en2": "PORT_ACTIVE",
        "rdma_en3": "PORT_DOWN",
        "rdma_en4": "PORT_DOWN",
    }
    interfaces = parse_hardware_ports(READING.hardware_ports)
    assert interfaces["Thunderbolt 3"] == "en4" and interfaces["Thunderbolt Bridge"] == "bridge0"
    assert parse_sw_vers(READING.sw_vers) == ("26.4.1", "25E253")
    first, second, third = parse_thunderbolt(READING.thunderbolt)
    assert first.others == (("B0000000-0000-4000-8000-000000000001", "mini-b"),) and first.gigabits == 80
    assert second.connected and not second.others, "a display is no host"
    assert not third.connected and third.gigabits == 120


def test_a_port_is_its_receptacle_with_the_device_over_it() -> None:
    first, second, third = rdma_ports(READING)
    assert (first.device, first.active, first.other_uuid[:1]) == ("rdma_en2", True, "B")
    assert (second.device, second.active, second.other_uuid) == ("rdma_en3", False, "")
    assert (third.device, third.active) == ("rdma_en4", False)
    without = rdma_ports(replace(READING, ibv_devices="", ibv_devinfo=""))
    assert [(p.device, p.active) for p in without] == [("", False)] * 3, "the cables are there, RDMA is not"
    assert rdma_ports(ThunderboltReading()) == ()


@pytest.mark.parametrize("text", ["", "[]", "{", '{"SPThunderboltDataType": [7, {}, {"domain_uuid_key": "x"}]}'])
def test_what_is_no_report_has_no_ports(text: str) -> None:
    assert parse_thunderbolt(text) == ()


@pytest.mark.parametrize(
    ("text", "enabled"), [("enabled\n", True), ("RDMA: disabled", False), ("", None), ("usage: rdma_ctl", None)]
)
def test_rdma_ctl_says_yes_no_or_nothing(text: str, enabled: bool | None) -> None:
    assert parse_rdma_ctl(text) is enabled


def test_macos_must_be_new_enough() -> None:
    assert [is_new_enough(v) for v in ("26.2", "27.0", "26.1.9", "15.7", "")] == [True, True, False, False, False]


def test_a_cable_needs_both_ends_to_agree_and_to_be_active() -> None:
    a, b = a_peer("a", port("a1", "b1")), a_peer("b", port("b1", "a1"))
    assert rdma_devices([a, b]) == {("a", "b"): "rdma_a1", ("b", "a"): "rdma_b1"}
    down = a_peer("b", port("b1", "a1", active=False))
    assert len(cables([a, down])) == 2 and rdma_devices([a, down]) == {}
    assert cables([a, a_peer("b", port("b1", ""))]) == [], "the other end does not see it"
    assert rdma_devices([a, a_peer("b", port("b1", "a1", device=""))]) == {}
    assert cables([a]) == []


def test_of_two_cables_the_first_is_used() -> None:
    a = a_peer("a", port("a2", "b2"), port("a1", "b1"))
    b = a_peer("b", port("b1", "a1"), port("b2", "a2"))
    assert rdma_devices([a, b]) == {("a", "b"): "rdma_a1", ("b", "a"): "rdma_b1"}


def ranked(name: str, rank: int, size: int = 2, group: str = "g", *devices: str | None) -> PeerInfo:
    return a_peer(name, rank=StaticRank(group, rank, size, "jaccl", devices))


def test_a_static_group_is_there_when_all_its_ranks_are() -> None:
    zero, one = ranked("z", 0, 2, "g", None, "rdma_en5"), ranked("a", 1, 2, "g", "rdma_en4", None)
    assert [[peer.id for peer in ranks] for ranks in static_groups([one, zero])] == [["z", "a"]]
    assert rdma_devices([one, zero]) == {("z", "a"): "rdma_en5", ("a", "z"): "rdma_en4"}
    assert static_groups([zero, ranked("a", 1, 2, "other")]) == []
    assert static_groups([zero, ranked("b", 5)]) == []


def test_a_group_hears_of_a_port_that_is_down() -> None:
    group = TensorGroup("jaccl", ("a", "b"), ((None, "rdma_a1"), ("rdma_b1", None)))
    a, b = a_peer("a", port("a1", "b1")), a_peer("b", port("b1", "a1"))
    assert broken_cable(group, [a, b]) == ""
    assert broken_cable(group, [a, a_peer("b", port("b1", "a1", active=False))]) == "the port rdma_b1 of b to a is down"
    assert broken_cable(group, [a, a_peer("b", port("b2", "a1"))]) == "the port rdma_b1 of b to a is down"
    assert broken_cable(group, [a, a_peer("b")]) == "", "a hostfile may know what the peer does not say"
    assert broken_cable(TensorGroup("ring", ("a", "b")), [a, b]) == ""


def test_fast_fences_are_for_those_who_ask() -> None:
    assert resolve("auto", {}).value is None and "wedge" in resolve("auto", {}).why
    assert resolve("on", {"MLX_METAL_FAST_SYNCH": "0"}).value == "1"
    assert resolve("off", {}).value == "0"
    assert resolve("auto", {"MLX_METAL_FAST_SYNCH": "1"}).value == "1"
    assert runner_environment("auto", {"A": "b"}) == {"A": "b"}
    assert runner_environment("on", {"A": "b"}) == {"A": "b", "MLX_METAL_FAST_SYNCH": "1"}


# queue pairs


def test_the_limits_of_devices_are_read_where_macos_tells_them() -> None:
    assert parse_max_queue_pairs(READING.ibv_limits) == {"rdma_en2": 10, "rdma_en3": 10}
    assert [port.max_queue_pairs for port in rdma_ports(READING)] == [10, 10, 0]
    assert parse_max_queue_pairs("") == parse_max_queue_pairs("hca_id: rdma_en2\n\tmax_qp:\t0\n") == {}


def test_a_mesh_takes_a_queue_pair_for_each_other_rank_and_a_ring_one_for_each_neighbour() -> None:
    two = TensorGroup("jaccl", ("a", "b"), ((None, "rdma_1"), ("rdma_2", None)))
    assert queue_pairs_needed(two) == {("a", "rdma_1"): 1, ("b", "rdma_2"): 1}
    assert queue_pairs_needed(TensorGroup("jaccl-ring", two.peers, two.rdma)) == {
        ("a", "rdma_1"): 2,
        ("b", "rdma_2"): 2,
    }
    assert not queue_pairs_needed(TensorGroup("ring", ("a", "b")))


def test_what_groups_take_of_a_device_is_no_longer_left() -> None:
    told, silent = replace(port("1", "2"), max_queue_pairs=4), port("2", "1")
    peers = [a_peer("a", told), a_peer("b", silent)]
    group = TensorGroup("jaccl", ("a", "b"), ((None, "rdma_1"), ("rdma_2", None)))
    assert queue_pairs_left(peers, []) == {("a", "rdma_1"): 4, ("b", "rdma_2"): MAX_QUEUE_PAIRS}
    assert queue_pairs_left(peers, [group] * 4) == {("a", "rdma_1"): 0, ("b", "rdma_2"): MAX_QUEUE_PAIRS - 4}


# bridges


def bridged(pairs: str, without: str = "") -> list[PeerInfo]:
    """Peers of one letter with a cable for each "ab"; all but `without` have a Thunderbolt Bridge."""
    ends = [(a, b) for pair in pairs.split() for a, b in (pair, pair[::-1])]
    return [
        a_peer(name, *(replace(port(a + b, b + a), bridged=name not in without) for a, b in ends if a == name))
        for name in sorted({name for name, _ in ends})
    ]


@pytest.mark.parametrize(
    ("pairs", "without", "looped"),
    [
        ("ab", "", ""),
        ("ab bc", "", ""),
        ("ab bc ca", "", "abc"),
        ("ab bc ca", "b", ""),
        ("ab bc ca cd", "", "abc"),
        ("ab bc cd da", "", "abcd"),
        ("ab ac ad", "", ""),
    ],
)
def test_bridged_macs_in_a_loop_are_found(pairs: str, without: str, looped: str) -> None:
    assert "".join(bridge_cycle(bridged(pairs, without))) == looped


def test_a_machine_with_a_thunderbolt_bridge_says_so_of_its_ports() -> None:
    assert all(port.bridged for port in rdma_ports(READING))
    plain = READING.hardware_ports.replace("Thunderbolt Bridge", "Another")
    assert not any(port.bridged for port in rdma_ports(replace(READING, hardware_ports=plain)))
