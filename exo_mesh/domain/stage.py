"""A peer's answers about its stage of an instance, and what it reports while the stage runs."""

from __future__ import annotations

from typing import Annotated, TypeAlias

import msgspec

from exo_mesh.domain.fields import Flat, SentAs
from exo_mesh.domain.plan import NO_BALLOT, Ballot
from exo_mesh.domain.tensor import TensorSpec
from exo_mesh.domain.tensor_group import GroupFigures


class ReserveAnswer(msgspec.Struct, frozen=True):
    """The answer to a reservation. beaten_by: the higher ballot that caused the refusal, if one did; otherwise memory
    did, and `usable_bytes` is what the peer can give. collective: of a rank of a tensor group, the address where its
    collectives would listen."""

    granted: bool
    usable_bytes: int
    reason: str = ""
    beaten_by: Ballot | None = None
    collective: str = ""


class StageStatus(msgspec.Struct, frozen=True):
    """The state of a stage on its peer. held: the layers of a healthy runner, or None. usable_bytes: what a stage of
    the instance could get here, including what it has. linked: the hop from this stage to the next one is up.
    rolls_back: its KV can be truncated. promised: the highest ballot that the peer has promised."""

    held: range | None
    usable_bytes: int
    linked: bool = False
    rolls_back: bool = False
    promised: Ballot = NO_BALLOT


class StageFetching(msgspec.Struct, frozen=True):
    """The stage lacks files. done: bytes of its files that are present."""

    done: int
    total: int


class StageLoading(msgspec.Struct, frozen=True):
    """The runner loads. done: bytes or layers."""

    done: int
    total: int


class StageListening(msgspec.Struct, frozen=True):
    """The runner has loaded, and listens for frames at "host:port"."""

    endpoint: str
    pid: int


class LoadOutcome(msgspec.Struct, frozen=True):
    """The result of loading a stage. inputs, outputs: as the engine declares them. group: of a rank of a tensor
    group."""

    memory_bytes: int = 0
    load_s: float = 0.0
    inputs: tuple[TensorSpec, ...] = ()
    outputs: tuple[TensorSpec, ...] = ()
    group: GroupFigures | None = None


class StageReady(msgspec.Struct, frozen=True):
    """The stage works for its plan. resumed: running requests that continue in a driver from a lower ballot."""

    loaded: Annotated[LoadOutcome, Flat()] = LoadOutcome()
    resumed: int = 0


class StageHopLost(msgspec.Struct, frozen=True):
    """The stage cannot reach the next one, or the next one cannot read its messages. is_out_of_reach: the node of this
    stage cannot reach the node of the next one either."""

    message: str
    is_out_of_reach: bool = False


class StageFailed(msgspec.Struct, frozen=True):
    """The stage has ended. remedy: after a failed fetch, what a person can do. is_final: until then no retry helps."""

    code: str
    message: str
    remedy: str = ""
    is_final: Annotated[bool, SentAs("final")] = False


StageUpdate: TypeAlias = StageFetching | StageLoading | StageListening | StageReady | StageHopLost | StageFailed
"""One report about a stage to the peers that watch it."""
