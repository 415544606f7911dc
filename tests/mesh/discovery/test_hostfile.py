"""A hostfile is checked as a whole: MLX would notice these mistakes on another machine, much later."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

from exo_mesh.errors import InputError
from exo_mesh.mesh.discovery.peers_file import parse_peers

THREE: list[dict[str, Any]] = [
    {"ssh": "studio1", "ips": ["10.0.0.1", "fd00::1"], "rdma": [None, "rdma_en5", "rdma_en4"]},
    {"ssh": "me@studio2.local", "ips": [], "rdma": ["rdma_en5", None, "rdma_en3"]},
    {"ssh": "studio3", "rdma": ["rdma_en4", "rdma_en3", None]},
]


def changed(rank: int, **fields: Any) -> list[dict[str, Any]]:
    """THREE with fields of one host set, or removed where the value is ...."""
    hosts = copy.deepcopy(THREE)
    hosts[rank].update(fields)
    hosts[rank] = {name: value for name, value in hosts[rank].items() if value is not ...}
    return hosts


def test_a_good_one_names_its_hosts() -> None:
    expected = ("10.0.0.1:5000", "[fd00::1]:5000", "studio2.local:5000", "studio3:5000")
    assert parse_peers(json.dumps(THREE), "f", 5000) == expected
    assert parse_peers(json.dumps({"backend": "jaccl", "hosts": THREE}), "f", 5000) == expected


def test_without_rdma_it_is_one_for_the_ring_backend() -> None:
    assert parse_peers('[{"ssh": "a", "ips": ["10.0.0.1"]}, {"ssh": "b"}]', "f", 7) == ("10.0.0.1:7", "b:7")


def test_mlx_writes_an_empty_row_where_there_is_no_rdma() -> None:
    hosts = [{"ssh": "a", "ips": ["10.0.0.1"], "rdma": []}, {"ssh": "b", "ips": [], "rdma": []}]
    assert parse_peers(json.dumps(hosts), "f", 7) == ("10.0.0.1:7", "b:7")


@pytest.mark.parametrize("no_device", [None, "mlx5_0", "rdma_en5"])
def test_hosts_need_not_all_be_connected(no_device: str | None) -> None:
    assert parse_peers(json.dumps(changed(1, rdma=["rdma_en5", None, no_device])), "f", 5000)


@pytest.mark.parametrize(
    ("hosts", "message"),
    [
        (changed(1, ssh=...), "[1].ssh: is missing"),
        (changed(1, ssh="a b"), "[1].ssh: must be a host or an address"),
        (changed(1, ssh="me@"), "[1].ssh: must be a host or an address"),
        (changed(1, ssh=7), "[1].ssh: must be a host or an address"),
        (changed(0, ips=...), "[0].ips: the first host needs an address, because the others connect to it"),
        (changed(0, ips=[]), "[0].ips: the first host needs an address, because the others connect to it"),
        (changed(1, ips="10.0.0.2"), "[1].ips: must be a list of addresses"),
        (changed(1, ips=["10.0.0.2", 7]), "[1].ips[1]: must be a host or an address"),
        (changed(2, rdma=...), "[2].rdma: is missing, but other hosts have it"),
        (changed(2, rdma="rdma_en4"), "[2].rdma: must be a list of device names and null"),
        (changed(2, rdma=["rdma_en4", None]), "[2].rdma: must have one entry per host, 3, not 2"),
        (changed(2, rdma=[None] * 4), "[2].rdma: must have one entry per host, 3, not 4"),
        (changed(1, rdma=["rdma_en5", "rdma_en6", None]),
         "[1].rdma[1]: must be null: a host needs no device to reach itself"),
        (changed(1, rdma=["rdma en5", None, None]), "[1].rdma[0]: must be the name of a device, or null"),
        (changed(1, rdma=["", None, None]), "[1].rdma[0]: must be the name of a device, or null"),
        (changed(1, rdma=[5, None, None]), "[1].rdma[0]: must be the name of a device, or null"),
        ([*THREE[:2], "studio3"], "[2]: must be an object with ssh, ips and rdma, like the other entries"),
    ],
)  # fmt: skip
def test_each_rule_has_one_clear_message(hosts: list[Any], message: str) -> None:
    for content, key in ((hosts, ""), ({"hosts": hosts}, "hosts")):
        with pytest.raises(InputError) as refused:
            parse_peers(json.dumps(content), "hosts.json", 5000)
        assert str(refused.value) == f"hosts.json: {key}{message}"
        assert refused.value.param == "peers_file"
