"""What MLX would choke on, or wait on for ever, is told beforehand: which rule, which rank."""

from __future__ import annotations

import pytest

from exo_mesh.domain.tensor_group import GroupBackend, RdmaMatrix
from exo_mesh.domain.wiring_rules import rdma_obstacle, wiring_obstacle

TWO = ("10.0.0.1:7000", "10.0.0.2:7000")
CABLE = ((None, "rdma_en5"), ("rdma_en4", None))
CHAIN = ((None, "rdma_en5", None), ("rdma_en4", None, "rdma_en5"), (None, "rdma_en4", None))


def mesh(size: int) -> RdmaMatrix:
    return tuple(tuple(None if a == b else f"rdma_en{2 + (b - a) % size}" for b in range(size)) for a in range(size))


def loop(size: int) -> RdmaMatrix:
    """Cables to both neighbours and no others."""
    near = {1, size - 1}
    return tuple(
        tuple(f"rdma_en{4 + (b - a) % size % 2}" if (b - a) % size in near else None for b in range(size))
        for a in range(size)
    )


@pytest.mark.parametrize("size", [2, 3, 4])
def test_full_meshes_and_rings_are_fine(size: int) -> None:
    endpoints = [f"10.0.0.{rank + 1}:7000" for rank in range(size)]
    assert wiring_obstacle("ring", endpoints) == ""
    assert wiring_obstacle("jaccl", endpoints, mesh(size)) == ""
    assert wiring_obstacle("jaccl-ring", endpoints, loop(size)) == ""


@pytest.mark.parametrize(
    ("backend", "endpoints", "rdma", "obstacle"),
    [
        ("ring", TWO[:1], (), "a tensor group needs at least two ranks, not 1"),
        ("ring", TWO, CABLE, "RDMA devices are listed, but the ring backend uses TCP"),
        ("ring", ("10.0.0.1:7000", "mac.local:7000"), (),
         'rank 1 listens at "mac.local", but MLX\'s collectives accept IPv4 addresses only'),
        ("ring", ("10.0.0.1:7000", "fd00::2:7000"), (),
         'rank 1 listens at "fd00::2", but MLX\'s collectives accept IPv4 addresses only'),
        ("ring", ("10.0.0.1", "10.0.0.2:7000"), (), 'rank 0 listens at "10.0.0.1", which is not address:port'),
        ("ring", ("10.0.0.1:0", "10.0.0.2:7000"), (), 'rank 0 listens at "10.0.0.1:0", which is not address:port'),
        ("ring", ("10.0.0.1:7000", "10.0.0.2:65536"), (),
         'rank 1 listens at "10.0.0.2:65536", which is not address:port'),
        ("ring", ("0.0.0.0:7000", "10.0.0.2:7000"), (), "rank 0 listens at 0.0.0.0, which the other ranks cannot dial"),
        ("ring", (TWO[0], TWO[0]), (), "rank 0 and rank 1 both listen at 10.0.0.1:7000"),
        ("jaccl", ("mac:7000", ""), CABLE,
         'rank 0 listens at "mac", but MLX\'s collectives accept IPv4 addresses only'),
        ("jaccl", TWO, (), "0 ranks list RDMA devices, but the group has 2"),
        ("jaccl", TWO, ((None, "rdma_en5"), ("rdma_en4",)), "rank 1 lists 1 RDMA devices, but the group has 2 ranks"),
        ("jaccl", TWO, (("rdma_en3", "rdma_en5"), ("rdma_en4", None)),
         "rank 0 lists the RDMA device rdma_en3 for itself, which must be null"),
        ("jaccl", TWO, ((None, "rdma en5"), ("rdma_en4", None)),
         'rank 0 lists "rdma en5" for rank 1, which is not the name of an RDMA device'),
        ("jaccl", ("10.0.0.1:7000",) * 3, CHAIN,
         "no RDMA device is listed from rank 0 to rank 2: a full mesh needs every pair"),
        ("jaccl-ring", ("10.0.0.1:7000",) * 3, CHAIN,
         "no RDMA device is listed from rank 0 to rank 2: a ring needs both neighbours"),
        ("jaccl", ("10.0.0.1:7000",) * 9, mesh(9), "JACCL joins at most 8 ranks in a mesh, not 9"),
    ],
)  # fmt: skip
def test_each_rule_says_which_rank_breaks_it(
    backend: GroupBackend, endpoints: tuple[str, ...], rdma: RdmaMatrix, obstacle: str
) -> None:
    assert wiring_obstacle(backend, endpoints, rdma) == obstacle


def test_only_the_coordinator_listens_over_rdma() -> None:
    assert wiring_obstacle("jaccl", (TWO[0], ""), CABLE) == ""


def test_a_ring_of_four_needs_no_diagonals_and_a_mesh_does() -> None:
    assert rdma_obstacle("jaccl-ring", 4, loop(4)) == ""
    assert rdma_obstacle("jaccl", 4, loop(4)).startswith("no RDMA device is listed from rank 0 to rank 2")
