"""One message on the ring: what to compute for which rows, and the activations.

These are msgspec structs and not dataclasses because they are made and encoded on every hop: in C, that is a fifth of
the time. `array_like` leaves the field names off the wire.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

from exo_mesh.domain.plan import Ballot
from exo_mesh.domain.tensor import Tensor

HIDDEN = "hidden"
"""Name of the main tensor of a frame, `[sum(n), hidden]`; a few architectures carry further named tensors."""


UNKNOWN_OP = "peer_version"
"""Code of the fault of a sequence for which there was an operation that a stage does not know."""

NO_COPY = "no_copy"
"""Code of the fault of a sequence that a stage could not copy."""


LONGEST_DRAFT = 32
"""Most tokens of a decode row: the last one that was drawn, and drafts or those that had to follow it."""


class Row(msgspec.Struct, frozen=True, array_like=True):
    """`n` tokens of `sequence` starting at position `pos0`; logits are wanted for the last `num_logits` of them.

    A stage brings the KV of the sequence to length pos0, appends n, and computes.
    """

    sequence: int
    pos0: int
    n: int
    num_logits: int = 0

    def __post_init__(self) -> None:
        if self.n < 1 or self.pos0 < 0 or not 0 <= self.num_logits <= self.n:
            raise ValueError(f"bad row {self.sequence}: pos0={self.pos0} n={self.n} num_logits={self.num_logits}")


class Insert(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A sequence begins: every stage makes room for its KV."""

    sequence: int
    max_tokens: int


class Copy(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A sequence begins with the KV of the first `upto` positions of `source`, which goes on as it was.

    A stage that cannot copy begins the sequence empty and appends a fault with the code NO_COPY: the driver then
    prefills the sequence.
    """

    sequence: int
    source: int
    upto: int
    max_tokens: int


class Remove(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A sequence has ended, however it ended: every stage frees its KV."""

    sequence: int


class Retain(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The ring goes on by a higher ballot: only these sequences are still meant, and every other one has ended."""

    sequences: tuple[int, ...]


class Shutdown(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The ring ends after this frame."""


class UnknownOp(msgspec.Struct, frozen=True):
    """An operation of a newer version, as it came, so that it can be passed on. The first field of an operation is its
    sequence; one that has none must not be sent to a stage that does not know it."""

    name: str
    sequence: int
    fields: tuple[Any, ...] = ()

    @property
    def as_sent(self) -> tuple[Any, ...]:
        """The array that is encoded."""
        return (self.name, self.sequence, *self.fields)


Op = Insert | Copy | Remove | Retain | Shutdown


class Fault(msgspec.Struct, frozen=True, array_like=True):
    """Stage `stage` cannot do the rows of `sequence`; the sequence is poisoned until its Remove, the others go on."""

    sequence: int
    stage: int
    code: str
    message: str


class StageReport(msgspec.Struct, frozen=True, array_like=True):
    """What a stage says of a frame that it passes on: seconds of computing it, and of waiting for its turn before.
    pressure: of memory on its machine; 0 there is room, 1 nobody new, 2 fewer than now. kv_tokens: positions that it
    can hold for all sequences together."""

    compute_s: float
    waited_s: float
    pressure: int = 0
    kv_tokens: int = 2**31


class MemoryStatus(NamedTuple):
    """What a rank of a tensor group says of its memory; see StageReport. The group has what its poorest rank has."""

    pressure: int = 0
    kv_tokens: int = 2**31

    def worse(self, other: MemoryStatus) -> MemoryStatus:
        """What both of them have."""
        return MemoryStatus(max(self.pressure, other.pressure), min(self.kv_tokens, other.kv_tokens))


class Frame(msgspec.Struct, frozen=True):
    """`step` is unique and rising within (instance, ballot); stages drop repeats by it.

    token_ids has one id per token of all rows, in row order: stage 0 embeds them, later stages may need them too.
    reports[i] is that of stage i, as far as the frame has come. upto: only stages before this one compute the rows, for
    the others hold their KV already, from a lower ballot; 0 means all.
    """

    ballot: Ballot
    step: int
    batch: int
    rows: tuple[Row, ...] = ()
    token_ids: tuple[int, ...] = ()
    ops: tuple[Op | UnknownOp, ...] = ()
    tensors: dict[str, Tensor] = {}
    faults: tuple[Fault, ...] = ()
    reports: tuple[StageReport, ...] = ()
    upto: int = 0

    def __post_init__(self) -> None:
        if sum([row.n for row in self.rows]) != len(self.token_ids):
            raise ValueError(f"rows hold {self.num_tokens} tokens, the frame has {len(self.token_ids)} ids")

    @property
    def num_tokens(self) -> int:
        return sum(row.n for row in self.rows)

    @property
    def is_prefill(self) -> bool:
        """Whether its rows are of prompts: no logits of them are wanted, or there are too many tokens for drafts."""
        return not any(row.num_logits and row.n <= LONGEST_DRAFT for row in self.rows)

    @property
    def poisoned(self) -> frozenset[int]:
        """Sequences that some stage before this one could not do."""
        return frozenset(fault.sequence for fault in self.faults)

    def changed(self, **fields: Any) -> Frame:
        """A copy with some fields replaced."""
        return msgspec.structs.replace(self, **fields)
