"""The two engine contracts, and what an engine declares about itself.

An engine package exposes a `provider` (EngineProvider) under the entry-point group `exo_mesh.engines`. Every call of a
provider must be cheap: the heavy library is imported only by `create`, and only in a runner process.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

import msgspec

from exo_mesh.domain.footprint import (
    LibraryMemory as LibraryMemory,  # engines import the parts of the contract from here
)
from exo_mesh.domain.frame import ANY_POSITION as ANY_POSITION
from exo_mesh.domain.frame import LONGEST_DRAFT, Fault, Row
from exo_mesh.domain.images import PictureSpec
from exo_mesh.domain.shard import Shard
from exo_mesh.domain.tensor import Tensor
from exo_mesh.domain.tensor import TensorSpec as TensorSpec
from exo_mesh.domain.tensor_group import GroupCheck as GroupCheck
from exo_mesh.domain.tensor_group import RankWiring

if TYPE_CHECKING:  # a node does not import NumPy: it would take a sixth of its start
    import numpy as np

KvKind = Literal["full", "window", "chunked", "latent", "recurrent"]
"""full: keys and values of every position. window: of the last positions. chunked: of the positions since the last
chunk boundary. latent: the values from which keys and values are computed (MLA). recurrent: a state of constant size
(SSM, linear, convolution)."""

Compute = Literal["cpu", "metal", "cuda", "rocm", "vulkan", "xpu", "npu"]


class Availability(msgspec.Struct, frozen=True):
    """Whether an engine can run on this machine, the reason, and what would help. Found without importing heavy
    libraries.

    compute: the kind of device that it would use; the capability tag is `<engine>-<compute>`. Never a GPU that does not
    exist. dtypes: of activations that its stages take from another engine; empty if it cannot join a ring with others.
    """

    available: bool
    reason: str
    remedy: str = ""
    compute: Compute = "cpu"
    preference: int = 0
    """`--engine auto` chooses the available engine with the highest preference; an engine below 0 is used only by its
    name."""
    dtypes: tuple[str, ...] = ("float32", "bfloat16", "float16")


class Capabilities(msgspec.Struct, frozen=True):
    """The declared abilities of a loaded stage.

    ragged: rows of different n may share one forward. rollback: how many of a sequence's last positions can be cut
    back, counted from the most that it has held: ANY_POSITION for all of them, 0 for none. Any other number is for
    drafts: a row that is not `drafted` settles what is before it, and unless it `may_be_refused`, its own positions
    too. A new beginning at position 0 always works. cuts_at_rows: a sequence can be cut back only to where a row began
    that `may_be_refused`, because the engine keeps the state before each of them. dtypes: activation dtypes accepted on
    input, whatever dtype the stage computes in. kv: the kinds of KV that its layers keep, each once. inputs, outputs:
    the tensors that it takes and gives besides rows and token ids, the main tensor first; inputs is empty on the first
    stage, outputs on the last one, and both on a stage that has not been loaded. row_exact: the bits of a row's result
    depend neither on the other rows nor on how its prompt was cut into chunks. shares_from: a copy of a sequence holds
    a common beginning of at least so many positions together with its source, as `SharedPositions` counts it; 0: a copy
    takes memory of its own.
    """

    ragged: bool
    rollback: int
    dtypes: tuple[str, ...]
    kv: tuple[KvKind, ...] = ("full",)
    inputs: tuple[TensorSpec, ...] = ()
    outputs: tuple[TensorSpec, ...] = ()
    row_exact: bool = False
    shares_from: int = 0
    cuts_at_rows: bool = False

    @property
    def cuts_anywhere(self) -> bool:
        """Whether a sequence can be cut back to any position."""
        return self.rollback >= ANY_POSITION


CUT_POSITIONS = LONGEST_DRAFT
"""How many of a sequence's last positions an engine should be able to cut back where a layer keeps a window or a
recurrent state: those of the longest row, or of a chain of shorter rows."""

COUNTED_STATES = 4
"""Earlier recurrent states that a sequence's bytes count besides its own, where an engine keeps the state before each
row with drafts. More are kept only while a longer chain of rows with a single draft is on its way."""

LEAST_SHARED = 256
"""Least positions that engines let sequences share: fewer are copied, which costs little."""

MOST_PARTS = 4
"""Pieces of a sequence that it may share with others, each with another set of them. Attention goes piece by piece."""


@runtime_checkable
class DraftingEngine(Protocol):
    """An engine whose last stage guesses how a text goes on, without computing its layers."""

    @property
    def drafts(self) -> bool:
        """Whether the loaded model has what that needs."""
        ...

    def draft(self, token_ids: Collection[int], most: int) -> list[int]:
        """Up to `most` tokens that may follow these. From the driver's thread, while a frame may be computed."""
        ...


class MachineMemory(msgspec.Struct, frozen=True):
    """Bytes of memory of the machine that a stage is loaded on: all, and what was available just before the load."""

    total_bytes: int
    available_bytes: int


class LoadRequest(msgspec.Struct, frozen=True):
    """The part of a model that a stage must load. `options` are engine settings that the operator gave
    (`--engine-option key=value`).

    activation_dtype: dtype of the tensors that the stage passes on, agreed by all engines of a mixed ring; "" for the
    dtype that the model's own code gives, which keeps a ring of one engine bit-exact. rank: set if this is one rank of
    a tensor group; an engine that does not support groups refuses with an EngineError. The ranks have just connected
    when `load` is called, and the engine joins them before it first reports progress. memory: None if it was not
    measured, as in tests of an engine alone.
    """

    shard: Shard
    model_dir: Path
    context_limit: int
    options: Mapping[str, str] = msgspec.field(default_factory=dict)
    activation_dtype: str = ""
    rank: RankWiring | None = None
    memory: MachineMemory | None = None


class StageInput(msgspec.Struct, frozen=True):
    """Rows to compute. token_ids: one per token, in row order.

    tensors: the output of the previous stage; empty on the first stage, and if there are no rows.
    """

    rows: tuple[Row, ...]
    token_ids: tuple[int, ...]
    tensors: Mapping[str, Tensor]


class StageOutput(msgspec.Struct, frozen=True):
    """Either `tensors` for the next stage (main tensor "hidden", `[sum(n), hidden]`), or from the last stage float32
    `logits` `[sum(num_logits), vocab]` in row order.

    If rows want them, the last stage also gives the final hidden states `hidden`, float32 `[sum(num_hidden), width]` in
    row order: the input of the model's head, after the last norm. None from an engine that cannot give them. A model
    whose head classifies gives its output for the whole text instead, for each wanted position.

    Rows of a faulted sequence hold zeros (or any finite values) so that shapes stay right. An engine does not know its
    place in the ring: it leaves `Fault.stage` at UNKNOWN_STAGE, and the runner fills it in.
    """

    tensors: Mapping[str, Tensor] = msgspec.field(default_factory=dict)
    logits: np.ndarray | None = None
    faults: tuple[Fault, ...] = ()
    hidden: np.ndarray | None = None


UNKNOWN_STAGE = -1


def row_defect(row: Row, length: int | None, max_tokens: int) -> str | None:
    """The reason why no engine can compute a row, or None. length: KV positions that its sequence holds, None if
    unknown."""
    if length is None:
        return f"sequence {row.sequence} is not known here"
    if row.pos0 > length:
        return f"row starts at position {row.pos0}, but the sequence holds only {length}"
    if row.pos0 + row.n > max_tokens:
        return f"row ends at position {row.pos0 + row.n}, but the sequence has room for {max_tokens}"
    return None


LoadProgress = Callable[[int, int], None]
"""Called with (bytes or layers done, total) while a stage loads."""


class StageEngine(Protocol):
    """Runs one layer range. All calls come from one thread, the runner's compute thread; none may wait for I/O. Only
    `sequences`, `memory_bytes` and `library_memory` may also come from another thread, at any time once it is loaded.

    A failure that concerns one sequence is a Fault in the output; any other failure raises EngineError or ModelError.
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


class SavedSequence(msgspec.Struct, frozen=True):
    """The state that a stage holds for one sequence, as bytes: `length` positions in named tensors, which only the
    engine interprets.

    Only the same engine with the same shard of the same model can restore it.
    """

    length: int
    tensors: Mapping[str, Tensor]


@runtime_checkable
class SequenceSaver(Protocol):
    """Optional part of a stage engine that can copy a sequence's KV out and in again, on this machine or another."""

    def save(self, sequence: int) -> SavedSequence:
        """Copy out the state that the stage holds for a sequence. Raises EngineError if the sequence is unknown.
        Changes nothing."""

    def restore(self, sequence: int, max_tokens: int, saved: SavedSequence) -> None:
        """Begin (or replace) a sequence from a saved state; the next row may start at any pos0 <= saved.length that
        `rollback` allows. Raises EngineError, changing nothing, if the tensors do not fit this stage."""


@runtime_checkable
class PartSaver(Protocol):
    """Optional part of a SequenceSaver that can copy a long sequence out in several steps, so that other sequences
    are computed in between."""

    def save_parts(self, sequence: int) -> Iterator[SavedSequence]:
        """Copy out what `save` does, some tensors at each step; all of them together are what `save` returns. Other
        sequences may change between two steps, this one may not. Each step raises EngineError if the sequence is
        unknown."""


@runtime_checkable
class SequenceCopier(Protocol):
    """Optional part of a stage engine that can begin a sequence as a copy of another one."""

    def copy(self, source: int, sequence: int, upto: int, max_tokens: int) -> None:
        """Begin (or replace) a sequence with the first `upto` positions of `source`, which stays as it is.

        A copy of all positions of the source works for every kind of KV; fewer positions work as far as its KV can be
        cut back. Raises EngineError, changing nothing, if the source is unknown or shorter, if max_tokens is less than
        `upto`, or if the KV cannot be copied or cut back.
        """


@runtime_checkable
class SequenceMover(Protocol):
    """Optional part of a stage engine whose copies take memory, and that can hand the KV of a sequence over to another
    one instead."""

    def move(self, source: int, sequence: int, upto: int, max_tokens: int) -> None:
        """Like SequenceCopier.copy, but `source` ends: no more memory is taken than it had. Raises EngineError as
        `copy` does, changing nothing."""


@runtime_checkable
class ImageTaker(Protocol):
    """Optional part of a stage engine that computes prompts with images."""

    def show(self, sequence: int, picture: PictureSpec, pixels: Tensor | None) -> None:
        """Note an image of a sequence, before the rows with its tokens; an image that begins at the same position is
        replaced. pixels: uint8 `[height, width, 3]` on the first stage, whose vision tower makes the image's tokens;
        None on all others, which need only positions.

        Raises InputError if the model takes no images, and EngineError if the sequence is unknown or the image does not
        fit the model."""


@runtime_checkable
class SequenceKeeper(Protocol):
    """Optional part of a stage engine that keeps sequences which decode together in common arrays."""

    def keep(self, sequence: int) -> None:
        """Note that a sequence gets no more rows, while its KV stays until its end: it should not be in the way of the
        others, nor take more memory than it needs. Does nothing for an unknown sequence."""


@runtime_checkable
class MemoryTeller(Protocol):
    """Optional part of a stage engine whose library counts its memory."""

    def library_memory(self) -> LibraryMemory | None:
        """The library's count. From any thread, once the engine is loaded. None if the library does not count, as torch
        on a CPU."""


def copy_defect(source: int, length: int | None, upto: int, max_tokens: int) -> str | None:
    """The reason why no engine can copy a sequence, or None. length: KV positions that the source holds, None if
    unknown."""
    if length is None:
        return f"sequence {source} is not known here"
    if upto > length:
        return f"{upto} positions of sequence {source} are to be copied, but it holds {length}"
    if not 0 <= upto <= max_tokens:
        return f"{upto} copied positions do not fit in room for {max_tokens}"
    return None


@runtime_checkable
class Warmable(Protocol):
    """Optional part of a stage engine that builds or reads something in its first forward passes: kernels, buffers,
    pages of weights."""

    def warm_up(self, context_limit: int) -> None:
        """Compute what a first request would, so that it does not wait. Called once after `load`, unless the operator
        turned it off or the stage is a rank of a tensor group. context_limit: as in LoadRequest. Leaves no sequence
        behind. Raises EngineError, which is logged; the stage serves all the same."""


@runtime_checkable
class GroupMember(Protocol):
    """Optional part of a stage engine that can be one rank of a tensor group.

    All ranks get the same calls in the same order. Any error of `forward` ends the group: the progress of the other
    ranks is unknown.
    """

    def verify(self, chunk_tokens: int, progress: LoadProgress) -> GroupCheck:
        """Check that the group computes the same as one machine, for a prompt of more than two prefill chunks. Called
        once after `load`, by all ranks at about the same time. Raises CanaryError on every rank if the results differ.
        Leaves no state behind. progress: in parts of the stage, as a sign of life."""


@runtime_checkable
class RankAgreement(Protocol):
    """Optional part of a group member whose ranks can find out whether all of them are able to do something."""

    def agree(self, mine: bool) -> bool:
        """Whether all ranks say yes. Collective: all ranks call it at the same place in their order of calls. Raises
        RankLostError if another rank is gone."""


@runtime_checkable
class GroupTimer(Protocol):
    """Optional part of a group member that measures its all-reduces while the group works."""

    @property
    def all_reduce_s(self) -> float:
        """Seconds of the last measured all-reduce of a few bytes. Read from any thread."""


class EngineProvider(Protocol):
    """The object through which the core finds and creates an engine."""

    name: str
    kind: Literal["stage", "whole-model"]

    def availability(self) -> Availability:
        """Find out, without importing the heavy library, whether the engine can run here."""

    def supports(self, architecture: str) -> bool:
        """Whether this engine can run models with this `model_type`. Cheap; called by the node during planning."""

    def version(self) -> str:
        """Version of the library behind the engine, or "" if it is absent."""

    def create(self) -> StageEngine:
        """Import the library and make an engine; called once, in the runner's compute thread."""


@runtime_checkable
class Configurable(Protocol):
    """Optional part of a provider whose answers depend on the operator's engine options, such as the device to use."""

    def configured(self, options: Mapping[str, str]) -> EngineProvider:
        """A provider for these options (LoadRequest.options). Options that it cannot use make it unavailable."""


@runtime_checkable
class ChecksOptions(Protocol):
    """Optional part of a provider that knows its engine options without its library."""

    def check_options(self, options: Mapping[str, str]) -> None:
        """Raises InputError for an unknown option, value or combination (LoadRequest.options), and names the supported
        ones. A node calls this at its start, so that no request is the first to find out."""


@runtime_checkable
class NamesQuantisations(Protocol):
    """Optional part of a provider that reads only some quantised checkpoints. A node lists no other model as one that
    the engine runs, without a survey of every model on its disk."""

    quant_methods: Collection[str]
    """Values of `quantization_config.quant_method` in config.json that the engine reads; "gguf" for GGUF files. Its
    survey and its stages refuse all others."""


class ModelSurvey(msgspec.Struct, frozen=True):
    """An engine's knowledge of a model from its config and the headers of its weights, before a weight is read.

    legal_cuts: layers before which a stage may begin; empty for a model that runs in one piece only, with the `reason`.
    layer_bytes[i]: weights of layer i as this engine holds them (dequantised, maybe); embed_bytes, head_bytes: what the
    first and the last stage hold besides. kv_bytes_per_token[i]: KV of layer i per position; kv_fixed_bytes[i]: per
    sequence of any length. layer_kinds[i]: equal for layers of equal code and shapes. An empty tuple: the figures of
    the model's card apply.
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
    """Optional part of a provider that can look at a model before loading it. Without it every boundary is legal, and
    bytes are those of the files."""

    def survey(self, model_dir: Path, options: Mapping[str, str]) -> ModelSurvey:
        """Survey a model with the engine settings that a stage would be loaded with (LoadRequest.options): a dtype
        decides the bytes. May import the heavy library, so it is called only in a process of its own. Raises ModelError
        for a model that the engine cannot run, naming file and tensor or key, and InputError for an unknown option."""


@runtime_checkable
class Groupable(Protocol):
    """Optional part of a provider whose stages can be tensor groups."""

    def group_obstacle(self, config: Mapping[str, Any], size: int) -> str:
        """The reason, with the numbers, why a model with this config.json cannot be split over `size` ranks; "" if it
        can. Pure and cheap: reads no weights and imports no heavy library."""
