"""Plans: which peer holds which layers of a model instance, and which plan is in force.

Also what a peer answers about its stage of a plan.
"""

from __future__ import annotations

import hashlib
import json
from typing import Annotated, NamedTuple

import msgspec

from exo_mesh.domain.fields import Flat, Printable
from exo_mesh.domain.shard import KeptLayers, Shard
from exo_mesh.domain.tensor_group import TensorGroup
from exo_mesh.domain.whole.served import SERVED_DIGEST


class Ballot(msgspec.Struct, frozen=True, order=True):
    """The totally ordered name of an instance's plan: the highest committed ballot is in force. A msgspec struct,
    because each stage compares it for each frame."""

    counter: int
    proposer: Annotated[str, Printable()]

    def next_for(self, proposer: str) -> Ballot:
        """Returns the lowest ballot of `proposer` that is higher than this one."""
        return Ballot(self.counter + 1, proposer)

    def __str__(self) -> str:
        return f"{self.counter}.{self.proposer[:8]}"


NO_BALLOT = Ballot(0, "")
"""Lower than every real ballot: the promise of a peer that has promised nothing."""


class StagePlan(msgspec.Struct, frozen=True):
    """One position in the ring: which peer runs which shard with which engine, and the memory that it must reserve.

    group: the ranks, if several peers form this stage; `peer_id` is then the leader, and every rank reserves
    `reserve_bytes`. Raises ValueError if another peer is the leader.
    """

    peer_id: str
    engine: str
    shard: Shard
    reserve_bytes: int
    group: TensorGroup | None = None

    def __post_init__(self) -> None:
        if self.group is not None and self.group.peers[0] != self.peer_id:
            raise ValueError(f"rank 0 of a tensor group leads it: {self.group.peers[0]}, not {self.peer_id}")

    @property
    def peers(self) -> tuple[str, ...]:
        """All peers of this stage, the leader first."""
        return (self.peer_id,) if self.group is None else self.group.peers


class Seat(NamedTuple):
    """One peer's part in a plan: a stage, or one rank of it. Rank 0 leads; alone, it is the whole stage."""

    stage: int
    rank: int
    peer_id: str

    def __str__(self) -> str:
        """Names the seat for people: `stage 1, rank 2 at peer 0a1b2c3d`."""
        rank = f", rank {self.rank}" if self.rank else ""
        return f"stage {self.stage}{rank} at peer {self.peer_id[:8]}"


class PlanInputs(msgspec.Struct, frozen=True):
    """The inputs of a plan, from which any peer can solve it again: peers in ring order with usable bytes, and what
    some of them have on their disks of the model."""

    candidates: tuple[tuple[str, int], ...]
    policy: str
    min_peers: int
    on_disk: tuple[tuple[str, tuple[KeptLayers, ...]], ...] = ()


class Plan(msgspec.Struct, frozen=True):
    """An immutable assignment of all layers of a model to stages in ring order.

    context_limit: most positions of one sequence. pool_tokens: KV positions that every stage has reserved memory for,
    shared by the sequences that run at once. pool_sequences: most sequences at once, 0 if only positions count.
    activation_dtype: of the activations that stages of different engines exchange, "" in a ring of one engine. Raises
    ValueError unless each layer `0..num_layers` is held by exactly one stage, in order.
    """

    instance_id: str
    ballot: Ballot
    model: str
    model_digest: str
    stages: tuple[StagePlan, ...]
    context_limit: int
    inputs: Annotated[PlanInputs, Flat()]
    pool_tokens: int = 0
    activation_dtype: str = ""
    pool_sequences: int = 0

    def __post_init__(self) -> None:
        if not self.stages:
            raise ValueError("a plan needs at least one stage")
        expected = 0
        for stage in self.stages:
            if stage.shard.start != expected:
                raise ValueError(f"layer {expected} is not where stage {stage.shard} starts")
            expected = stage.shard.stop
        if not self.stages[-1].shard.is_last:
            raise ValueError(f"layers from {expected} on are held by no stage")

    @property
    def peer_ids(self) -> tuple[str, ...]:
        """The peers in ring order; a tensor group counts as its leader."""
        return tuple(stage.peer_id for stage in self.stages)

    @property
    def seats(self) -> tuple[Seat, ...]:
        """The part of every peer, stage by stage and rank by rank."""
        return tuple(
            Seat(index, rank, peer_id)
            for index, stage in enumerate(self.stages)
            for rank, peer_id in enumerate(stage.peers)
        )

    @property
    def member_ids(self) -> tuple[str, ...]:
        """All peers that take part, stage by stage; the ranks of a tensor group by rank."""
        return tuple(peer_id for stage in self.stages for peer_id in stage.peers)

    @property
    def engines(self) -> tuple[str, ...]:
        """Each engine of the ring once, in ring order."""
        return tuple(dict.fromkeys(stage.engine for stage in self.stages))

    @property
    def takes_text(self) -> bool:
        """Whether the instance is a model server, which takes and gives text instead of token ids."""
        return self.model_digest.startswith(SERVED_DIGEST)

    @property
    def kv_tokens(self) -> int:
        """Positions that all running sequences may hold together: the pool, but at least one sequence's context."""
        return max(self.pool_tokens, self.context_limit)

    @property
    def digest(self) -> str:
        """SHA-256 over the canonical JSON of the fields; equal plans have equal digests on every machine. What the
        disks hold does not count: older versions do not know it, and ranks of a tensor group meet by this digest."""
        fields = msgspec.to_builtins(self)
        del fields["inputs"]["on_disk"]
        canonical = json.dumps(fields, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()
