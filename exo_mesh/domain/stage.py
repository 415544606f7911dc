"""A peer's answers about its stage of an instance."""

from __future__ import annotations

from dataclasses import dataclass

from exo_mesh.domain.plan import NO_BALLOT, Ballot


@dataclass(frozen=True, slots=True)
class ReserveAnswer:
    """The answer to a reservation. beaten_by: the higher ballot that caused the refusal, if one did; otherwise memory
    did, and `usable_bytes` is what the peer can give. collective: of a rank of a tensor group, the address where its
    collectives would listen."""

    granted: bool
    usable_bytes: int
    reason: str = ""
    beaten_by: Ballot | None = None
    collective: str = ""


@dataclass(frozen=True, slots=True)
class StageStatus:
    """The state of a stage on its peer. held: the layers of a healthy runner, or None. usable_bytes: what a stage of
    the instance could get here, including what it has. linked: the hop from this stage to the next one is up.
    rolls_back: its KV can be truncated. promised: the highest ballot that the peer has promised."""

    held: range | None
    usable_bytes: int
    linked: bool = False
    rolls_back: bool = False
    promised: Ballot = NO_BALLOT
