"""What members refuse during a placement, and the errors that follow from it."""

from __future__ import annotations

import msgspec

from exo_mesh.domain.model import ModelCard
from exo_mesh.domain.plan import Ballot, Seat
from exo_mesh.domain.stage import ReserveAnswer
from exo_mesh.errors import (
    CrashLoopError,
    EngineError,
    MeshError,
    ModelError,
    PlacementError,
    QuarantinedError,
    ReservationError,
)


class BallotBeatenError(ReservationError):
    """A member has promised another plan of this instance; `ballot` is the ballot of that plan."""

    def __init__(self, message: str, *, peer_id: str, ballot: Ballot) -> None:
        super().__init__(message, peer_id=peer_id)
        self.ballot = ballot


class StageFailedError(EngineError):
    """An engine failed while loading its stage; the peer counts such failures and refuses the stage after too many."""


class RefusedStages(msgspec.Struct):
    """What peers have refused during one placement. usable_bytes: the memory a peer can give, by peer id, if memory was
    the reason. unable: peers that can never run their stage. texts: the refusals in order, for people."""

    usable_bytes: dict[str, int] = msgspec.field(default_factory=dict)
    unable: dict[str, ReservationError] = msgspec.field(default_factory=dict)
    texts: list[str] = msgspec.field(default_factory=list)

    @property
    def is_hopeless(self) -> bool:
        """Whether the model has crashed or is quarantined on some peer."""
        return any(refusal.why for refusal in self.unable.values())

    @property
    def avoided(self) -> list[str]:
        """The peers that were left out because the model has crashed there, with the reasons."""
        return [f"{peer_id[:8]}: {refusal}" for peer_id, refusal in self.unable.items() if refusal.why]

    def note(self, seat: Seat, answer: ReserveAnswer | ReservationError) -> str:
        """Record a refusal and return its reason."""
        if isinstance(answer, ReservationError):
            self.unable[seat.peer_id], reason = answer, str(answer)
        else:
            self.usable_bytes[seat.peer_id], reason = answer.usable_bytes, answer.reason
        self.texts.append(f"{seat.peer_id[:8]} refused: {reason}")
        return reason

    def nobody_left(self, card: ModelCard) -> MeshError:
        """The error for a model that every able peer has refused."""
        by_code = {error.code: error for error in (CrashLoopError, QuarantinedError)}
        refusals = self.unable.values()
        error = next((by_code[refusal.why] for refusal in refusals if refusal.why in by_code), ModelError)
        return error(f"no peer can run {card.name} ({card.architecture}): {'; '.join(self.texts)}")

    def added_to(self, exc: PlacementError) -> PlacementError:
        """The error of the last attempt to solve, with the refusals before it."""
        return PlacementError(
            "; ".join([str(exc), *self.texts]),
            reason=exc.reason,
            need_bytes=exc.need_bytes,
            have=exc.have,
            remedy=exc.remedy,
        )
