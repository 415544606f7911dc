"""The two engine contracts, and what an engine declares about itself.

An engine package exposes a `provider` (EngineProvider) under the entry-point group `exo_mesh.engines`. Asking a
provider anything must be cheap: the heavy library is imported only by `create`, and only in a runner process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

import msgspec
import numpy as np

from exo_mesh.domain.frame import Fault, Row
from exo_mesh.domain.shard import Shard
from exo_mesh.domain.tensor import Tensor

Rollback = Literal["any", "checkpoints", "none"]


@dataclass(frozen=True, slots=True)
class Availability:
    """Can this engine run on this machine, why (not), and what would help. Found without importing heavy libraries."""

    available: bool
    reason: str
    remedy: str = ""
    preference: int = 0
    """The available engine with the highest preference is chosen by `--engine auto`; one below 0 only by its name."""


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a loaded stage can do; declared, never guessed.

    ragged: rows of different n may share one forward. rollback: to which positions KV can be cut back.
    dtypes: activation dtypes accepted on input.
    """

    ragged: bool
    rollback: Rollback
    dtypes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """What a stage must load. `options` are engine settings that the operator gave (`--engine-option key=value`)."""

    shard: Shard
    model_dir: Path
    context_limit: int
    options: Mapping[str, str] = field(default_factory=dict)


class StageInput(msgspec.Struct, frozen=True):
    """Rows to compute. token_ids: one per token, in row order.

    tensors: what the stage before gave out; empty on the first stage, and where there are no rows.
    """

    rows: tuple[Row, ...]
    token_ids: tuple[int, ...]
    tensors: Mapping[str, Tensor]


class StageOutput(msgspec.Struct, frozen=True):
    """Exactly one of: `tensors` for the next stage (main tensor "hidden", `[sum(n), hidden]`), or float32
    `logits` `[sum(num_logits), vocab]` in row order from the last stage.

    Rows of a faulted sequence hold zeros (or anything finite) so that shapes stay right. An engine does not know its
    place in the ring: it leaves `Fault.stage` at UNKNOWN_STAGE, and the runner fills it in.
    """

    tensors: Mapping[str, Tensor] = msgspec.field(default_factory=dict)
    logits: np.ndarray | None = None
    faults: tuple[Fault, ...] = ()


UNKNOWN_STAGE = -1


def row_defect(row: Row, length: int | None, max_tokens: int) -> str | None:
    """Why a row cannot be done by any engine, or None. length: KV positions its sequence holds, None if unknown."""
    if length is None:
        return f"sequence {row.sequence} is not known here"
    if row.pos0 > length:
        return f"row starts at position {row.pos0}, but only {length} are there"
    if row.pos0 + row.n > max_tokens:
        return f"row ends at position {row.pos0 + row.n}, but room was made for {max_tokens}"
    return None


LoadProgress = Callable[[int, int], None]
"""Called with (bytes or layers done, total) while a stage loads."""


class StageEngine(Protocol):
    """Runs one layer range. All calls come from one thread, the runner's compute thread; none may wait for I/O.
    Only `sequences` and `memory_bytes` may also come from another thread, at any time once it is loaded.

    A failure that concerns one sequence is a Fault in the output; anything else raises EngineError or ModelError.
    """

    capabilities: Capabilities

    def load(self, request: LoadRequest, progress: LoadProgress) -> None:
        """Load the shard's own tensors and nothing else. Raises ModelError naming file and tensor, or EngineError."""

    def insert(self, sequence: int, max_tokens: int) -> None:
        """Begin a sequence whose KV will hold at most max_tokens positions. Repeating it changes nothing."""

    def forward(self, stage_input: StageInput) -> StageOutput:
        """For each row: bring the KV of its sequence to pos0, append n positions, compute. Mutates only KV."""

    def remove(self, sequence: int) -> None:
        """Free everything of a sequence. An unknown sequence is no error."""

    def sequences(self) -> Sequence[int]:
        """The sequences that hold KV now."""

    def memory_bytes(self) -> int:
        """Bytes that weights and KV of this stage take now, as the library counts them."""

    def close(self) -> None:
        """Free all; the object is not used afterwards."""


class EngineProvider(Protocol):
    """The door through which the core finds an engine."""

    name: str
    kind: Literal["stage", "whole-model"]

    def availability(self) -> Availability:
        """Look, without importing the heavy library, whether the engine can run here."""

    def supports(self, architecture: str) -> bool:
        """Can this engine run models with this `model_type`? Cheap; called by the node at planning."""

    def version(self) -> str:
        """Version of the library behind the engine, or "" if it is absent."""

    def create(self) -> StageEngine:
        """Import the library and make an engine; called once, in the runner's compute thread."""
