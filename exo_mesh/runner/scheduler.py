"""What runs next on the ring: a waiting and a running queue, decode rows and prefill chunks. Pure decisions."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from exo_mesh.domain.frame import Row

PREFILL_CHUNK = 512
"""Tokens of a prefill frame: 4 MiB of activations for a 4,096-wide model in bf16, which 1 GbE carries in 36 ms."""


@dataclass(slots=True)
class Sequence:
    """A request on the ring. tokens: prompt, then output. computed: positions already sent round for computing.

    All but the last prompt token are prefilled; the last one is the first decode row, so all decode rows are alike.
    """

    id: int
    tokens: list[int]
    computed: int = 0
    decoding: bool = False
    """A decode row of this sequence is on its way round the ring."""

    @property
    def prefill_left(self) -> int:
        return max(0, len(self.tokens) - 1 - self.computed)


@dataclass(frozen=True, slots=True)
class Limits:
    """max_in_flight: frames on the ring at once. prefill_chunk: tokens of one prefill frame.
    max_rows: decode rows of one frame. max_running, max_waiting: requests. max_tokens: positions that all running
    sequences may have together; a single one may always run."""

    max_in_flight: int
    prefill_chunk: int = PREFILL_CHUNK
    max_rows: int = 32
    max_running: int = 32
    max_waiting: int = 32
    max_tokens: int = 2**31


ROOM_TOKENS = 64
"""What each running sequence must be able to grow by when one more is admitted: else it would be put back at once."""


class Work(NamedTuple):
    """Rows of one frame and their token ids: the decode rows of one batch, or one prefill chunk."""

    rows: tuple[Row, ...]
    token_ids: tuple[int, ...]


@dataclass(slots=True)
class Scheduler:
    """Owns which sequences wait and run. Nothing here blocks; the driver asks for work when a frame is free."""

    limits: Limits
    _waiting: deque[Sequence] = field(default_factory=deque)
    _running: dict[int, Sequence] = field(default_factory=dict)
    _prefilled_last: bool = False

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    def submit(self, sequence: Sequence) -> bool:
        """Queue a sequence; False if the waiting queue is full."""
        if len(self._waiting) >= self.limits.max_waiting:
            return False
        self._waiting.append(sequence)
        return True

    def remove(self, sequence_id: int) -> bool:
        """Forget a sequence. True if it was running, so that stages hold KV of it."""
        for sequence in self._waiting:
            if sequence.id == sequence_id:
                self._waiting.remove(sequence)
                return False
        return self._running.pop(sequence_id, None) is not None

    def make_room(self) -> Iterator[Sequence]:
        """Put the youngest back to the head of the queue until the others can each grow by a token; one always may.

        Yields each that was put back: the stages must forget it, and compute it again when it is admitted.
        """
        while len(self._running) > 1 and self._held() + len(self._running) > self.limits.max_tokens:
            _, sequence = self._running.popitem()
            sequence.computed = 0
            self._waiting.appendleft(sequence)
            yield sequence

    def admit(self) -> Iterator[Sequence]:
        """Move sequences from waiting to running as long as they fit; yields each, in order of arrival."""
        while self._waiting and len(self._running) < self.limits.max_running:
            room = ROOM_TOKENS * (len(self._running) + 1)
            if self._running and self._held() + len(self._waiting[0].tokens) + room > self.limits.max_tokens:
                return
            sequence = self._waiting.popleft()
            self._running[sequence.id] = sequence
            yield sequence

    def _held(self) -> int:
        return sum(len(sequence.tokens) for sequence in self._running.values())

    def next_work(self) -> Work | None:
        """The next frame's rows, or None if every running sequence waits for a frame on its way.

        Decode rows and prefill chunks take turns, so that a long prompt does not stop running streams.
        """
        decode = [seq for seq in self._running.values() if seq.prefill_left == 0 and not seq.decoding]
        prefill = next((seq for seq in self._running.values() if seq.prefill_left), None)
        if prefill is not None and (not decode or not self._prefilled_last):
            self._prefilled_last = True
            return self._prefill_chunk(prefill)
        self._prefilled_last = False
        return self._decode_batch(decode) if decode else None

    def token_drawn(self, sequence: Sequence, token_id: int) -> None:
        """A decode row came round and this token was drawn; the sequence can take its next step."""
        sequence.tokens.append(token_id)
        sequence.decoding = False

    def _prefill_chunk(self, sequence: Sequence) -> Work:
        start = sequence.computed
        n = min(self.limits.prefill_chunk, sequence.prefill_left)
        sequence.computed += n
        return Work((Row(sequence.id, start, n),), tuple(sequence.tokens[start : start + n]))

    def _decode_batch(self, ready: list[Sequence]) -> Work:
        # Spread the running sequences over the frames that may be in flight: one big batch would leave all but one
        # stage idle.
        share = math.ceil(len(self._running) / self.limits.max_in_flight)
        chosen = ready[: max(1, min(share, self.limits.max_rows))]
        for sequence in chosen:
            sequence.decoding = True
            sequence.computed = len(sequence.tokens)
        rows = tuple(Row(sequence.id, len(sequence.tokens) - 1, 1, num_logits=1) for sequence in chosen)
        return Work(rows, tuple(sequence.tokens[-1] for sequence in chosen))
