"""The NumPy StageEngine: rows in, activations or logits out, KV per sequence. Everything runs on the calling thread."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

import msgspec
import numpy as np

from exo_mesh.domain.frame import HIDDEN, Fault, Row
from exo_mesh.domain.shard import Shard
from exo_mesh.domain.tensor import Tensor
from exo_mesh.engine.contract import (
    ANY_POSITION,
    UNKNOWN_STAGE,
    Capabilities,
    LoadProgress,
    LoadRequest,
    SavedSequence,
    StageInput,
    StageOutput,
    TensorSpec,
    copy_defect,
    row_defect,
)
from exo_mesh.engine.free_cores import ThreadsByLoad
from exo_mesh.engine.warm_up import run_first_passes
from exo_mesh.errors import EngineError, InputError, MeshError
from exo_mesh_numpy import saving, wire
from exo_mesh_numpy.decoder import Decoder, RowPiece
from exo_mesh_numpy.kernels import check_tiles
from exo_mesh_numpy.kv import KEY_BLOCK, LEAST_SHARED, Assembly, SequenceKv
from exo_mesh_numpy.model_config import ModelConfig
from exo_mesh_numpy.options import parse_options
from exo_mesh_numpy.survey import open_model
from exo_mesh_numpy.threads import threads_by_load
from exo_mesh_numpy.weights import StageWeights, load_weights


class _Loaded(msgspec.Struct, frozen=True):
    """The parts of a loaded stage. output_dtype: dtype of the activations that it passes on."""

    shard: Shard
    config: ModelConfig
    weights: StageWeights
    decoder: Decoder
    output_dtype: str
    assembly: Assembly

    def new_kv(self, max_tokens: int) -> SequenceKv:
        config = self.config
        return SequenceKv(len(self.shard), config.num_kv_heads, config.head_dim, max_tokens, self.assembly)


class _Work(msgspec.Struct):
    """A frame split into the rows that can be computed, and the faults of the others."""

    pieces: list[RowPiece] = msgspec.field(default_factory=list)
    faults: dict[int, Fault] = msgspec.field(default_factory=dict)


class NumpyStage:
    """A stage that computes with NumPy. Rows of any lengths may share a forward, and share its products."""

    capabilities = Capabilities(ragged=True, rollback=ANY_POSITION, dtypes=wire.ACTIVATION_DTYPES)

    def __init__(self) -> None:
        self._stage: _Loaded | None = None
        self._sequences: dict[int, SequenceKv] = {}
        self._threads: ThreadsByLoad | None = None

    def load(self, request: LoadRequest, progress: LoadProgress) -> None:
        options = parse_options(request.options)
        self._threads = threads_by_load(options.threads)
        dtype = request.activation_dtype or "float32"
        if dtype not in wire.ACTIVATION_DTYPES:
            known = ", ".join(wire.ACTIVATION_DTYPES)
            raise InputError(
                f"the numpy engine cannot pass on {json.dumps(dtype)}; it can pass on {known}", param="activation_dtype"
            )
        config, checkpoint = open_model(request.model_dir)
        shard = request.shard
        if config.num_layers != shard.num_layers:
            raise EngineError(f"{shard} does not fit: {request.model_dir} has {config.num_layers} layers")
        if options.mode == "deterministic":
            query = config.num_heads * config.head_dim
            check_tiles({config.hidden_size, config.intermediate_size, query}, config.head_dim, KEY_BLOCK)
        weights = load_weights(checkpoint, config, shard, progress)
        adapt = self._threads.adapt if self._threads is not None else lambda: None
        decoder = Decoder(config, weights, options.mode, adapt)
        self._stage = _Loaded(shard, config, weights, decoder, dtype, Assembly())
        spec = (TensorSpec(HIDDEN, dtype, (config.hidden_size,)),)
        self.capabilities = Capabilities(
            ragged=True,
            rollback=ANY_POSITION,
            dtypes=wire.ACTIVATION_DTYPES,
            inputs=() if shard.is_first else spec,
            outputs=() if shard.is_last else spec,
            row_exact=decoder.kernels.row_exact,
            shares_from=LEAST_SHARED,
        )

    @property
    def weights(self) -> StageWeights:
        """The weights of a loaded stage. Raises EngineError if it is not loaded."""
        return self._loaded().weights

    def warm_up(self, context_limit: int) -> None:
        run_first_passes(self, context_limit, on_gpu=False)

    def insert(self, sequence: int, max_tokens: int) -> None:
        if sequence not in self._sequences:
            self._sequences[sequence] = self._loaded().new_kv(max_tokens)

    def forward(self, stage_input: StageInput) -> StageOutput:
        stage = self._loaded()
        try:
            # exp(-x) of the gate overflows to the right limit; other values that are not finite show in the logits
            with np.errstate(over="ignore", invalid="ignore"):
                return self._compute(stage, stage_input)
        except MeshError:
            raise
        except (MemoryError, ArithmeticError, ValueError) as exc:
            raise EngineError(f"numpy failed in a forward of {len(stage_input.rows)} rows: {exc}") from exc

    def remove(self, sequence: int) -> None:
        if (kv := self._sequences.pop(sequence, None)) is not None:
            kv.release()

    def sequences(self) -> Sequence[int]:
        return list(self._sequences)

    def memory_bytes(self) -> int:
        # a copy: heartbeats read this while a frame may insert or remove
        sequences = list(self._sequences.values())
        held = sum(kv.num_bytes for kv in sequences)
        held += sum({part.serial: part.num_bytes for kv in sequences for part in kv.parts}.values())
        return held + (self._stage.weights.num_bytes if self._stage else 0)

    def close(self) -> None:
        self._sequences.clear()
        self._stage = None
        if self._threads is not None:
            self._threads.close()

    def save(self, sequence: int) -> SavedSequence:
        """See SequenceSaver. Tensors "keys" and "values", float32 `[layers, kv_heads, length, head_dim]`."""
        kv = self._sequences.get(sequence)
        if kv is None:
            raise EngineError(f"sequence {sequence} is not known here")
        return saving.save(kv)

    def restore(self, sequence: int, max_tokens: int, saved: SavedSequence) -> None:
        """See SequenceSaver."""
        kv = self._loaded().new_kv(max_tokens)
        saving.restore(kv, saved)
        self.remove(sequence)
        self._sequences[sequence] = kv

    def copy(self, source: int, sequence: int, upto: int, max_tokens: int) -> None:
        """See SequenceCopier."""
        held = self._sequences.get(source)
        defect = copy_defect(source, None if held is None else held.length, upto, max_tokens)
        if defect or held is None:
            raise EngineError(defect)
        kv = self._loaded().new_kv(max_tokens)
        kv.take(held, upto)
        self.remove(sequence)
        self._sequences[sequence] = kv

    def move(self, source: int, sequence: int, upto: int, max_tokens: int) -> None:
        """See SequenceMover."""
        held = self._sequences.get(source)
        defect = copy_defect(source, None if held is None else held.length, upto, max_tokens)
        if defect or held is None:
            raise EngineError(defect)
        self.remove(sequence)
        held.length, held.max_tokens = upto, max_tokens
        self._sequences[sequence] = self._sequences.pop(source)

    def _loaded(self) -> _Loaded:
        if self._stage is None:
            raise EngineError("the stage is not loaded")
        return self._stage

    def _compute(self, stage: _Loaded, stage_input: StageInput) -> StageOutput:
        rows, token_ids = stage_input.rows, stage_input.token_ids
        shard, width = stage.shard, stage.config.hidden_size
        tensor = None
        if rows and not shard.is_first:
            tensor = wire.received(stage_input.tensors, len(token_ids), width)
        work = self._take_apart(stage, rows, token_ids)
        places = _places(rows, [row.num_logits for row in rows])
        state_places = _places(rows, [row.num_hidden for row in rows])
        states = np.zeros((int(state_places.max(initial=-1)) + 1, width), np.float32)
        logits = np.zeros((int(places.max(initial=-1)) + 1, stage.config.vocab_size), np.float32)
        handed_on = None if shard.is_last else np.zeros((len(token_ids), width), np.float32)
        for pieces in _passes(work.pieces, stage.decoder.kernels.max_tokens):
            source = np.concatenate([np.arange(piece.source, piece.source + piece.n) for piece in pieces])
            hidden = stage.decoder.buffer(len(source))
            self._fill(stage, hidden, pieces, token_ids, tensor)
            stage.decoder.run(hidden, pieces)
            if handed_on is not None:
                handed_on[source] = hidden[: len(source)]
                continue
            if len(wanted := np.flatnonzero(places[source] >= 0)):
                logits[places[source[wanted]]] = stage.decoder.logits(hidden, wanted)
            if len(wanted := np.flatnonzero(state_places[source] >= 0)):
                states[state_places[source[wanted]]] = stage.decoder.final_states(hidden, wanted)
        faults = tuple(work.faults.values())
        if handed_on is None:
            return StageOutput(logits=logits, faults=faults, hidden=states if len(states) else None)
        tensors = {HIDDEN: wire.to_tensor(handed_on, stage.output_dtype)} if rows else {}
        return StageOutput(tensors=tensors, faults=faults)

    def _take_apart(self, stage: _Loaded, rows: Sequence[Row], token_ids: Sequence[int]) -> _Work:
        """Set the KV length of each row's sequence to the end of the row, with room for it; rows that cannot be
        computed become faults."""
        work = _Work()
        source = 0
        for row in rows:
            tokens = token_ids[source : source + row.n]
            kv = self._sequences.get(row.sequence)
            defect = row_defect(row, None if kv is None else kv.length, 0 if kv is None else kv.max_tokens)
            if row.sequence in work.faults:
                defect = "poisoned earlier in this frame"
            elif not defect and not 0 <= min(tokens) <= max(tokens) < stage.config.vocab_size:
                defect = f"a token id is outside 0..{stage.config.vocab_size - 1}"
            if defect or kv is None:
                work.faults.setdefault(row.sequence, Fault(row.sequence, UNKNOWN_STAGE, "bad_row", defect or ""))
            else:
                kv.begin_row(row.pos0, row.n)
                work.pieces.append(RowPiece(kv, row.pos0, row.n, source))
            source += row.n
        return work

    def _fill(
        self,
        stage: _Loaded,
        hidden: np.ndarray,
        pieces: Sequence[RowPiece],
        token_ids: Sequence[int],
        tensor: Tensor | None,
    ) -> None:
        """Write the input of the first layer for each token of the pieces."""
        begin = 0
        for piece in pieces:
            out = hidden[begin : begin + piece.n]
            if tensor is not None:
                wire.read_rows(tensor, piece.source, out)
            else:
                assert stage.weights.embedding is not None
                out[...] = stage.weights.embedding[list(token_ids[piece.source : piece.source + piece.n])]
            begin += piece.n
        hidden[begin:] = 0


def _places(rows: Sequence[Row], counts: Sequence[int]) -> np.ndarray:
    """For each token of the frame: its row among the results, or -1 if no result is wanted of it. counts[i]: how many
    of the last tokens of row i a result is wanted of."""
    wanted = [index >= row.n - count for row, count in zip(rows, counts, strict=True) for index in range(row.n)]
    flags = np.array(wanted, bool)
    return np.where(flags, np.cumsum(flags) - 1, -1)


def _passes(pieces: Sequence[RowPiece], max_tokens: int) -> Iterator[list[RowPiece]]:
    """The pieces in order, cut so that each pass has at most max_tokens tokens."""
    taken: list[RowPiece] = []
    room = max_tokens
    for piece in pieces:
        done = 0
        while done < piece.n:
            n = min(piece.n - done, room)
            taken.append(RowPiece(piece.kv, piece.pos0 + done, n, piece.source + done))
            done, room = done + n, room - n
            if not room:
                yield taken
                taken, room = [], max_tokens
    if taken:
        yield taken
