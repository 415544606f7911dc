"""The stage rule: apply a frame's ops, compute its rows, pass it on. Knows the engine contract and frames only."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import groupby

import msgspec
import numpy as np

from exo_mesh import __version__
from exo_mesh.domain.frame import (
    NO_COPY,
    PIXELS,
    UNKNOWN_OP,
    Copy,
    Fault,
    Frame,
    Insert,
    Keep,
    ListDisk,
    Op,
    ReadAhead,
    Remove,
    Retain,
    Row,
    ShowImage,
    StoreKv,
    UnknownOp,
)
from exo_mesh.domain.tensor import ITEM_BYTES, Tensor
from exo_mesh.engine.contract import (
    ImageTaker,
    PartSaver,
    RankAgreement,
    SavedSequence,
    SequenceCopier,
    SequenceKeeper,
    SequenceMover,
    SequenceSaver,
    StageEngine,
    StageInput,
    StageOutput,
)
from exo_mesh.errors import EngineError, InputError, MeshError
from exo_mesh.rings.runner.disk_store import RANK_TAKE_S, TAKE_S, DiskStore

_SPARE = 0
"""A sequence that no driver uses: a file with more positions than are wanted is read into it first."""

_log = logging.getLogger(__name__)


class StageResult(msgspec.Struct, frozen=True):
    """`frame` as it goes to the next stage; logits (float32 `[sum(num_logits), vocab]`) and hidden (float32
    `[sum(num_hidden), width]`) at the last stage. pause_s: time in which the stage had nothing to compute before."""

    frame: Frame
    logits: np.ndarray | None
    hidden: np.ndarray | None = None
    pause_s: float = 0.0


class Stage:
    """Runs frames through an engine, in the compute thread.

    A sequence that a stage cannot compute becomes a fault on the frame; its rows go no further, the other rows
    continue. A rank of a tensor group cannot do that after an error of its engine: the state of the other ranks is not
    known.
    """

    def __init__(
        self, engine: StageEngine, index: int, *, is_rank: bool = False, disk: DiskStore | None = None
    ) -> None:
        self._engine = engine
        self._disk = disk
        self._index = index
        self._is_rank = is_rank
        self._refused: set[int] = set()
        """Sequences with an operation that this version does not know: their rows are dropped until they end."""

    def process(self, frame: Frame) -> StageResult:
        """Apply the ops in order, then compute the rows. Raises nothing for a bad row; ops cannot fail.

        A rank of a tensor group raises what the engine raises.
        """
        faults = self._apply_ops(frame) if frame.ops else ()
        if self._disk is not None and self._disk.copied is not None:
            self._copy_out(self._disk, frame)
        if faults:
            frame = frame.changed(faults=frame.faults + faults)
        if self._refused:
            frame = _without(frame, self._refused)
        if not frame.rows and frame.tensors:
            frame = frame.changed(tensors={})  # pixels, which only the first stage needs
        if not frame.rows or (frame.upto and self._index >= frame.upto):
            return StageResult(frame, None)  # nothing to compute, or its KV is here from a lower ballot
        try:
            output = self._forward(StageInput(frame.rows, frame.token_ids, frame.tensors))
        except Exception as exc:
            if self._is_rank:
                raise
            return StageResult(self._all_faulted(frame, exc), None)
        return self._passed_on(frame, output)

    def forget(self, sequences: Iterable[int]) -> None:
        """Free the KV of these sequences."""
        for sequence in sequences:
            self._end_copy_of(sequence)
            self._engine.remove(sequence)

    def _forward(self, whole: StageInput) -> StageOutput:
        """Compute all rows at once, or, for an engine that is not ragged, one group of neighbouring rows of equal n
        after the other."""
        if self._engine.capabilities.ragged:
            return self._engine.forward(whole)
        outputs: list[StageOutput] = []
        start = 0
        for _, group in groupby(whole.rows, key=lambda row: row.n):
            rows = tuple(group)
            stop = start + sum(row.n for row in rows)
            tensors = {name: tensor.rows(start, stop) for name, tensor in whole.tensors.items()}
            outputs.append(self._engine.forward(StageInput(rows, whole.token_ids[start:stop], tensors)))
            start = stop
        return outputs[0] if len(outputs) == 1 else _joined(outputs)

    def _apply_ops(self, frame: Frame) -> tuple[Fault, ...]:
        """Apply the ops. Returns the faults of sequences that could not be copied or have an operation that is unknown
        here."""
        faults: list[Fault] = []
        for index, op in enumerate(frame.ops):
            match op:
                case Insert():
                    self._engine.insert(op.sequence, op.max_tokens)
                case Copy():
                    is_last = _ends_after(op, frame.ops[index + 1 :])
                    if why := self._copy(op, is_last=is_last, patience_s=self._patience_s(frame.ops)):
                        faults.append(Fault(op.sequence, self._index, NO_COPY, why))
                case ShowImage():
                    if fault := self._show(op, frame.tensors.get(PIXELS)):
                        faults.append(fault)
                case Remove():
                    self._refused.discard(op.sequence)
                    self.forget([op.sequence])
                case Keep():  # the KV stays until the Remove
                    if isinstance(self._engine, SequenceKeeper):
                        self._engine.keep(op.sequence)
                case StoreKv() | ReadAhead() | ListDisk():
                    self._use_disk(op)
                case Retain():
                    self._refused &= set(op.sequences)
                    self.forget(set(self._engine.sequences()) - set(op.sequences))
                case UnknownOp():
                    faults.append(self._unknown(op))
        return tuple(faults)

    def _unknown(self, op: UnknownOp) -> Fault:
        self._refused.add(op.sequence)
        message = f"stage {self._index} runs exo-mesh {__version__}, which does not know the operation {op.name}"
        return Fault(op.sequence, self._index, UNKNOWN_OP, message)

    def _show(self, op: ShowImage, pixels: Tensor | None) -> Fault | None:
        """Give an image to the engine; if that fails, the sequence is poisoned."""
        try:
            if not isinstance(self._engine, ImageTaker):
                raise InputError(
                    f"the engine of stage {self._index} takes no images; let another engine run the model, see "
                    "docs/tasks/images.md"
                )
            self._engine.show(op.sequence, op.picture, pixels)
        except MeshError as exc:
            if self._is_rank and not isinstance(exc, InputError):
                raise
            self._refused.add(op.sequence)
            return Fault(op.sequence, self._index, exc.code, str(exc))
        return None

    def _copy(self, op: Copy, *, is_last: bool, patience_s: float) -> str:
        """Begin a sequence as a copy; if that fails, begin it empty and return the reason. All ranks of a tensor group
        hold the same sequences, so all of them refuse the same copies; any other error of one rank ends the group. What
        they have on disk may differ, see _begin_from_disk.

        is_last: the source ends in the same frame, unused; its memory is used again if the engine can do that.
        patience_s: longest time that it waits for a file.
        """
        if self._index < op.first_stage:
            self._begin_empty(op)
            return ""
        if op.disk:
            return self._begin_from_disk(op, patience_s)
        try:
            if not isinstance(self._engine, SequenceCopier):
                raise EngineError("this engine cannot copy sequences")
            if is_last:
                self._end_copy_of(op.source)
            make = self._engine.move if is_last and isinstance(self._engine, SequenceMover) else self._engine.copy
            make(op.source, op.sequence, op.upto, op.max_tokens)
        except Exception as exc:
            if self._is_rank and not isinstance(exc, EngineError):
                raise
            _log.debug("stage %d cannot copy sequence %d: %s", self._index, op.source, exc)
            self._begin_empty(op)
            return f"stage {self._index}: {exc}"
        return ""

    def _use_disk(self, op: StoreKv | ReadAhead | ListDisk) -> None:
        """Write to disk, or read ahead, in other threads, or list the files. A stage without a disk does nothing: its
        driver has learnt that from its answer to ListDisk, which is missing. The same if one rank has no disk."""
        disk = self._disk if isinstance(self._engine, SequenceSaver) else None
        if isinstance(op, ListDisk):
            if self._all_agree(disk is not None and disk.opens()) and disk is not None:
                disk.list_all()
        elif disk is not None and isinstance(op, StoreKv):
            disk.store(op, self._engine.save_parts if isinstance(self._engine, PartSaver) else self._save_whole)
        elif disk is not None and isinstance(op, ReadAhead):
            disk.fetch(op.key)

    def _save_whole(self, sequence: int) -> Iterator[SavedSequence]:
        assert isinstance(self._engine, SequenceSaver), "asked before"
        yield self._engine.save(sequence)

    def _copy_out(self, disk: DiskStore, frame: Frame) -> None:
        """Copy a part of the sequence that is to be written; all of it if nothing else runs, or if it goes on. A frame
        with other ops and no rows says nothing: it may be beside the frames of running streams."""
        is_idle = not frame.rows and all(isinstance(op, StoreKv) for op in frame.ops)
        if is_idle or any(row.sequence == disk.copied for row in frame.rows):
            disk.finish_copy()
        else:
            disk.copy_part()

    def _end_copy_of(self, sequence: int) -> None:
        """Copy all that is left of a sequence that is to be written, because it ends."""
        if self._disk is not None and self._disk.copied == sequence:
            self._disk.finish_copy()

    def _begin_from_disk(self, op: Copy, patience_s: float) -> str:
        """Begin a sequence with a file; if that fails, begin it empty and return the reason. The ranks of a tensor
        group agree: if one of them has lost its file, all begin empty, because each holds a part of the same KV."""
        why = ""
        try:
            self._load(op, patience_s)
        except Exception as exc:  # noqa: BLE001 - logged; the prompt is computed
            why = str(exc) or type(exc).__name__
            _log.debug("stage %d cannot begin sequence %d from disk: %s", self._index, op.sequence, why)
        if self._all_agree(not why):
            return ""
        self._begin_empty(op)
        return f"stage {self._index}: {why or 'another rank cannot use its file'}"

    def _patience_s(self, ops: Iterable[Op | UnknownOp]) -> float:
        """Seconds to wait for each file of a frame. A rank waits for all files of one frame together no longer than
        for one of them."""
        num_files = sum(isinstance(op, Copy) and bool(op.disk) for op in ops)
        return RANK_TAKE_S / max(1, num_files) if self._is_rank else TAKE_S

    def _all_agree(self, mine: bool) -> bool:
        """Whether all ranks of the tensor group say yes; at any other stage `mine`. Every rank gets here by the same
        ops. Raises RankLostError if another rank is gone."""
        if not self._is_rank:
            return mine
        return isinstance(self._engine, RankAgreement) and self._engine.agree(mine)

    def _load(self, op: Copy, patience_s: float) -> None:
        """Begin a sequence with a file from disk. Raises EngineError, or what the engine raises for tensors that are
        not its own; the file is removed then."""
        if self._disk is None or not isinstance(self._engine, SequenceSaver):
            raise EngineError("this stage has no files on disk")
        saved = self._disk.take(op.disk, patience_s)
        try:
            if not self._engine.capabilities.cuts_anywhere and saved.length != op.upto:
                raise EngineError(f"the file has {saved.length} positions, {op.upto} are wanted")
            if saved.length <= op.max_tokens:
                self._engine.restore(op.sequence, op.max_tokens, saved)
                return
            if not isinstance(self._engine, SequenceCopier):
                raise EngineError("this engine cannot cut the file to the positions wanted")
            self._engine.restore(_SPARE, saved.length, saved)
            make = self._engine.move if isinstance(self._engine, SequenceMover) else self._engine.copy
            make(_SPARE, op.sequence, op.upto, op.max_tokens)
        except Exception:
            self._disk.refuse(op.disk)
            raise
        finally:
            if saved.length > op.max_tokens:
                self._engine.remove(_SPARE)

    def _begin_empty(self, op: Copy) -> None:
        self._engine.remove(op.sequence)
        self._engine.insert(op.sequence, op.max_tokens)

    def _all_faulted(self, frame: Frame, exc: Exception) -> Frame:
        code = exc.code if isinstance(exc, MeshError) else EngineError.code
        _log.error("stage %d cannot compute frame %d: %s", self._index, frame.step, exc, exc_info=exc)
        message = f"stage {self._index}: {exc}"
        faults = tuple(Fault(row.sequence, self._index, code, message) for row in frame.rows)
        return frame.changed(rows=(), token_ids=(), tensors={}, faults=frame.faults + faults)

    def _passed_on(self, frame: Frame, output: StageOutput) -> StageResult:
        if not output.faults:
            # the last stage that computes the rows passes no tensors on: no stage would use them
            tensors = {} if frame.upto == self._index + 1 else dict(output.tensors)
            return StageResult(frame.carrying(tensors, frame.reports), output.logits, output.hidden)
        faults = tuple(msgspec.structs.replace(fault, stage=self._index) for fault in output.faults)
        poisoned = {fault.sequence for fault in faults}
        keep = [row.sequence not in poisoned for row in frame.rows]
        logits, hidden = output.logits, output.hidden
        if logits is not None:
            logits = logits[_row_mask(frame.rows, keep, [row.num_logits for row in frame.rows])]
        if hidden is not None:
            hidden = hidden[_row_mask(frame.rows, keep, [row.num_hidden for row in frame.rows])]
        passed = _without(frame.changed(tensors=output.tensors, faults=frame.faults + faults), poisoned)
        return StageResult(passed, logits, hidden)


def _ends_after(copy: Copy, ops: Iterable[Op | UnknownOp]) -> bool:
    """Whether the source of a copy is removed by one of the ops after it, and not copied again before that."""
    for op in ops:
        if isinstance(op, Copy) and op.source == copy.source:
            return False
        if isinstance(op, Remove) and op.sequence == copy.source:
            return True
    return False


def _joined(outputs: list[StageOutput]) -> StageOutput:
    """The results of groups of rows as one result, in order."""
    names = outputs[0].tensors
    logits = [output.logits for output in outputs if output.logits is not None]
    hidden = [output.hidden for output in outputs if output.hidden is not None]
    return StageOutput(
        {name: Tensor.concatenate([output.tensors[name] for output in outputs]) for name in names},
        np.concatenate(logits) if logits else None,
        tuple(fault for output in outputs for fault in output.faults),
        np.concatenate(hidden) if hidden else None,
    )


def _without(frame: Frame, sequences: Collection[int]) -> Frame:
    """The frame without the rows of these sequences, and without their part of the tensors."""
    keep = [row.sequence not in sequences for row in frame.rows]
    if all(keep):
        return frame
    tokens = _row_mask(frame.rows, keep, [row.n for row in frame.rows])
    rows = tuple(row for row, kept in zip(frame.rows, keep, strict=True) if kept)
    return frame.changed(
        rows=rows,
        token_ids=tuple(np.asarray(frame.token_ids)[tokens].tolist()),
        tensors=_keep_tokens(frame.tensors, tokens) if rows else {},
    )


def _row_mask(rows: tuple[Row, ...], keep: list[bool], counts: list[int]) -> np.ndarray:
    """Boolean mask with counts[i] entries keep[i] for each row."""
    return np.repeat(np.asarray(keep, dtype=bool), counts) if rows else np.zeros(0, dtype=bool)


def _keep_tokens(tensors: Mapping[str, Tensor], tokens: np.ndarray) -> dict[str, Tensor]:
    """The tensors without the tokens of faulted rows; the first axis is the token axis."""
    kept: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        item = ITEM_BYTES[tensor.dtype]
        array = np.frombuffer(tensor.data, dtype=np.uint8).reshape(tensor.shape[0], -1, item)[tokens]
        kept[name] = Tensor(tensor.dtype, (array.shape[0], *tensor.shape[1:]), array.tobytes())
    return kept
