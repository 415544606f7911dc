"""Tensor groups: several peers that are one stage, each with a slice of every tensor of its layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

GroupBackend = Literal["ring", "jaccl", "jaccl-ring"]
"""How the ranks reach each other: over TCP; over RDMA with a link between any two; over RDMA with links to both
neighbours. The names are those of `mx.distributed.init`, except that its "jaccl" reads the last two."""

RdmaMatrix = tuple[tuple[str | None, ...], ...]
"""`[i][j]`: the device by which rank i reaches rank j, None on the diagonal and where there is no link."""


@dataclass(frozen=True, slots=True)
class TensorGroup:
    """The ranks of one stage as its plan names them; rank 0, the leader, is the peer that the stage names.

    Each rank reserves the stage's reserve_bytes. rdma: empty with backend "ring".
    Raises ValueError unless there are at least two ranks, each peer once, and the matrix is square of their number.
    """

    backend: GroupBackend
    peers: tuple[str, ...]
    rdma: RdmaMatrix = ()

    def __post_init__(self) -> None:
        if self.backend not in get_args(GroupBackend):
            raise ValueError(f"unknown backend of a tensor group: {self.backend!r}")
        if len(self.peers) < 2 or len(set(self.peers)) != len(self.peers):
            raise ValueError(f"a tensor group is at least two different peers: {list(self.peers)}")
        if (self.backend == "ring") != (not self.rdma):
            raise ValueError("RDMA devices belong to the backends over RDMA, and to no other")
        if self.rdma and {len(self.rdma), *map(len, self.rdma)} != {self.size}:
            raise ValueError(f"the RDMA devices of {self.size} ranks are a matrix of {self.size} x {self.size}")

    @property
    def size(self) -> int:
        return len(self.peers)

    def describe(self) -> dict[str, Any]:
        """As plain JSON values, for people."""
        return {"backend": self.backend, "peers": list(self.peers), "rdma": [list(row) for row in self.rdma]}


@dataclass(frozen=True, slots=True)
class RankWiring:
    """What one rank's process must know to meet the others: who it is, and where everybody listens.

    endpoints: "host:port" by rank, an address with a port that is free there and belongs to the collectives alone,
    other at each attempt. Over RDMA only rank 0's is used, as the coordinator's.
    """

    backend: GroupBackend
    rank: int
    endpoints: tuple[str, ...]
    rdma: RdmaMatrix = ()

    def __post_init__(self) -> None:
        if not 0 <= self.rank < len(self.endpoints):
            raise ValueError(f"rank {self.rank} of {len(self.endpoints)}")

    @property
    def size(self) -> int:
        return len(self.endpoints)

    @property
    def is_leader(self) -> bool:
        return self.rank == 0
