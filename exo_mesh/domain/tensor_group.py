"""Tensor groups: several peers that form one stage, each with a slice of every tensor of its layers."""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args

import msgspec
from msgspec.structs import replace

from exo_mesh.domain.fields import Flat
from exo_mesh.domain.model import ModelCard

GroupBackend = Literal["ring", "jaccl", "jaccl-ring"]
"""How the ranks reach each other: over TCP; over RDMA with a link between any two; over RDMA with links to both
neighbours. The names are those of `mx.distributed.init`, except that its "jaccl" covers both RDMA shapes."""

RdmaMatrix = tuple[tuple[str | None, ...], ...]
"""`[i][j]`: the device by which rank i reaches rank j, None on the diagonal and where there is no link."""


class TensorGroup(msgspec.Struct, frozen=True):
    """The ranks of one stage as its plan names them; rank 0, the leader, is the peer that the stage names.

    Each rank reserves the stage's reserve_bytes. rdma: empty with backend "ring".
    Raises ValueError unless there are at least two ranks, each peer once, and the matrix is square of their number.
    """

    backend: GroupBackend
    peers: tuple[str, ...]
    rdma: RdmaMatrix = ()

    def __post_init__(self) -> None:
        if self.backend not in get_args(GroupBackend):
            raise ValueError(f"unknown backend of a tensor group: {self.backend}")
        if len(self.peers) < 2 or len(set(self.peers)) != len(self.peers):
            listing = ", ".join(self.peers) or "none"
            raise ValueError(f"a tensor group needs at least two different peers, not {listing}")
        if (self.backend == "ring") != (not self.rdma):
            raise ValueError("a tensor group needs RDMA devices exactly if its backend uses RDMA")
        if self.rdma and {len(self.rdma), *map(len, self.rdma)} != {self.size}:
            raise ValueError(f"the RDMA devices of {self.size} ranks must be a matrix of {self.size} x {self.size}")

    @property
    def size(self) -> int:
        return len(self.peers)

    def describe(self) -> dict[str, Any]:
        """Returns the group as plain JSON values, for people."""
        return {"backend": self.backend, "peers": list(self.peers), "rdma": [list(row) for row in self.rdma]}


class RankWiring(msgspec.Struct, frozen=True):
    """What the process of one rank needs to connect to the others: its rank, and where every rank listens.

    endpoints: "host:port" by rank; the port is free there, used by the collectives alone, and different at each
    attempt. Over RDMA only rank 0's endpoint is used, as the coordinator's.
    """

    backend: GroupBackend
    rank: int
    endpoints: tuple[str, ...]
    rdma: RdmaMatrix = ()

    def __post_init__(self) -> None:
        if not 0 <= self.rank < len(self.endpoints):
            raise ValueError(f"rank {self.rank} is outside a group of {len(self.endpoints)}")

    @property
    def size(self) -> int:
        return len(self.endpoints)

    @property
    def is_leader(self) -> bool:
        return self.rank == 0


class GroupCheck(msgspec.Struct, frozen=True):
    """Measurements of the leader during the check of a group; the same on every rank.

    all_reduce_s: of a few bytes, the median; reduce_bytes_per_s: of a few MiB. chunk_s: of the slowest prefill chunk
    through all layers of the stage. alone_layer_s, alone_chunk_s: of one layer on the leader alone, for one token and
    for a whole chunk, medians; 0.0 if no layer could be run alone. worst: largest difference from one machine's result,
    relative to its length. kv_heads is of each rank's own KV: the most heads of keys that a layer has; 0 if unknown.
    """

    all_reduce_s: float
    reduce_bytes_per_s: float
    chunk_s: float
    alone_layer_s: float
    alone_chunk_s: float
    worst: float
    kv_heads: int = 0


class GroupFigures(msgspec.Struct, frozen=True):
    """The check of a group, and the longest time of a frame before the group counts as hung."""

    check: Annotated[GroupCheck, Flat()]
    deadline_s: float


WHOLE_KV = frozenset(
    {
        "deepseek_v2", "deepseek_v3", "deepseek_v32", "deepseek_v41", "glm4_moe_lite", "glm_moe_dsa", "kimi_k25",
        "kimi_k3", "kimi_linear", "longcat_flash", "longcat_flash_ngram", "minicpm3", "mistral4", "qwen3_5",
        "qwen3_5_moe", "youtu_llm",
    }
)  # fmt: skip
"""Architectures whose KV every rank may keep in full: one latent per token serves all attention heads, or KV heads are
repeated because there are fewer than ranks."""


def sharded(card: ModelCard, size: int) -> ModelCard:
    """The model as one of `size` ranks holds it: its share of every layer, and all of embedding and head.

    Small tensors that every rank keeps in full (norms, routers) are not counted: they are far smaller than the engine's
    overhead.
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
