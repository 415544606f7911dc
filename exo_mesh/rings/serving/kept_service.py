"""Finds kept answers at the peer whose id theirs begins with."""

from __future__ import annotations

import asyncio
import logging

from exo_mesh.base.printable import quoted
from exo_mesh.base.wakeups import next_wakeup
from exo_mesh.errors import InputError, MeshError, UnknownAnswerError
from exo_mesh.mesh.membership.port import raise_bugs
from exo_mesh.mesh.membership.service import Membership
from exo_mesh.rings.serving.calls import MAX_CHAIN_BYTES, delete_kept, read_kept
from exo_mesh.rings.serving.kept_answers import MAX_LINKS, OWNER_CHARS, KeptAnswer, KeptAnswers, owner_of

MAX_ID_CHARS = 128
"""Longest id of an answer."""

TIDY_EVERY_S = 60.0
"""An answer stays in memory at most this long after its time."""

_log = logging.getLogger(__name__)


class KeptService:
    """The kept answers of all peers. key_id: of the caller's API key; "" without one, None: may read all of them."""

    def __init__(self, membership: Membership, kept: KeptAnswers) -> None:
        self._membership = membership
        self._kept = kept

    @property
    def owner(self) -> str:
        """The name of this node in the ids of its answers."""
        return self._membership.own.id[:OWNER_CHARS]

    @property
    def is_on(self) -> bool:
        """Whether this node keeps answers."""
        return self._kept.is_on

    async def keep_tidy(self) -> None:
        """Until cancelled: drop answers whose time is over, also if nobody asks for them."""
        while True:
            await next_wakeup(TIDY_EVERY_S)
            self._kept.tidy()

    def keep(self, answer: KeptAnswer) -> None:
        """Keep an answer at this node."""
        self._kept.keep(answer)

    async def read(self, key_id: str | None, answer_id: str) -> KeptAnswer | None:
        """A kept answer, from the peer that keeps it; None if no peer does."""
        if (answer := self._kept.read(key_id, answer_id)) is not None:
            return answer
        found = await self._of_peers(key_id, answer_id, only_one=True)
        return found[0] if found else None

    async def chain(self, key_id: str | None, answer_id: str) -> list[KeptAnswer]:
        """A kept answer and all before it in its conversation, newest first. Raises UnknownAnswerError if one of them
        is not kept any more."""
        found: list[KeptAnswer] = []
        wanted = answer_id
        while wanted:
            part = self._kept.chain(key_id, wanted) or await self._of_peers(key_id, wanted)
            if not part:
                raise UnknownAnswerError(self.missing(wanted, answer_id), param="previous_response_id")
            found += part
            if len(found) > MAX_LINKS or sum(one.num_bytes for one in found) > MAX_CHAIN_BYTES:
                message = f"the conversation before {answer_id} is too long: {len(found)} answers are kept of it"
                raise InputError(message, param="previous_response_id")
            wanted = part[-1].previous_id
        return found

    async def delete(self, key_id: str | None, answer_id: str) -> bool:
        """Delete an answer at the peer that keeps it; False if no peer does."""
        if self._kept.delete(key_id, answer_id):
            return True
        calls, owners = self._membership.calls, self._owners(answer_id)
        asked = [delete_kept(calls, owner, key_id, answer_id) for owner in owners]
        answers = await asyncio.gather(*asked, return_exceptions=True)
        raise_bugs(answers)
        return any(answer is True for answer in answers)

    def missing(self, answer_id: str, asked_id: str = "") -> str:
        """Why no peer has an answer, in one sentence. asked_id: the id that the caller named, if that is another."""
        before = f", which {quoted(asked_id, MAX_ID_CHARS)} continues," if asked_id not in ("", answer_id) else ""
        owner, shown = owner_of(answer_id), quoted(answer_id, MAX_ID_CHARS)
        if owner and owner != self.owner and not self._owners(answer_id):
            known = quoted(owner, OWNER_CHARS)
            return f"the peer {known} that kept the reply {shown}{before} is not in the mesh; nobody else has it"
        return (
            f"no reply {shown}{before} is kept for you: it was never stored, was deleted, or was dropped after "
            "its time or for newer ones"
        )

    def _owners(self, answer_id: str) -> list[str]:
        """The ids of the peers that may keep an answer: the peer that its id names, or all if it names none."""
        if not (answer_id.isascii() and answer_id.isprintable() and len(answer_id) <= MAX_ID_CHARS):
            return []  # no answer has such an id
        owner = owner_of(answer_id)
        ids = [peer.id for peer in self._membership.peers]
        return [peer_id for peer_id in ids if peer_id.startswith(owner)] if owner != self.owner else []

    async def _of_peers(self, key_id: str | None, answer_id: str, *, only_one: bool = False) -> list[KeptAnswer]:
        """What the first peer that has some of a conversation sends, newest first; [] if no peer has any. Raises the
        error of the owner if it cannot be asked."""
        calls, owners = self._membership.calls, self._owners(answer_id)
        reads = [read_kept(calls, owner, key_id, answer_id, only_one=only_one) for owner in owners]
        tasks = [asyncio.create_task(read, name="kept answer") for read in reads]
        failures: list[MeshError] = []
        try:
            for next_answer in asyncio.as_completed(tasks):
                try:
                    if found := await next_answer:
                        return found
                except MeshError as exc:
                    _log.debug("a peer does not send a kept answer: %s", exc)
                    failures.append(exc)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        if failures and owner_of(answer_id):
            raise failures[0]
        return []
