"""The StageEngine of llama.cpp: rows in, activations or logits out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import msgspec
import numpy as np

from exo_mesh.domain.frame import HIDDEN, Fault, Row
from exo_mesh.engine.contract import (
    ANY_POSITION,
    CUT_POSITIONS,
    UNKNOWN_STAGE,
    Capabilities,
    KvKind,
    LoadProgress,
    LoadRequest,
    SavedSequence,
    StageInput,
    StageOutput,
    TensorSpec,
    copy_defect,
    row_defect,
)
from exo_mesh.engine.warm_up import run_first_passes
from exo_mesh.errors import EngineError
from exo_mesh_llamacpp import saving, wire
from exo_mesh_llamacpp.context import LlamaContext
from exo_mesh_llamacpp.loading import LoadedStage, load_stage
from exo_mesh_llamacpp.passes import RowPart, logit_places, passes, pieces_of, state_places, taken_places, together
from exo_mesh_llamacpp.shared.pool import Held

LoadStage = Callable[[LoadRequest, LoadProgress], LoadedStage]

_NONE = np.empty(0, np.int64)
_NO_STATES = np.empty((0, 0), np.float32)


class _FrameWork(msgspec.Struct):
    """The rows of a frame that can be computed, the faults of the others, and the results. places, taken, at_states:
    see logit_places, taken_places and state_places. states: the final hidden states that are wanted. shape: of `out`,
    which is None until something is put there."""

    places: np.ndarray
    taken: np.ndarray
    at_states: np.ndarray
    states: np.ndarray
    shape: tuple[int, int]
    out: np.ndarray | None = None
    rows: list[tuple[Row, Held, int]] = msgspec.field(default_factory=list)
    faults: dict[int, Fault] = msgspec.field(default_factory=dict)

    def fault(self, sequence: int, message: str) -> None:
        self.faults.setdefault(sequence, Fault(sequence, UNKNOWN_STAGE, "bad_row", message))

    def put(self, targets: np.ndarray, result: np.ndarray) -> None:
        """Put rows of results, valid until the library's next call, at their places in `out`."""
        if self.out is None and len(result) == self.shape[0] and (targets[1:] == targets[:-1] + 1).all():
            self.out = result.copy()  # a pass with all of them, as of most decode steps
            return
        if self.out is None:
            self.out = np.zeros(self.shape, np.float32)
        self.out[targets] = result


class LlamaCppStage:
    """A stage that computes with llama.cpp."""

    capabilities = Capabilities(ragged=True, rollback=ANY_POSITION, dtypes=wire.ACTIVATION_DTYPES)

    def __init__(self, load: LoadStage = load_stage) -> None:
        """load: makes the parts of a stage from a request."""
        self._load = load
        self._stage: LoadedStage | None = None

    def load(self, request: LoadRequest, progress: LoadProgress) -> None:
        self._stage = stage = self._load(request, progress)
        stage.pools.prepare()
        self.capabilities = _capabilities(stage)

    def warm_up(self, context_limit: int) -> None:
        run_first_passes(self, context_limit, on_gpu=self._loaded().on_gpu)

    def insert(self, sequence: int, max_tokens: int) -> None:
        self._loaded().pools.held.setdefault(sequence, Held(max_tokens))

    def forward(self, stage_input: StageInput) -> StageOutput:
        stage = self._loaded()
        rows, token_ids = stage_input.rows, stage_input.token_ids
        width = stage.hidden_size
        hidden = None
        if rows and not stage.shard.is_first:
            hidden = wire.received(stage_input.tensors, len(token_ids), width)
        places = logit_places(rows)
        out_width = stage.vocab_size if stage.shard.is_last else width
        num_out = int(places.max(initial=-1)) + 1 if stage.shard.is_last else len(token_ids)
        work = _FrameWork(places, places, _NONE, _NO_STATES, (num_out, out_width))
        if any(row.num_hidden for row in rows):
            work.taken, work.at_states = taken_places(rows), state_places(rows)
            if stage.shard.is_last:
                work.states = np.zeros((int(work.at_states.max(initial=-1)) + 1, width), np.float32)
        for wave in self._waves(stage, rows, token_ids, work):
            self._compute(stage, wave, token_ids, hidden, work)
        faults, states = tuple(work.faults.values()), work.states
        out = np.zeros(work.shape, np.float32) if work.out is None else work.out
        if stage.shard.is_last:
            return StageOutput(logits=out, faults=faults, hidden=states if len(states) else None)
        tensors = {HIDDEN: wire.to_tensor(out, stage.output_dtype)} if rows else {}
        return StageOutput(tensors=tensors, faults=faults)

    def remove(self, sequence: int) -> None:
        if self._stage:
            self._stage.pools.release(sequence)

    def sequences(self) -> Sequence[int]:
        return list(self._stage.pools.held) if self._stage else []

    def memory_bytes(self) -> int:
        stage = self._stage
        if stage is None:
            return 0
        held = list(stage.pools.held.values())  # a copy: heartbeats read this while a frame may insert or remove
        kv = stage.pools.num_cells * stage.cell_bytes + sum(one.place is not None for one in held) * stage.fixed_bytes
        kv += sum(part.nbytes for one in held for part in list(one.pasts.values()))
        return stage.model.num_bytes + (stage.embedding.num_bytes if stage.embedding else 0) + kv

    def close(self) -> None:
        if self._stage:
            self._stage.pools.close()
            self._stage.model.free()
        self._stage = None

    def save(self, sequence: int) -> SavedSequence:
        """See SequenceSaver."""
        stage = self._loaded()
        held = stage.pools.held.get(sequence)
        if held is None:
            raise EngineError(f"sequence {sequence} is not known here")
        if not held.length or held.place is None:
            return SavedSequence(0, {})
        pool, slot = held.place
        return saving.packed(pool.context.save(slot), held.length, stage.identity)

    def restore(self, sequence: int, max_tokens: int, saved: SavedSequence) -> None:
        """See SequenceSaver."""
        stage = self._loaded()
        if not 0 <= saved.length <= max_tokens:
            raise EngineError(f"{saved.length} saved positions do not fit a sequence of at most {max_tokens}")
        if not saved.length:
            if saved.tensors:
                raise EngineError(f"a saved sequence of no positions has {len(saved.tensors)} tensors")
            stage.pools.release(sequence)
            self.insert(sequence, max_tokens)
            return
        self._begin(stage, sequence, max_tokens, saved.length, saving.unpacked(saved, stage.identity))

    def copy(self, source: int, sequence: int, upto: int, max_tokens: int) -> None:
        """See SequenceCopier."""
        stage = self._loaded()
        held = stage.pools.held.get(source)
        defect = _copy_defect(stage, source, held, upto, max_tokens)
        if defect or held is None:
            raise EngineError(defect)
        if not upto or held.place is None:
            stage.pools.release(sequence)
            self.insert(sequence, max_tokens)
            return
        if stage.pools.sharing and upto >= stage.pools.sharing.least:
            new = Held(max_tokens)
            stage.pools.share(held, new, upto)
            stage.pools.release(sequence)
            stage.pools.held[sequence] = new
            return
        pool, slot = held.place
        self._begin(stage, sequence, max_tokens, held.length, pool.context.save(slot), upto)

    def move(self, source: int, sequence: int, upto: int, max_tokens: int) -> None:
        """See SequenceMover."""
        stage = self._loaded()
        held = stage.pools.held.get(source)
        defect = _copy_defect(stage, source, held, upto, max_tokens)
        if defect or held is None:
            raise EngineError(defect)
        if held.place and upto < held.length:
            pool, slot = held.place
            if not pool.cut(slot, upto):
                raise EngineError(f"this model's state cannot go back from position {held.length} to {upto}")
        held.length, held.max_tokens = upto, max_tokens
        held.pasts.clear()
        del stage.pools.held[source]
        stage.pools.release(sequence)
        stage.pools.held[sequence] = held

    def _begin(
        self,
        stage: LoadedStage,
        sequence: int,
        max_tokens: int,
        length: int,
        state: np.ndarray,
        upto: int | None = None,
    ) -> None:
        """Begin or replace a sequence with the first `upto` positions of a state. Changes nothing if that fails."""
        new = Held(max_tokens)
        key = min((*stage.pools.held, 0)) - 1  # a place of its own until it is whole
        stage.pools.held[key] = new
        try:
            pool, slot = stage.pools.reserve(new, length)
            if not pool.context.restore(slot, state) or pool.context.length(slot) != length:
                raise EngineError("llama.cpp refuses the saved state")
            new.length = length
            if upto is not None and upto < length:
                if not pool.context.cut(slot, upto):
                    raise EngineError(f"this model's state cannot go back from position {length} to {upto}")
                new.length = upto
            new.floor = new.settled = new.length
        except EngineError:
            stage.pools.release(key)
            raise
        stage.pools.release(sequence)
        stage.pools.held[sequence] = stage.pools.held.pop(key)

    def _loaded(self) -> LoadedStage:
        if self._stage is None:
            raise EngineError("the stage is not loaded")
        return self._stage

    def _waves(
        self, stage: LoadedStage, rows: Sequence[Row], token_ids: Sequence[int], work: _FrameWork
    ) -> Iterator[list[tuple[Row, Held, int]]]:
        """The rows that can be computed, with their first token's index; a wave has each sequence once at most.

        Cuts sequences back to where their rows begin, and makes room. The other rows become faults.
        """
        wave: dict[int, tuple[Row, Held, int]] = {}
        source = 0
        for row in rows:
            if row.sequence in wave:
                yield list(wave.values())
                wave = {}
            held = stage.pools.held.get(row.sequence)
            tokens = token_ids[source : source + row.n]
            if row.sequence in work.faults:
                defect: str | None = "poisoned earlier in this frame"
            else:
                defect = row_defect(row, None if held is None else held.length, 0 if held is None else held.max_tokens)
            if not defect and not 0 <= min(tokens) <= max(tokens) < stage.vocab_size:
                defect = f"a token id is outside 0..{stage.vocab_size - 1}"
            if not defect and held is not None:
                defect = _make_ready(stage, held, row)
            if defect or held is None:
                work.fault(row.sequence, defect or "")
            else:
                wave[row.sequence] = (row, held, source)
            source += row.n
        if wave:
            yield list(wave.values())

    def _compute(
        self,
        stage: LoadedStage,
        wave: Sequence[tuple[Row, Held, int]],
        token_ids: Sequence[int],
        hidden: np.ndarray | None,
        work: _FrameWork,
    ) -> None:
        """Compute rows, and put their results into `work`."""
        is_last = stage.shard.is_last
        for members in together(wave):
            stage.pools.gather(members)
        pieces = pieces_of(wave, work.taken)
        for context, group in passes(pieces):
            tokens = [token for piece in group for token in range(piece.source, piece.source + piece.n)]
            index, count = np.array(tokens), len(tokens)
            if hidden is not None:
                context.hidden[:count] = hidden[index]
            else:
                assert stage.embedding is not None
                context.hidden[:count] = stage.embedding.rows([token_ids[token] for token in tokens])
            _place(context, group)
            wants_states = is_last and group[0].row.num_hidden > 0
            places = work.places[index]
            if is_last:
                context.wanted[:count] = places >= 0
            result = context.decode_states(count) if wants_states else context.decode(count)
            if result is None:
                for piece in group:
                    work.fault(piece.row.sequence, f"no room for position {piece.pos0 + piece.n - 1}")
                continue
            if wants_states:
                chosen = work.at_states[index] >= 0
                work.states[work.at_states[index[chosen]]] = result[chosen]
                continue
            work.put(places[places >= 0] if is_last else index, result)


def _capabilities(stage: LoadedStage) -> Capabilities:
    spec = (TensorSpec(HIDDEN, stage.output_dtype, (stage.hidden_size,)),)
    kinds: tuple[KvKind, ...] = ("full",)
    kinds += ("window",) if stage.windowed else ()
    kinds += ("recurrent",) if stage.recurrent else ()
    return Capabilities(
        ragged=True,
        rollback=_rollback(stage),
        dtypes=wire.ACTIVATION_DTYPES,
        kv=kinds,
        inputs=() if stage.shard.is_first else spec,
        outputs=() if stage.shard.is_last else spec,
        shares_from=stage.pools.sharing.least if stage.pools.sharing else 0,
        cuts_at_rows=stage.recurrent,
    )


def _rollback(stage: LoadedStage) -> int:
    if stage.recurrent and not stage.model.library.saves_parts:
        return 0
    if stage.windowed:  # protected are the positions before a row, of the row itself those that windows see
        return min(CUT_POSITIONS, stage.window)
    return CUT_POSITIONS if stage.recurrent else ANY_POSITION


def _copy_defect(stage: LoadedStage, source: int, held: Held | None, upto: int, max_tokens: int) -> str | None:
    """Why a copy cannot be made; None if it can."""
    defect = copy_defect(source, None if held is None else held.length, upto, max_tokens)
    if not defect and held and stage.windowed and 0 < upto < held.length:
        # the library would cut a saved state, but the state lacks the positions of the window before `upto`
        defect = f"this model's state cannot go back from position {held.length} to {upto}"
    return defect


def _make_ready(stage: LoadedStage, held: Held, row: Row) -> str | None:
    """Bring a sequence to the position where its row begins, with room for the row; returns why that is impossible."""
    if held.place and held.length > row.pos0:
        if not _go_back(stage, held, row.pos0):
            return f"this model's state cannot go back from position {held.length} to {row.pos0}"
        held.length = row.pos0
    least = row.pos0 - CUT_POSITIONS
    held.settled = max(held.settled, least) if row.drafted else row.pos0
    try:
        pool, slot = stage.pools.reserve(held, row.pos0 + row.n)
    except EngineError as exc:
        return str(exc)
    guarded = row.pos0 if row.drafted or row.may_be_refused else 0
    if stage.windowed and guarded != held.guarded:
        pool.context.protect(slot, guarded)
        held.guarded = guarded
    if stage.recurrent and stage.model.library.saves_parts:
        kept = {length: part for length, part in held.pasts.items() if row.drafted and least <= length < row.pos0}
        if row.may_be_refused and row.pos0:
            kept[row.pos0] = pool.context.save_part(slot)
        held.pasts = kept
    held.length = row.pos0 + row.n
    return None


def _go_back(stage: LoadedStage, held: Held, length: int) -> bool:
    """Cut a sequence back to fewer positions; returns whether that is possible."""
    assert held.place is not None, "a sequence with positions has a place"
    pool, slot = held.place
    if not length:
        held.floor = 0
        return pool.cut(slot, 0)
    if not stage.recurrent:
        return (length >= held.floor or not stage.windowed) and pool.cut(slot, length)
    part = held.pasts.get(length)
    return part is not None and pool.context.return_to(slot, part, length)


def _place(context: LlamaContext, group: Sequence[RowPart]) -> None:
    """Fill the positions and sequences of a batch."""
    begin = 0
    for piece in group:
        end = begin + piece.n
        context.positions[begin:end] = piece.pos0 if piece.n == 1 else np.arange(piece.pos0, piece.pos0 + piece.n)
        context.sequences[begin:end] = piece.slot
        begin = end
