"""Keeps finished answers for later requests that refer to them, in the memory of the peer where they entered."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

import msgspec

from exo_mesh.base.clock import Clock

MAX_ANSWERS = 4096
MAX_BYTES = 64 << 20
"""Of all kept answers with their input: about 16 million tokens of text."""

MAX_LINKS = 4096
"""Most answers of one conversation."""

OWNER_CHARS = 8
"""Characters of a node's id that the ids of its answers begin with."""

HASH_CHARS = 24
"""Characters of the random part of an id, which no owner has."""


class KeptAnswer(msgspec.Struct, frozen=True):
    """A finished answer. id: as its client knows it; whoever knows it has got it from that client. key_id: of the API
    key that it came with; "" without one. previous_id: of the answer that its request continued; "" for none.
    data: input and reply, in a form that only the API knows."""

    id: str
    key_id: str
    previous_id: str
    data: bytes

    @property
    def num_bytes(self) -> int:
        """Memory that the answer takes, about."""
        return len(self.data) + 512

    def may_be_read_by(self, key_id: str | None) -> bool:
        """Whether the holder of an API key may read the answer; "" means no key, None may read all."""
        return key_id is None or key_id == self.key_id


def owner_of(answer_id: str) -> str:
    """The beginning of the id of the node that keeps an answer; "" if the id names none, so that any peer may."""
    owner = answer_id.partition("_")[2].partition("_")[0]
    return "" if len(owner) >= HASH_CHARS else owner


class KeptAnswers:
    """The answers that this node keeps: at most MAX_ANSWERS and MAX_BYTES, each for keep_s after its last use.
    on_change: gets the number of answers and of their bytes."""

    def __init__(
        self,
        keep_s: float,
        clock: Clock,
        *,
        max_answers: int = MAX_ANSWERS,
        max_bytes: int = MAX_BYTES,
        on_change: Callable[[int, int], None] = lambda count, num_bytes: None,
    ) -> None:
        self._keep_s = keep_s
        self._clock = clock
        self._max_answers = max_answers
        self._max_bytes = max_bytes
        self._on_change = on_change
        self._kept: OrderedDict[str, tuple[float, KeptAnswer]] = OrderedDict()
        """(time of its last use, answer) by id, the longest unused first."""
        self.num_bytes = 0

    def __len__(self) -> int:
        self._drop_old()
        return len(self._kept)

    @property
    def is_on(self) -> bool:
        return self._keep_s > 0

    def tidy(self) -> None:
        """Drop the answers whose time is over."""
        self._drop_old()

    def keep(self, answer: KeptAnswer) -> None:
        """Keep an answer, and drop the longest unused ones if there is no room for all. An answer that alone is too
        large is not kept."""
        self._drop(answer.id)
        if not self.is_on or answer.num_bytes > self._max_bytes:
            return
        self._kept[answer.id] = (self._clock(), answer)
        self.num_bytes += answer.num_bytes
        self._drop_old()
        while len(self._kept) > self._max_answers or self.num_bytes > self._max_bytes:
            self._drop(next(iter(self._kept)))
        self._on_change(len(self._kept), self.num_bytes)

    def read(self, key_id: str | None, answer_id: str) -> KeptAnswer | None:
        """A kept answer; this is a use of it."""
        self._drop_old()
        _, answer = self._kept.get(answer_id, (0.0, None))
        if answer is None or not answer.may_be_read_by(key_id):
            return None
        self._kept[answer_id] = (self._clock(), answer)
        self._kept.move_to_end(answer_id)
        return answer

    def chain(self, key_id: str | None, answer_id: str) -> Sequence[KeptAnswer]:
        """The answer and those before it as far as they are kept here, newest first. Its oldest answers are used last,
        and so dropped last: without them the conversation cannot be continued."""
        found: list[KeptAnswer] = []
        while answer_id and len(found) < MAX_LINKS and (answer := self.read(key_id, answer_id)) is not None:
            found.append(answer)
            answer_id = answer.previous_id
        return found

    def delete(self, key_id: str | None, answer_id: str) -> bool:
        """Whether there was such an answer."""
        if self.read(key_id, answer_id) is None:
            return False
        self._drop(answer_id)
        return True

    def _drop_old(self) -> None:
        deadline = self._clock() - self._keep_s
        while self._kept and next(iter(self._kept.values()))[0] <= deadline:
            self._drop(next(iter(self._kept)))

    def _drop(self, answer_id: str) -> None:
        if answer_id in self._kept:
            self.num_bytes -= self._kept.pop(answer_id)[1].num_bytes
            self._on_change(len(self._kept), self.num_bytes)
