"""What runs next on the ring: a waiting and a running queue, decode rows and prefill chunks. Pure decisions."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator
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
    sequences may hold together, except that one alone may hold more."""

    max_in_flight: int
    prefill_chunk: int = PREFILL_CHUNK
    max_rows: int = 32
    max_running: int = 32
    max_waiting: int = 32
    max_tokens: int = 2**31


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
    _held: int = 0
    """Tokens of all running sequences together: what they hold of the KV pool, or soon will."""
    _prefilled_last: bool = False

    @property
    def waiting(self) -> Iterable[Sequence]:
        return self._waiting

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
        running = self._running.pop(sequence_id, None)
        if running is None:
            return False
        self._held -= len(running.tokens)
        return True

    def evict(self) -> Iterator[Sequence]:
        """Move the youngest sequences back to the head of the queue as long as all that run outgrow the KV pool.

        Yields each. How long an output gets is not known when a sequence is admitted. An evicted one is computed anew
        later: its tokens stay, and one that is on its way round is still drawn. One sequence always runs.
        """
        while self._held > self.limits.max_tokens and len(self._running) > 1:
            _, sequence = self._running.popitem()
            self._held -= len(sequence.tokens)
            sequence.computed = 0
            self._waiting.appendleft(sequence)
            yield sequence

    def admit(self) -> Iterator[Sequence]:
        """Move sequences from waiting to running as long as they fit; yields each, in order of arrival."""
        while self._waiting and len(self._running) < self.limits.max_running:
            if self._running and self._held + len(self._waiting[0].tokens) > self.limits.max_tokens:
                return
            sequence = self._waiting.popleft()
            self._running[sequence.id] = sequence
            self._held += len(sequence.tokens)
            yield sequence

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
        if sequence.id in self._running:
            self._held += 1

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
