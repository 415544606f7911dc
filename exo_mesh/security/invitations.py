"""Manages invitations into a closed mesh: one at a time, valid for ten minutes, one joiner and five wrong codes.

An invitation exists only in the memory of the node that created it. No other node knows it, and a restart ends it.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable
from enum import StrEnum

import msgspec

from exo_mesh.base.clock import Clock, monotonic
from exo_mesh.errors import InputError, NoInvitationError, OverloadError, WrongCodeError
from exo_mesh.security.joining import PROOF_BYTES, Gift, Side, Transcript, new_password, proves, seal

VALID_S = 600.0
MAX_WRONG = 5
MAX_EXCHANGES = 16
EXCHANGE_S = 10.0
"""Most unfinished exchanges at a time, and how long each may take: strangers cost at most 1.6 exchanges of 12 ms a
second."""

_log = logging.getLogger(__name__)


class InvitationState(StrEnum):
    """State of an invitation. Joining is possible only in OPEN; the other states are final."""

    OPEN = "open"
    JOINED = "joined"
    EXPIRED = "expired"
    WRONG_CODES = "wrong_codes"
    WITHDRAWN = "withdrawn"


class _HalfWay(msgspec.Struct, frozen=True):
    side: Side
    key: bytes
    transcript: Transcript
    ends_at: float


class Invitation:
    """One invitation. Not thread-safe, except that a `Side` may be created and finished in any thread."""

    def __init__(self, gift: Gift, clock: Clock = monotonic) -> None:
        self._gift = gift
        self._clock = clock
        self._ends_at = clock() + VALID_S
        self._state = InvitationState.OPEN
        self._half_way: dict[str, _HalfWay] = {}
        self._beginning = 0
        self.password = new_password()
        self.num_wrong = 0
        self.joined = ""
        """The name that the joiner gave."""

    @property
    def state(self) -> InvitationState:
        if self._state is InvitationState.OPEN and self._clock() >= self._ends_at:
            self._end(InvitationState.EXPIRED)
        return self._state

    @property
    def left_s(self) -> float:
        """Seconds for which the invitation is still open."""
        return max(0.0, self._ends_at - self._clock()) if self.state is InvitationState.OPEN else 0.0

    @property
    def tries_left(self) -> int:
        return MAX_WRONG - self.num_wrong

    def withdraw(self) -> None:
        """End the invitation, unless it has already ended."""
        if self.state is InvitationState.OPEN:
            self._end(InvitationState.WITHDRAWN)

    def reserve(self) -> None:
        """Reserve room for one exchange; `begin` or `give_up` must follow. Raises OverloadError or
        NoInvitationError."""
        self._check_open()
        now = self._clock()
        self._half_way = {name: one for name, one in self._half_way.items() if one.ends_at > now}
        if len(self._half_way) + self._beginning >= MAX_EXCHANGES:
            raise OverloadError("too many machines are joining at once; try again in 10 s", retry_after_s=EXCHANGE_S)
        self._beginning += 1

    def give_up(self) -> None:
        """Cancel a reserved exchange that does not begin."""
        self._beginning -= 1

    def begin(self, side: Side, key: bytes, joiner_hello: bytes, name: str) -> Transcript:
        """Record a started exchange. The joiner gets the transcript's inviter hello and exchange number."""
        self._beginning -= 1
        self._check_open()
        transcript = Transcript(joiner_hello, side.hello, secrets.token_hex(16), name)
        self._half_way[transcript.exchange] = _HalfWay(side, key, transcript, self._clock() + EXCHANGE_S)
        return transcript

    def prove(self, exchange: str, given: bytes, address: str) -> bytes:
        """The sealed gift, for the first joiner that proves the code. Each exchange allows one proof.

        Raises WrongCodeError, or NoInvitationError if the exchange or the invitation has ended. address: for the log.
        """
        self._check_open()
        found = self._half_way.pop(exchange, None)
        if found is None or found.ends_at <= self._clock():
            raise NoInvitationError("this exchange has expired; start again with the same code")
        if len(given) != PROOF_BYTES or not proves(given, found.key, found.transcript):
            self._count_wrong(address)
            raise WrongCodeError(f"the code is wrong; {_tries(self.tries_left)}")
        self.joined = found.transcript.joiner_name
        self._end(InvitationState.JOINED)
        _log.info("%s at %s used the invitation and received the secret of the mesh", self.joined, address)
        return seal(self._gift, found.key, found.transcript)

    def _count_wrong(self, address: str) -> None:
        self.num_wrong += 1
        _log.warning("wrong invitation code from %s; %s", address, _tries(self.tries_left))
        if not self.tries_left:
            self._end(InvitationState.WRONG_CODES)

    def _check_open(self) -> None:
        if self.state is not InvitationState.OPEN:
            raise NoInvitationError(NO_INVITATION)

    def _end(self, state: InvitationState) -> None:
        self._state = state
        self._half_way.clear()
        if state is not InvitationState.JOINED:
            _log.info("the invitation has ended: %s", state.replace("_", " "))


NO_INVITATION = (
    "no invitation is open at this node: it was used, is older than 10 minutes, had five wrong codes or was created by "
    "another node; `exo-mesh invite` makes a new one"
)


def _tries(left: int) -> str:
    return f"{left} tries are left" if left > 1 else "1 try is left" if left else "the invitation has ended"


class Invitations:
    """The invitation of a node; a new one ends the previous one. gift: None in an open mesh, which has no
    invitations."""

    def __init__(
        self,
        gift: Gift | None = None,
        addresses: Callable[[], tuple[str, ...]] = lambda: (),
        clock: Clock = monotonic,
    ) -> None:
        self._gift = gift
        self._clock = clock
        self.addresses = addresses
        """Returns the addresses at which a joiner may reach the API of this node now, best first."""
        self.last: Invitation | None = None

    def open(self) -> Invitation:
        """Create an invitation. Raises InputError in an open mesh."""
        if self._gift is None:
            raise InputError(
                "this mesh is open: it has no secret, and anybody can join. To close it, create a secret with "
                "`exo-mesh secret new --out mesh.secret`, restart this node with --secret-file mesh.secret, and invite "
                "the others"
            )
        if self.last is not None:
            self.last.withdraw()
        self.last = Invitation(self._gift, self._clock)
        _log.info("created an invitation into this mesh, valid for %.0f minutes", VALID_S / 60)
        return self.last

    def current(self) -> Invitation:
        """The open invitation. Raises NoInvitationError."""
        if self.last is None or self.last.state is not InvitationState.OPEN:
            raise NoInvitationError(NO_INVITATION)
        return self.last
