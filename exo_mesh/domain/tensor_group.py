"""Tensor groups: several peers that are one stage, each with a slice of every tensor of its layers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from exo_mesh.domain.model import ModelCard

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


WHOLE_KV = frozenset(
    {
        "deepseek_v2", "deepseek_v3", "deepseek_v32", "deepseek_v41", "glm4_moe_lite", "glm_moe_dsa", "kimi_k25",
        "kimi_k3", "kimi_linear", "longcat_flash", "longcat_flash_ngram", "minicpm3", "mistral4", "qwen3_5",
        "qwen3_5_moe", "youtu_llm",
    }
)  # fmt: skip
"""Architectures of which every rank may keep all of the KV: one latent per token serves all attention heads, or KV
heads are repeated where there are fewer than ranks."""


def sharded(card: ModelCard, size: int) -> ModelCard:
    """The model as one of `size` ranks holds it: its share of every layer, and all of embedding and head.

    What small tensors of a layer every rank keeps (norms, routers) is far less than the engine's own overhead.
    """
    if size == 1:
        return card
    kv = 1 if card.architecture in WHOLE_KV else size
    return replace(
        card,
        layer_bytes=tuple(_part(held, size) for held in card.layer_bytes),
        kv_bytes_per_token=_part(card.kv_bytes_per_token, kv),
        kv_layer_bytes=tuple(_part(held, kv) for held in card.kv_layer_bytes),
        kv_fixed_bytes=tuple(_part(held, kv) for held in card.kv_fixed_bytes),
    )


def _part(num_bytes: int, size: int) -> int:
    return -(-num_bytes // size)
