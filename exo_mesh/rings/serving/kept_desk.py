"""Finds kept answers at the peer whose id theirs begins with, and answers other peers for this node's own."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence

from exo_mesh.base.printable import quoted
from exo_mesh.base.wakeups import next_beat
from exo_mesh.errors import DeadlineError, InputError, MeshError, TransportError, UnknownAnswerError
from exo_mesh.mesh.membership.peers import Peer
from exo_mesh.rings.serving.kept_answers import MAX_LINKS, OWNER_CHARS, KeptAnswer, KeptAnswers, owner_of
from exo_mesh.wire.proto import control_pb2 as pb

MAX_ID_CHARS = 128
"""Longest id of an answer."""

PART_BYTES = 512 << 10
"""Most bytes of an answer in one message between peers."""

MAX_CHAIN_BYTES = 32 << 20
"""Most bytes of one conversation: twice the longest body of a request."""

TIDY_EVERY_S = 60.0
"""An answer stays in memory at most this long after its time."""

_log = logging.getLogger(__name__)


class KeptDesk:
    """Implements KeptService, and answers other peers."""

    def __init__(self, own_id: str, peers: Callable[[], Sequence[Peer]], kept: KeptAnswers) -> None:
        self._own_id = own_id
        self._peers = peers
        self._kept = kept

    # calls by users of this node

    @property
    def owner(self) -> str:
        return self._own_id[:OWNER_CHARS]

    @property
    def is_on(self) -> bool:
        return self._kept.is_on

    async def keep_tidy(self) -> None:
        """Until cancelled: drop answers whose time is over, also if nobody asks for them."""
        while True:
            await next_beat(TIDY_EVERY_S)
            self._kept.tidy()

    def keep(self, answer: KeptAnswer) -> None:
        self._kept.keep(answer)

    async def read(self, key_id: str | None, answer_id: str) -> KeptAnswer | None:
        if (answer := self._kept.read(key_id, answer_id)) is not None:
            return answer
        found = await self._of_peers(key_id, answer_id, only_one=True)
        return found[0] if found else None

    async def chain(self, key_id: str | None, answer_id: str) -> list[KeptAnswer]:
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
        if self._kept.delete(key_id, answer_id):
            return True
        request = pb.DeleteKeptRequest(key_id=key_id, id=answer_id)
        asked = [peer.client.delete_kept(request) for peer in self._owners(answer_id)]
        answers = await asyncio.gather(*asked, return_exceptions=True)
        for answer in answers:
            if isinstance(answer, BaseException) and not isinstance(answer, MeshError):
                raise answer
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

    def _owners(self, answer_id: str) -> list[Peer]:
        """The peers that may keep an answer: the peer that its id names, or all if it names none."""
        if not (answer_id.isascii() and answer_id.isprintable() and len(answer_id) <= MAX_ID_CHARS):
            return []  # no answer has such an id
        owner = owner_of(answer_id)
        return [peer for peer in self._peers() if peer.id.startswith(owner)] if owner != self.owner else []

    async def _of_peers(self, key_id: str | None, answer_id: str, *, only_one: bool = False) -> list[KeptAnswer]:
        """What the first peer that has some of a conversation sends, newest first; [] if no peer has any. Raises the
        error of the owner if it cannot be asked."""
        request = pb.ReadKeptRequest(key_id=key_id, id=answer_id, only_one=only_one)
        tasks = [asyncio.create_task(_read(peer, request), name="kept answer") for peer in self._owners(answer_id)]
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

    # answers to other peers

    async def answer_read(self, request: pb.ReadKeptRequest) -> AsyncIterator[pb.KeptPart]:
        key_id = request.key_id if request.HasField("key_id") else None
        first = self._kept.read(key_id, request.id)
        only = [] if first is None else [first]
        for answer in only if request.only_one else self._kept.chain(key_id, request.id):
            for start in range(0, max(1, len(answer.data)), PART_BYTES):
                part = answer.data[start : start + PART_BYTES]
                is_last = start + PART_BYTES >= len(answer.data)
                yield pb.KeptPart(
                    id=answer.id, key_id=answer.key_id, previous_id=answer.previous_id, data=part, is_last=is_last
                )

    def answer_delete(self, request: pb.DeleteKeptRequest) -> pb.DeleteKeptReply:
        key_id = request.key_id if request.HasField("key_id") else None
        return pb.DeleteKeptReply(found=self._kept.delete(key_id, request.id))


async def _read(peer: Peer, request: pb.ReadKeptRequest) -> list[KeptAnswer]:
    """The answers that a peer sends. Raises TransportError if it sends more than a conversation may have."""
    found: list[KeptAnswer] = []
    data: list[bytes] = []
    num_bytes = 0
    async for part in peer.client.read_kept(request):
        data.append(part.data)
        num_bytes += len(part.data)
        if num_bytes > MAX_CHAIN_BYTES or len(found) > MAX_LINKS:
            raise TransportError(f"the peer {peer.info.name} sent more than a conversation may have")
        if part.is_last:
            found.append(KeptAnswer(part.id, part.key_id, part.previous_id, b"".join(data)))
            data = []
    if data:
        raise DeadlineError(f"the peer {peer.info.name} sent only a part of a kept answer")
    return found
