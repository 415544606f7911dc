"""One message on the ring: the rows to compute, and their activations.

These are msgspec structs, not dataclasses, because they are built and encoded on every hop: in C, that takes a fifth of
the time. `array_like` leaves the field names off the wire.
"""

from __future__ import annotations

from typing import Annotated, Any, NamedTuple

import msgspec

from exo_mesh.domain.images import PictureSpec
from exo_mesh.domain.plan import Ballot
from exo_mesh.domain.tensor import Tensor

HIDDEN = "hidden"
"""Name of the main tensor of a frame, `[sum(n), hidden]`; a few architectures carry further named tensors."""

PIXELS = "pixels"
"""Name of the tensor of a frame with one ShowImage and no rows: uint8 `[height, width, 3]`. Only the first stage gets
it."""

UNKNOWN_OP = "peer_version"
"""Fault code of a sequence that a stage poisoned because it does not know an operation on it."""

NO_COPY = "no_copy"
"""Fault code of a sequence whose KV a stage could not copy."""


LONGEST_DRAFT = 32
"""Most tokens of a decode row: the last drawn token, and drafts or forced tokens."""


class Row(msgspec.Struct, frozen=True, array_like=True):
    """`n` tokens of `sequence` starting at position `pos0`; logits are wanted for the last `num_logits` of them, final
    hidden states for the last `num_hidden` of them. A row never wants both.

    A stage brings the KV of the sequence to length pos0, appends n, and computes. second: in a row with a pair of
    texts, the index of the first token of the second text; 0 in any other row. drafted: its first token is a draft, so
    a later row may begin at pos0, or before.
    """

    sequence: int
    pos0: int
    n: int
    num_logits: int = 0
    num_hidden: int = 0
    second: int = 0
    drafted: bool = False

    def __post_init__(self) -> None:
        wanted = self.num_logits or self.num_hidden
        if self.n < 1 or self.pos0 < 0 or self.num_logits < 0 or not 0 <= wanted <= self.n:
            raise ValueError(f"bad row {self.sequence}: pos0={self.pos0} n={self.n} num_logits={self.num_logits}")
        if (self.num_logits and self.num_hidden) or not 0 <= self.second < self.n:
            raise ValueError(f"bad row {self.sequence}: num_hidden={self.num_hidden} second={self.second} n={self.n}")

    @property
    def may_be_refused(self) -> bool:
        """Whether a later row may begin at this row's pos0: it has drafts."""
        return self.drafted or (self.num_logits > 1 and self.n <= LONGEST_DRAFT)


class Insert(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A sequence begins: every stage makes room for its KV."""

    sequence: int
    max_tokens: int


class Copy(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A sequence begins with the KV of the first `upto` positions of `source`; the sequence `source` goes on unchanged.

    A stage that cannot copy begins the sequence empty and appends a fault with the code NO_COPY: the driver then
    prefills the sequence. Stages before first_stage do not hold the source: they begin the sequence empty. disk: key of
    the file on each stage's disk that holds the source, whose number is 0 then; empty for a sequence in memory.
    """

    sequence: int
    source: int
    upto: int
    max_tokens: int
    first_stage: int = 0
    disk: bytes = b""


class Remove(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A sequence has ended, for whatever reason: every stage frees its KV."""

    sequence: int


class Keep(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A sequence has ended, but every stage keeps its KV until its Remove: new sequences can begin as copies of it."""

    sequence: int


class StoreKv(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Every stage writes the KV of a kept sequence to its disk, if it can, and goes on at once. key: of the first
    `length` positions; blocks: the chained hashes of their blocks; replaces: files that the new one makes useless.
    prompt: positions of its prompt that the same prompt can copy, all but the last; prompt_key: the key of these."""

    sequence: int
    key: bytes
    length: int
    blocks: bytes
    replaces: tuple[bytes, ...] = ()
    prompt: int = 0
    prompt_key: bytes = b""


class ReadAhead(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Every stage begins to read a file from its disk: a Copy of it follows, for this sequence."""

    sequence: int
    key: bytes


class ListDisk(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Every stage reports which files it has on disk. The sequence is 0, which no request has."""

    sequence: int = 0


class ShowImage(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A sequence has an image in its prompt. It comes before the rows with the image's tokens."""

    sequence: int
    picture: PictureSpec


class Retain(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The ring continues under a higher ballot: every sequence that is not in this list has ended."""

    sequences: tuple[int, ...]


class UnknownOp(msgspec.Struct, frozen=True):
    """An operation of a newer version, kept as received so that it can be passed on. The first field of an operation is
    its sequence; an operation without one must not be sent to a stage that does not know it."""

    name: str
    sequence: int
    fields: tuple[Any, ...] = ()

    @property
    def as_sent(self) -> tuple[Any, ...]:
        """The array as it is encoded."""
        return (self.name, self.sequence, *self.fields)


Op = Insert | Copy | Remove | Keep | StoreKv | ReadAhead | ListDisk | ShowImage | Retain


class Fault(msgspec.Struct, frozen=True, array_like=True):
    """Stage `stage` cannot compute `sequence`, which is poisoned until its Remove. The other sequences go on."""

    sequence: int
    stage: int
    code: str
    message: str


class DiskNews(msgspec.Struct, frozen=True, array_like=True):
    """What a stage reports of its disk, by key. listed: all files, after a ListDisk; None: it was not asked. stored,
    fetched: written, or read ahead (or in vain), since the last report. lost: files that are not there, or were not
    written."""

    listed: tuple[bytes, ...] | None = None
    stored: tuple[bytes, ...] = ()
    lost: tuple[bytes, ...] = ()
    fetched: tuple[bytes, ...] = ()


ANY_POSITION = 2**31 - 1
"""A number of positions to cut back that stands for all of them: more than any sequence has."""


class StageReport(msgspec.Struct, frozen=True, array_like=True):
    """A stage's report on a frame that it passes on: seconds of computing it, and of waiting in the queue before.
    pressure: of memory on its machine; 0 there is room, 1 accept no new sequences, 2 run fewer than now. kv_tokens:
    positions that it can hold for all sequences together. kept_tokens: positions that it keeps of ended sequences at
    most, by its settings. cuts_anywhere: whether its engine can cut KV back to any position; a node of the version
    before knows nothing else. disk: what has happened on its disk, if anything has. shares_from: see Capabilities.
    shared_tokens: positions that its sequences hold together, counted beyond the first holder of each: kv_tokens counts
    each sequence at its full length. slack_tokens: positions beyond kv_tokens that its sequences may grow by, because
    their buffers have room; a new sequence may not take them. cut_tokens, cuts_at_rows: `rollback` and `cuts_at_rows`
    of Capabilities, if not cuts_anywhere."""

    compute_s: float
    waited_s: float
    pressure: int = 0
    kv_tokens: int = 2**31
    kept_tokens: int = 2**31
    cuts_anywhere: bool = True
    disk: DiskNews | None = None
    shares_from: int = 0
    shared_tokens: int = 0
    slack_tokens: int = 0
    cut_tokens: Annotated[int, msgspec.Meta(ge=0, le=ANY_POSITION)] = 0
    cuts_at_rows: bool = False

    @property
    def cuts_back(self) -> int:
        """How many of the last positions of a sequence the stage can cut back; ANY_POSITION if all of them."""
        return ANY_POSITION if self.cuts_anywhere else self.cut_tokens


class MemoryStatus(NamedTuple):
    """The memory state of a tensor group's rank; see StageReport. A group can use only what its poorest rank has."""

    pressure: int = 0
    kv_tokens: int = 2**31

    def worse(self, other: MemoryStatus) -> MemoryStatus:
        """Combines two ranks: the higher pressure and the smaller capacity."""
        return MemoryStatus(max(self.pressure, other.pressure), min(self.kv_tokens, other.kv_tokens))


class Frame(msgspec.Struct, frozen=True):
    """One frame. `step` is unique and rising within (instance, ballot); stages drop repeated frames by it.

    token_ids has one id per token of all rows, in row order: stage 0 embeds them, later stages may need them too.
    reports[i] is the report of stage i, for the stages that the frame has passed. upto: only stages before this one
    compute the rows, because the others hold their KV already, from a lower ballot; 0 means all. is_chunk: the rows are
    parts of prompts, also where each of them is short and ends a prompt.
    """

    ballot: Ballot
    step: int
    rows: tuple[Row, ...] = ()
    token_ids: tuple[int, ...] = ()
    ops: tuple[Op | UnknownOp, ...] = ()
    tensors: dict[str, Tensor] = {}
    faults: tuple[Fault, ...] = ()
    reports: tuple[StageReport, ...] = ()
    upto: int = 0
    is_chunk: bool = False

    def check(self) -> None:
        """Raise ValueError if rows and ids disagree. Only frames from outside are checked: that takes time."""
        if (num_tokens := sum([row.n for row in self.rows])) != len(self.token_ids):
            raise ValueError(f"rows hold {num_tokens} tokens, the frame has {len(self.token_ids)} ids")

    @property
    def is_prefill(self) -> bool:
        """Whether the rows are prompt tokens. In frames of drivers that do not say so, no logits of the first row are
        wanted then, or it is too long for drafts."""
        rows = self.rows
        return self.is_chunk or not rows or not rows[0].num_logits or rows[0].n > LONGEST_DRAFT

    def changed(self, **fields: Any) -> Frame:
        """A copy with some fields replaced."""
        return msgspec.structs.replace(self, **fields)

    def carrying(self, tensors: dict[str, Tensor], reports: tuple[StageReport, ...]) -> Frame:
        """A copy with other tensors and reports: faster than `changed`, because each stage needs two of each frame."""
        fields = self.ballot, self.step, self.rows, self.token_ids, self.ops, tensors, self.faults, reports
        return Frame(*fields, self.upto, self.is_chunk)


class RingHello(msgspec.Struct, frozen=True):
    """The first message of a hop. protocol, newest_protocol: the oldest and the newest version that the sender speaks;
    0 as the newest: only the oldest. wants_lap: a machine of this stage, or of one before it, is short of memory, and
    the driver should send a frame round soon."""

    protocol: int
    newest_protocol: int
    instance_id: str
    ballot: Ballot
    from_stage: int
    wants_lap: bool = False
