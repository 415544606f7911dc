"""What a peer answers about the stage of an instance."""

from __future__ import annotations

from dataclasses import dataclass

from exo_mesh.domain.plan import NO_BALLOT, Ballot


@dataclass(frozen=True, slots=True)
class ReserveAnswer:
    """To a reservation. `beaten_by`: the ballot that stands in its way, where that was the reason to refuse; otherwise
    memory was, and `usable_bytes` is what there is.  collective:
    of a rank of a tensor group, where its collectives would listen."""

    granted: bool
    usable_bytes: int
    reason: str = ""
    beaten_by: Ballot | None = None
    collective: str = ""


@dataclass(frozen=True, slots=True)
class StageStatus:
    """held: the layers of a runner that is well, or None. usable_bytes: what a stage of the instance could get here,
    with what it has. linked: the hop from this stage to the next one is up. rolls_back: its KV can be cut back.
    promised: the highest ballot that the peer has promised itself to."""

    held: range | None
    usable_bytes: int
    linked: bool = False
    rolls_back: bool = False
    promised: Ballot = NO_BALLOT
