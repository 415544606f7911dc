"""Sessions in a closed mesh: a credential of a page or command that every member accepts, for some hours.

Who has the local token of one node would lose all rights with that node. A page or command exchanges the token for a
session: an id and an end, signed with a key that each member derives from the mesh's secret. No member stores it. A
session ends early like a key is revoked: its id gets an entry in the key table, which the members share.
"""

from __future__ import annotations

import base64
import hmac
import re
import secrets
import time
from collections.abc import Callable

import msgspec

from exo_mesh.security.api_keys import KeyFile

PREFIX = "exo-session-"
VALID_S = 12 * 3600
"""A working day. The page renews its session while the node of its token runs."""
SKEW_S = 3600
"""The clock of the member that made a session may be ahead by this much; if it is ahead by more, others refuse the
session until the rest has passed. The session ends later by as much as that clock is ahead."""
MAX_KNOWN = 256

_TEXT = re.compile(PREFIX + r"([0-9a-f]{8})-([0-9a-f]{1,10})-([A-Za-z0-9_-]{43})")
_SHOWN = re.compile(r"s-([0-9a-f]{8})")


class Session(msgspec.Struct, frozen=True):
    """A valid session. id: as callers and lists show it, with s- before eight digits; no key has such an id.
    ends_at: in seconds of the Unix epoch."""

    id: str
    ends_at: int


class PageSessions:
    """Makes and checks sessions. key: derived from the secret of the mesh. keys: knows which ids were revoked."""

    def __init__(self, key: bytes, keys: KeyFile, now: Callable[[], float] = time.time) -> None:
        self._key = key
        self._keys = keys
        self._now = now
        self._known: dict[str, Session] = {}

    def make(self, renewed_id: str = "") -> tuple[str, Session]:
        """A session and its text, which is only for the caller that asked. renewed_id: of the session that it
        continues, so that the caller's requests stay its own; a revoked one, and a key, is not continued."""
        number, ends_at = number_of(renewed_id), int(self._now()) + VALID_S
        while not number or number in self._keys.table:  # also the id of a key, which may not be revoked with it
            number = secrets.token_hex(4)
        session = Session(f"s-{number}", ends_at)
        self._note(session)
        return f"{PREFIX}{number}-{ends_at:x}-{self._signature(number, f'{ends_at:x}')}", session

    def check(self, text: str) -> Session | None:
        """The session that a caller presents; None if it is not valid. Takes constant time for texts of its form."""
        match = _TEXT.fullmatch(text)
        if match is None:
            return None
        number, end, signature = match.groups()
        is_ours = hmac.compare_digest(signature, self._signature(number, end))
        left_s = int(end, 16) - self._now()
        if not is_ours or not 0 < left_s <= VALID_S + SKEW_S or self._keys.refuses(number):
            return None
        session = Session(f"s-{number}", int(end, 16))
        self._note(session)
        return session

    def known(self) -> list[Session]:
        """The valid sessions that this node has made or seen, the earliest end first."""
        now = self._now()
        found = [one for one in self._known.values() if one.ends_at > now and not self._keys.refuses(number_of(one.id))]
        return sorted(found, key=lambda one: (one.ends_at, one.id))

    def _note(self, session: Session) -> None:
        """Keeps a session for `known`, at most MAX_KNOWN: sessions that end first are forgotten first."""
        self._known[session.id] = max(session, self._known.get(session.id, session), key=lambda one: one.ends_at)
        if len(self._known) > MAX_KNOWN:
            del self._known[min(self._known.values(), key=lambda one: one.ends_at).id]

    def _signature(self, number: str, end: str) -> str:
        signed = hmac.digest(self._key, f"{number} {end}".encode(), "sha256")
        return base64.urlsafe_b64encode(signed).rstrip(b"=").decode()


def number_of(session_id: str) -> str:
    """The eight digits of the id of a session, as the key table has it; "" for any other id."""
    match = _SHOWN.fullmatch(session_id)
    return match[1] if match else ""
