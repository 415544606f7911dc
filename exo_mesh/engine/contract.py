"""The two engine contracts, and what an engine declares about itself.

An engine package exposes a `provider` (EngineProvider) under the entry-point group `exo_mesh.engines`. Asking a
provider anything must be cheap: the heavy library is imported only by `create`, and only in a runner process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

import msgspec
import numpy as np

from exo_mesh.domain.frame import Fault, Row
from exo_mesh.domain.shard import Shard
from exo_mesh.domain.tensor import Tensor
from exo_mesh.domain.tensor_group import RankWiring

Rollback = Literal["any", "checkpoints", "none"]

KvKind = Literal["full", "window", "chunked", "latent", "recurrent"]
"""full: keys and values of every position. window: of the last so many. chunked: from the last multiple of so many on.
latent: what keys and values are computed from (MLA). recurrent: a state of constant size (SSM, linear, convolution)."""

Compute = Literal["cpu", "metal", "cuda", "rocm", "xpu", "npu"]


@dataclass(frozen=True, slots=True)
class Availability:
    """Can this engine run on this machine, why (not), and what would help. Found without importing heavy libraries.

    compute: what it would compute on; the capability tag is `<engine>-<compute>`. Never a GPU without one being there.
    dtypes: of activations from another engine that its stages take; empty if it can stand in no ring with others.
    """

    available: bool
    reason: str
    remedy: str = ""
    compute: Compute = "cpu"
    preference: int = 0
    """The available engine with the highest preference is chosen by `--engine auto`; one below 0 only by its name."""
    dtypes: tuple[str, ...] = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A named tensor that crosses a hop: `[tokens, *item_shape]` in `dtype`, tokens in row order."""

    name: str
    dtype: str
    item_shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a loaded stage can do; declared, never guessed.

    ragged: rows of different n may share one forward. rollback: to which positions KV can be cut back.
    dtypes: activation dtypes accepted on input, whatever dtype the stage computes in. kv: the kinds of KV its layers
    keep, each once. inputs, outputs: what it takes and gives besides rows and token ids, the main tensor first; inputs
    is empty on the first stage, outputs on the last one, and both on a stage that has not been loaded.
    row_exact: the bits of a row's result depend neither on the other rows nor on how its prompt was cut into chunks.
    """

    ragged: bool
    rollback: Rollback
    dtypes: tuple[str, ...]
    kv: tuple[KvKind, ...] = ("full",)
    inputs: tuple[TensorSpec, ...] = ()
    outputs: tuple[TensorSpec, ...] = ()
    row_exact: bool = False


@dataclass(frozen=True, slots=True)
class MachineMemory:
    """Bytes of the machine that a stage is loaded on: all, and what was available just before the load."""

    total_bytes: int
    available_bytes: int


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """What a stage must load. `options` are engine settings that the operator gave (`--engine-option key=value`).

    activation_dtype: what the stage hands on, agreed by all engines of a mixed ring; "" for the dtype that the model's
    own code gives, which keeps a ring of one engine bit-exact.
    rank: set if this is one rank of a tensor group; an engine that cannot be one refuses with an EngineError. The ranks
    have just seen each other when `load` is called, and it meets them before it first reports progress.
    memory: None where nobody has looked, as in tests of an engine alone.
    """

    shard: Shard
    model_dir: Path
    context_limit: int
    options: Mapping[str, str] = field(default_factory=dict)
    activation_dtype: str = ""
    rank: RankWiring | None = None
    memory: MachineMemory | None = None


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
    Only `sequences`, `memory_bytes` and `library_memory` may also come from another thread, at any time once it is
    loaded.

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


@dataclass(frozen=True, slots=True)
class SavedSequence:
    """What a stage holds of one sequence, as bytes: `length` positions in named tensors whose meaning is the engine's.

    Only the same engine with the same shard of the same model can take it back.
    """

    length: int
    tensors: Mapping[str, Tensor]


@runtime_checkable
class SequenceSaver(Protocol):
    """What a stage engine has besides if a sequence's KV can be copied out and in again, on this machine or another."""

    def save(self, sequence: int) -> SavedSequence:
        """Copy out what the stage holds of a sequence. Raises EngineError if it is unknown. Changes nothing."""

    def restore(self, sequence: int, max_tokens: int, saved: SavedSequence) -> None:
        """Begin (or replace) a sequence with what was saved; the next row may start at any pos0 <= saved.length that
        `rollback` allows. Raises EngineError, changing nothing, if the tensors do not fit this stage."""


@runtime_checkable
class SequenceCopier(Protocol):
    """What a stage engine has besides if a sequence can begin as a copy of another one."""

    def copy(self, source: int, sequence: int, upto: int, max_tokens: int) -> None:
        """Begin (or replace) a sequence with the first `upto` positions of `source`, which stays as it is.

        A copy of all that the source holds works for every kind of KV; fewer positions work as far as its KV can be cut
        back. Raises EngineError, changing nothing, if the source is unknown or shorter, if max_tokens is less than
        `upto`, or if the KV cannot be copied or cut back.
        """


@dataclass(frozen=True, slots=True)
class LibraryMemory:
    """What the library of an engine takes in its process, in bytes, as it counts itself. active: arrays in use. cache:
    what it keeps for later ones. peak: the most that was active. limit: what it may take; None without one."""

    source: str
    active_bytes: int
    cache_bytes: int
    peak_bytes: int
    limit_bytes: int | None = None


@runtime_checkable
class MemoryTeller(Protocol):
    """What a stage engine has besides if its library counts its memory."""

    def library_memory(self) -> LibraryMemory | None:
        """From any thread, once the engine is loaded. None where the library does not count, as torch on a CPU."""


def copy_defect(source: int, length: int | None, upto: int, max_tokens: int) -> str | None:
    """Why no engine can copy a sequence, or None. length: KV positions that the source holds, None if unknown."""
    if length is None:
        return f"sequence {source} is not known here"
    if upto > length:
        return f"{upto} positions of sequence {source} are to be copied, but it holds {length}"
    if not 0 <= upto <= max_tokens:
        return f"{upto} copied positions do not fit in room for {max_tokens}"
    return None


@dataclass(frozen=True, slots=True)
class GroupCheck:
    """What the leader measured while the group was checked; the same on every rank.

    all_reduce_s: of a few bytes, the median; reduce_bytes_per_s: of a few MiB. chunk_s: of the slowest prefill chunk
    through all layers of the stage. alone_layer_s, alone_chunk_s: of one layer on the leader alone, for one token and
    for a whole chunk, medians; 0.0 if no layer could be taken alone. worst: largest difference from one machine's
    result, relative to its length.
    """

    all_reduce_s: float
    reduce_bytes_per_s: float
    chunk_s: float
    alone_layer_s: float
    alone_chunk_s: float
    worst: float


@runtime_checkable
class GroupMember(Protocol):
    """What a stage engine has besides if it can be one rank of a tensor group.

    All ranks are given the same calls in the same order. Any error of `forward` ends the group: nobody can tell how far
    the other ranks have come.
    """

    def verify(self, chunk_tokens: int, progress: LoadProgress) -> GroupCheck:
        """Called once after `load`, by all ranks at about the same time: does the group compute what one machine would,
        for a prompt of more than two prefill chunks? Raises CanaryError on every rank if it does not. Leaves nothing
        behind. progress: in parts of the stage, as a sign of life."""


@runtime_checkable
class GroupTimer(Protocol):
    """What a group member may have besides: how long its all-reduces take while the group works."""

    @property
    def all_reduce_s(self) -> float:
        """Seconds of one all-reduce of a few bytes, as measured last. Read from any thread."""


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


@dataclass(frozen=True, slots=True)
class ModelSurvey:
    """What an engine knows of a model from its config and the headers of its weights, before a weight is read.

    legal_cuts: layers before which a stage may begin; empty for a model that runs in one piece only, and then `reason`.
    layer_bytes[i]: weights of layer i as this engine holds them (dequantised, maybe); embed_bytes, head_bytes:
    what the first and the last stage hold besides. kv_bytes_per_token[i]: what layer i keeps per position;
    kv_fixed_bytes[i]: per sequence, however long it is. layer_kinds[i]: equal for layers of equal code and shapes.
    An empty tuple: as the model's card says.
    """

    legal_cuts: tuple[int, ...]
    reason: str = ""
    layer_bytes: tuple[int, ...] = ()
    embed_bytes: int = 0
    head_bytes: int = 0
    kv_bytes_per_token: tuple[int, ...] = ()
    kv_fixed_bytes: tuple[int, ...] = ()
    layer_kinds: tuple[str, ...] = ()


@runtime_checkable
class Surveyor(Protocol):
    """What a provider has besides if it can look at a model before loading it. Without it every boundary is legal, and
    bytes are those of the files."""

    def survey(self, model_dir: Path, options: Mapping[str, str]) -> ModelSurvey:
        """With the engine settings that a stage would be loaded with (LoadRequest.options): a dtype decides the bytes.

        May import the heavy library, so it is asked only in its own process. Raises ModelError for a model that it
        cannot run, naming file and tensor or key, and InputError for an option that it does not have.
        """


@runtime_checkable
class Groupable(Protocol):
    """What a provider has besides if its stages can be tensor groups."""

    def group_obstacle(self, config: Mapping[str, Any], size: int) -> str:
        """Why a model with this config.json cannot be split over `size` ranks, with the numbers; "" if it can. Pure and
        cheap: reads no weights and imports no heavy library."""
