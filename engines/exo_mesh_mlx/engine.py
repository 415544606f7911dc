"""The MLX StageEngine: rows in, activations or logits out, a KV cache per sequence. Everything runs on the calling
thread."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import msgspec
import numpy as np
from mlx_lm.models.cache import make_prompt_cache
from msgspec.structs import replace

from exo_mesh.domain.frame import Fault, Row
from exo_mesh.domain.shard import Shard
from exo_mesh.engine.contract import (
    LEAST_SHARED,
    UNKNOWN_STAGE,
    Capabilities,
    GroupCheck,
    LibraryMemory,
    LoadProgress,
    LoadRequest,
    SavedSequence,
    StageInput,
    StageOutput,
    copy_defect,
    row_defect,
)
from exo_mesh.engine.warm_up import run_first_passes
from exo_mesh.errors import EngineError, MeshError, ModelError, RankLostError
from exo_mesh_mlx import packets, saving, wire
from exo_mesh_mlx.ahead import GuessedStep, LookAhead
from exo_mesh_mlx.arranging import BlockKeeper
from exo_mesh_mlx.batching import attends_in_blocks, attends_to_parts, find_mode, find_rollback
from exo_mesh_mlx.caches import CacheLayout, CacheRows, SequenceCache, arrays_of, plan_caches
from exo_mesh_mlx.canary import Canary
from exo_mesh_mlx.checkpoint import MlxCheckpoint, open_checkpoint
from exo_mesh_mlx.cuts import why_a_range_fails
from exo_mesh_mlx.divisibility import division_obstacle
from exo_mesh_mlx.ghost import MlxGhostStage, Packet
from exo_mesh_mlx.grouping import group_rows, waves
from exo_mesh_mlx.kv import kv_kinds
from exo_mesh_mlx.limits import keep_to
from exo_mesh_mlx.loading import build_model, build_stage, read_layers, trace_checkpoint
from exo_mesh_mlx.options import MlxOptions, parse_options
from exo_mesh_mlx.packets import Group, rearranged
from exo_mesh_mlx.ragged import RaggedMode
from exo_mesh_mlx.ranks import Ranks
from exo_mesh_mlx.sharding import RankShares, coarsest_dtype, share_out
from exo_mesh_mlx.shared.alone import LoneSequence
from exo_mesh_mlx.trace import MlxTrace
from exo_mesh_mlx.whole import WholeStage, whole_layout

WARM_UP_SEQUENCE = -1

_log = logging.getLogger(__name__)

Computed = list[tuple[Group, Packet | mx.array]]


class _MlxSequence(msgspec.Struct):
    cache: SequenceCache
    max_tokens: int


class MlxStage:
    """A stage that computes with MLX. Rows of equal length share a forward if the model's caches allow it, each with
    its own cache.

    As a rank of a tensor group it gets the same calls as the other ranks, and computes its share of each layer.
    """

    capabilities = Capabilities(ragged=True, rollback=0, dtypes=wire.ACTIVATION_DTYPES)

    def __init__(self) -> None:
        self._stage: MlxGhostStage | WholeStage | None = None
        self._model: Any = None
        self._layout = CacheLayout((), ())
        self._sequences: dict[int, _MlxSequence] = {}
        self._vocab_size = 0
        self._logits_width = 0
        self._activation_dtype = ""
        self._ragged: RaggedMode | None = None
        self.batched = False
        """Whether rows of equal length of several sequences are computed in one forward."""
        self._options = MlxOptions()
        self.keeper = BlockKeeper()
        self._lone = LoneSequence(lambda: (held.cache for held in self._sequences.values()))
        self._saved_form: saving.SavedForm = {}
        self.ahead = LookAhead(self._drop_guess)
        self._ranks: Ranks | None = None
        self._to_verify: tuple[MlxCheckpoint, MlxTrace | None, Shard, int] | None = None
        self.shares = RankShares()

    def load(self, request: LoadRequest, progress: LoadProgress) -> None:
        self._options = parse_options(request.options)
        keep_to(request.memory)
        shard = request.shard
        if request.activation_dtype not in ("", *wire.ACTIVATION_DTYPES):
            raise EngineError(
                f"activation_dtype {json.dumps(request.activation_dtype)} is not one of "
                f"{', '.join(wire.ACTIVATION_DTYPES)}"
            )
        if request.rank is not None:
            self._ranks = Ranks(request.rank)  # first, because the other ranks wait
        checkpoint = open_checkpoint(request.model_dir)
        trace = self._trace(checkpoint, shard)
        self._model = build_stage(checkpoint, trace, shard.start, shard.stop)
        if len(self._model.layers) != shard.num_layers:
            raise EngineError(f"{shard} does not fit: {request.model_dir} has {len(self._model.layers)} layers")
        if self._ranks is not None:
            if obstacle := division_obstacle(checkpoint.config, self._ranks.size):
                raise ModelError(f"{request.model_dir} cannot be split: {obstacle}")
            self.shares = share_out(self._model, self._ranks, shard.start, shard.stop)
            _log.info("rank %d of %d holds %s", self._ranks.rank, self._ranks.size, self.shares.describe())
        self._vocab_size = self._logits_width = checkpoint.vocab_size
        self._activation_dtype = request.activation_dtype
        full = make_prompt_cache(self._model)
        if trace is None:
            self._layout, self._stage = whole_layout(full), WholeStage(self._model)
        else:
            self._layout = plan_caches(trace, full, shard.start, shard.stop)
            self._stage = MlxGhostStage(self._model, trace, shard.start, shard.stop)
        read_layers(self._model, shard.start, shard.stop, progress, by_tensor=self._ranks is not None)
        self._to_verify = (checkpoint, trace, shard, request.context_limit)
        self._warm_up(shard, request.model_dir)

    def verify(self, chunk_tokens: int, progress: LoadProgress) -> GroupCheck:
        """See GroupMember."""
        if self._ranks is None or self._to_verify is None:
            raise EngineError("only a rank of a tensor group that has just been loaded can be checked")
        checkpoint, trace, shard, context_limit = self._to_verify
        self._to_verify = None
        if self._ragged is not None:
            self._ragged.switch(False)
        layers = (shard.start, shard.stop)
        canary = Canary(self._model, build_model(checkpoint), trace, self._ranks, layers)
        try:
            return canary.run(self._logits_width, context_limit, chunk_tokens, progress)
        except RuntimeError as exc:  # raised by MLX: a rank is gone
            raise self._failure("the check of the group", exc) from exc
        finally:
            if trace is not None:
                self._stage = MlxGhostStage(self._model, trace, *layers)
            mx.clear_cache()

    def agree(self, mine: bool) -> bool:
        """See RankAgreement."""
        if self._ranks is None:
            return mine
        try:
            return self._ranks.all_say(mine)
        except RuntimeError as exc:  # raised by MLX: a rank is gone
            raise self._failure("an agreement of the ranks", exc) from exc

    @property
    def all_reduce_s(self) -> float:
        """See GroupTimer."""
        return 0.0 if self._ranks is None else self._ranks.last_all_reduce_s

    def warm_up(self, context_limit: int) -> None:
        run_first_passes(self, context_limit, on_gpu=mx.default_device() != mx.cpu)

    def insert(self, sequence: int, max_tokens: int) -> None:
        if sequence not in self._sequences:
            self._sequences[sequence] = _MlxSequence(self._new_cache(), max_tokens)

    def forward(self, stage_input: StageInput) -> StageOutput:
        stage = self._loaded()
        if not stage_input.rows:
            return StageOutput(logits=None if stage.outputs else np.zeros((0, self._logits_width), np.float32))
        try:
            logits = self.ahead.take(stage_input.rows, stage_input.token_ids)
            if logits is not None:
                return self._decoded(stage_input.rows, logits)
            faults: dict[int, Fault] = {}
            computed: Computed = []
            for wave in waves(stage_input.rows):
                computed += self._compute(stage_input, wave, faults)
            if self._can_guess(stage_input.rows, computed):
                return self._decoded(stage_input.rows, self._wanted_logits(stage_input.rows, computed)[0])
            return self._output(stage_input.rows, computed, tuple(faults.values()))
        except MeshError:
            raise
        except Exception as exc:  # model code and mlx may raise anything
            self.batched = False  # in case this model code fails with several rows at once, never batch again
            raise self._failure(f"a forward of {len(stage_input.rows)} rows", exc) from exc

    def remove(self, sequence: int) -> None:
        self.ahead.drop()
        if held := self._sequences.pop(sequence, None):
            held.cache.release()
            self._lone.check_parts()

    def sequences(self) -> Sequence[int]:
        return list(self._sequences)

    def save(self, sequence: int) -> SavedSequence:
        return saving.save(self._saved_cache(sequence))

    def save_parts(self, sequence: int) -> Iterator[SavedSequence]:
        """See PartSaver. One part for each array."""
        yield from saving.save_parts(self._saved_cache(sequence))

    def _saved_cache(self, sequence: int) -> SequenceCache:
        self.ahead.drop()
        held = self._sequences.get(sequence)
        if held is None:
            raise EngineError(f"sequence {sequence} is not known here, so it cannot be saved")
        return held.cache

    def restore(self, sequence: int, max_tokens: int, saved: SavedSequence) -> None:
        self.ahead.drop()
        if saved.length > max_tokens:
            raise EngineError(f"{saved.length} saved positions do not fit in room for {max_tokens}")
        self._hold(sequence, saving.restore(self._new_cache(), saved, self._saved_form), max_tokens)

    def copy(self, source: int, sequence: int, upto: int, max_tokens: int) -> None:
        """See SequenceCopier. A long common beginning is shared; other arrays are until one of the two changes them."""
        self._copy(source, sequence, upto, max_tokens, share=bool(self.capabilities.shares_from) and self.batched)

    def _copy(self, source: int, sequence: int, upto: int, max_tokens: int, *, share: bool) -> None:
        self.ahead.drop()
        held = self._sequences.get(source)
        defect = copy_defect(source, None if held is None else held.cache.length, upto, max_tokens)
        if defect or held is None:
            raise EngineError(defect)
        if share:
            held.cache.part_off(upto)
        cache = held.cache.copied() if upto else self._new_cache()
        if not cache.cut_back(upto):
            raise EngineError(f"this KV cache cannot be cut back from {cache.length} to {upto} positions")
        self._hold(sequence, cache, max_tokens)

    def _hold(self, sequence: int, cache: SequenceCache, max_tokens: int) -> None:
        """Keep a sequence, in place of its previous state."""
        if held := self._sequences.get(sequence):
            held.cache.release()
        self._sequences[sequence] = _MlxSequence(cache, max_tokens)

    def move(self, source: int, sequence: int, upto: int, max_tokens: int) -> None:
        """See SequenceMover. A copy takes no memory as long as it is not written to beside its source."""
        self._copy(source, sequence, upto, max_tokens, share=False)
        self.remove(source)

    def keep(self, sequence: int) -> None:
        """See SequenceKeeper."""
        if held := self._sequences.get(sequence):
            held.cache.settle()

    def memory_bytes(self) -> int:
        return int(mx.get_active_memory())

    def library_memory(self) -> LibraryMemory:
        """See MemoryTeller."""
        figures = mx.get_active_memory(), mx.get_cache_memory(), mx.get_peak_memory(), mx.get_memory_limit()
        return LibraryMemory("mlx", *map(int, figures))

    def close(self) -> None:
        self.ahead.drop()
        for held in self._sequences.values():
            held.cache.release()
        self._sequences.clear()
        if self._stage is not None:
            self._stage.close()
        self._stage = self._model = self._ragged = None
        mx.clear_cache()

    def _failure(self, what: str, exc: Exception) -> EngineError:
        """The error for an exception of model code or mlx; messages of collectives begin with the name of their
        backend."""
        if self._ranks is not None and str(exc).startswith(("[ring]", "[jaccl]")):
            return RankLostError(f"rank {self._ranks.rank} lost another rank in {what}: {exc}")
        return EngineError(f"mlx failed in {what}: {exc}")

    def _trace(self, checkpoint: MlxCheckpoint, shard: Shard) -> MlxTrace | None:
        """The trace of a model, by which it is cut; None for a model that cannot be cut and need not be."""
        try:
            return trace_checkpoint(checkpoint)
        except ModelError:
            if shard.is_first and shard.is_last:
                return None
            raise

    def _loaded(self) -> MlxGhostStage | WholeStage:
        if self._stage is None:
            raise EngineError("the stage is not loaded")
        return self._stage

    def _new_cache(self) -> SequenceCache:
        self._loaded()
        return SequenceCache(make_prompt_cache(self._model), self._layout)

    def _prepare(self, row: Row, tokens: Sequence[int]) -> str | None:
        """Bring the KV of the row's sequence to pos0; returns the reason if that cannot be done, or None."""
        held = self._sequences.get(row.sequence)
        defect = row_defect(row, None if held is None else held.cache.length, 0 if held is None else held.max_tokens)
        if defect or held is None:
            return defect
        if self._vocab_size and not 0 <= min(tokens) <= max(tokens) < self._vocab_size:
            return f"a token id is outside 0..{self._vocab_size - 1}"
        if row.pos0 == 0 and held.cache.length:
            held.cache.release()
            held.cache = self._new_cache()
        elif not held.cache.cut_back(row.pos0):
            return f"this KV cache cannot be cut back from {held.cache.length} to {row.pos0} positions"
        held.cache.pasts.expect(row.pos0, drafted=row.drafted, may_be_refused=row.may_be_refused)
        return None

    def _compute(self, stage_input: StageInput, wave: Sequence[int], faults: dict[int, Fault]) -> Computed:
        """Compute, lazily, the rows at the indexes in `wave`, of different sequences. Adds to `faults`."""
        stage, rows, sizes = self._loaded(), stage_input.rows, [row.n for row in stage_input.rows]
        tokens: dict[int, Sequence[int]] = {}
        for index in wave:
            row, begin = rows[index], sum(sizes[:index])
            tokens[index] = stage_input.token_ids[begin : begin + row.n]
            defect = None if row.sequence in faults else self._prepare(row, tokens[index])
            if defect:
                faults[row.sequence] = Fault(row.sequence, UNKNOWN_STAGE, "bad_row", defect)
        apart = [index for index in wave if rows[index].num_hidden]
        groups = group_rows(rows, [index for index in wave if not rows[index].num_hidden], faults, self.batched)
        groups += group_rows(rows, apart, faults, self.batched)
        received = packets.unpack(stage.inputs, stage_input.tensors, groups, sizes)
        computed: Computed = []
        for group, packet in zip(groups, received, strict=True):
            caches = self._together([self._sequences[rows[index].sequence].cache for index in group.rows])
            ids = mx.array([tokens[index] for index in group.rows], mx.int32)
            computed.append((group, self._result(ids, caches, packet, [rows[index] for index in group.rows])))
            caches.advance(group.n)
        return computed

    def _result(self, ids: mx.array, caches: CacheRows, packet: Packet, rows: Sequence[Row]) -> mx.array | Packet:
        """What one group of rows wants, lazily: either no row wants hidden states, or all of them do."""
        stage = self._loaded()
        ids, packet = caches.arranged(ids), rearranged(packet, caches.arranged)
        if stage.outputs or not rows[0].num_hidden:
            made = stage.forward(ids, caches.full(rows[0].n), packet, max(row.num_logits for row in rows))
            return caches.restored(made) if isinstance(made, mx.array) else rearranged(made, caches.restored)
        states = stage.final_states(ids, caches.full(rows[0].n), packet)
        if states is None:
            raise EngineError("mlx-lm's code of this model does not give hidden states")
        return caches.restored(states)

    def _together(self, caches: Sequence[SequenceCache]) -> CacheRows:
        """The caches of the rows of one forward; also prepares the model for that number of rows."""
        if self._ragged is None:
            return CacheRows(caches)
        self._lone.note(caches)
        self._ragged.switch(len(caches) > 1 or (caches[0].shared > 0 and self.batched))
        return CacheRows(caches, self._ragged.offsets_as, self.keeper.arrange(caches), in_place=self.batched)

    def _output(self, rows: Sequence[Row], computed: Computed, faults: tuple[Fault, ...]) -> StageOutput:
        """Evaluate results and the caches of all rows at once, and copy the results out."""
        stage = self._loaded()
        states = self._states([rows[index] for group, _ in computed for index in group.rows])
        if stage.outputs:
            made = [(group, result) for group, result in computed if not isinstance(result, mx.array)]
            packed = packets.pack(stage.outputs, made, [row.n for row in rows], self._activation_dtype)
            self._evaluate(list(packed.values()), states, rows)
            return StageOutput(tensors=packets.to_tensors(packed), faults=faults)
        if any(row.num_hidden for row in rows):
            return self._with_states(rows, computed, states, faults)
        wanted = self._wanted_logits(rows, computed)
        self._evaluate(wanted, states, rows)
        copies = [np.array(array) for array in wanted]
        return StageOutput(logits=copies[0] if len(copies) == 1 else np.concatenate(copies), faults=faults)

    def _with_states(
        self, rows: Sequence[Row], computed: Computed, caches: list[mx.array], faults: tuple[Fault, ...]
    ) -> StageOutput:
        """Evaluate a frame in which some rows want final hidden states; zeros for a row that was not computed."""
        found: dict[int, mx.array] = {}
        for group, result in computed:
            for place, index in enumerate(group.rows):
                if (count := rows[index].num_hidden) and isinstance(result, mx.array):
                    found[index] = result[place, -count:].astype(mx.float32)
        logits = mx.concatenate(self._wanted_logits(rows, computed))
        self._evaluate(list(found.values()) or [logits], caches, rows)
        mx.eval(logits)
        width = next((states.shape[1] for states in found.values()), 1)
        missing = np.zeros((0, width), np.float32)
        parts = [
            np.array(found[index]) if index in found else np.resize(missing, (row.num_hidden, width))
            for index, row in enumerate(rows)
        ]
        return StageOutput(logits=np.array(logits), faults=faults, hidden=np.concatenate(parts))

    def _can_guess(self, rows: Sequence[Row], computed: Computed) -> bool:
        """Whether this step may be followed by a step that is computed ahead: the stage is the whole model, and one
        sequence decodes one token. With several, others come and go, and each wasted step delays all of them."""
        return (
            self.capabilities.cuts_anywhere
            and self._ranks is None
            and len(rows) == len(computed) == 1
            and rows[0].n == rows[0].num_logits == 1
            and not (self._loaded().inputs or self._loaded().outputs)
        )

    def _decoded(self, rows: Sequence[Row], logits: mx.array) -> StageOutput:
        """Copy the logits of a decode step out. If the next step can be guessed, the device computes it meanwhile."""
        following = tuple(Row(row.sequence, row.pos0 + 1, 1, 1) for row in rows)
        if not (self.ahead.is_due and all(map(self._is_wanted, following))):
            mx.eval(logits, self._states(rows))
            copied = np.array(logits)
            self.ahead.showed(following, copied)
            return StageOutput(logits=copied)
        # No variable may hold the states: MLX then copies whole caches instead of writing into them.
        mx.async_eval(logits, self._states(rows))  # type: ignore[no-untyped-call]
        likeliest = mx.argmax(logits, axis=-1).astype(mx.int32)
        caches = self._together([self._sequences[row.sequence].cache for row in rows])
        result = self._loaded().forward(likeliest[:, None], caches.full(1), {}, 1)
        caches.advance(1)
        assert isinstance(result, mx.array), "a stage that is the whole model"
        guessed = result[:, -1:].reshape(-1, result.shape[-1]).astype(mx.float32)
        mx.async_eval(likeliest, guessed, self._states(rows))  # type: ignore[no-untyped-call]
        self.ahead.begin(GuessedStep(following, likeliest, guessed))
        return StageOutput(logits=np.array(logits))

    def _is_wanted(self, row: Row) -> bool:
        """Whether a sequence may need this position: the last token of an answer is not computed."""
        return row.pos0 + row.n < self._sequences[row.sequence].max_tokens

    def _drop_guess(self, row: Row) -> None:
        if held := self._sequences.get(row.sequence):
            held.cache.cut_back(row.pos0)

    def _states(self, rows: Sequence[Row]) -> list[mx.array]:
        """The contents of the caches of all rows."""
        touched = sorted({row.sequence for row in rows})
        return arrays_of([self._sequences[sequence].cache for sequence in touched])

    def _evaluate(self, results: list[mx.array], states: list[mx.array], rows: Sequence[Row]) -> None:
        """Evaluate the results. results: `[tokens, width]`. From time to time the ranks of a tensor group compare their
        results."""
        if self._ranks is None:
            mx.eval(results, states)
            return
        lines = results[0] if len(results) == 1 or self._loaded().outputs else mx.concatenate(results)
        digests = self._ranks.digest(lines, sum(row.n for row in rows))
        mx.eval(results, states, *([] if digests is None else [digests]))
        if digests is not None:
            self._ranks.check(digests, coarsest_dtype(self._model))

    def _wanted_logits(self, rows: Sequence[Row], computed: Computed) -> list[mx.array]:
        """float32 `[k, vocab]` arrays, in row order; zeros for a row that was not computed."""
        num_logits = {row.num_logits for row in rows}
        if len(computed) == 1 and len(computed[0][0].rows) == len(rows) and len(num_logits) == 1:
            result, count = computed[0][1], rows[0].num_logits
            if count and isinstance(result, mx.array):
                return [result[:, -count:].reshape(-1, result.shape[-1]).astype(mx.float32)]
        parts = [mx.zeros((row.num_logits, self._logits_width), mx.float32) for row in rows]
        for group, result in computed:
            for place, index in enumerate(group.rows):
                count = rows[index].num_logits
                if count and isinstance(result, mx.array):
                    parts[index] = result[place, -count:].astype(mx.float32)
        return parts

    def _warm_up(self, shard: Shard, model_dir: Path) -> None:
        """Run one forward over zeros: it reads embedding or head if needed, builds kernels, and shows that the cut
        works."""
        stage = self._loaded()
        one = Group((0,), 1)
        sent = packets.pack(stage.inputs, [(one, packets.zeros(stage.inputs))], [1])
        self.insert(WARM_UP_SEQUENCE, 1)
        try:
            output = self.forward(StageInput((Row(WARM_UP_SEQUENCE, 0, 1, 1),), (0,), packets.to_tensors(sent)))
        except EngineError as exc:
            cause = exc.__cause__ if isinstance(exc.__cause__, Exception) else exc
            why = why_a_range_fails(shard.start, shard.stop, shard.num_layers, cause)
            raise ModelError(f"{model_dir}: {why}") from exc
        if output.logits is not None:
            self._logits_width = output.logits.shape[1]
        cache = self._sequences[WARM_UP_SEQUENCE].cache
        self._saved_form = saving.form_of(cache)
        rollback, at_rows = find_rollback(stage, self._new_cache)
        self.capabilities = Capabilities(
            ragged=True,
            rollback=rollback,
            dtypes=wire.ACTIVATION_DTYPES,
            kv=kv_kinds(cache.own_entries()),
            inputs=packets.specs(stage.inputs),
            outputs=packets.specs(stage.outputs, self._activation_dtype),
            cuts_at_rows=at_rows,
        )
        self.remove(WARM_UP_SEQUENCE)
        self._ragged = find_mode(stage, self._model, self._new_cache)
        self.batched = self._ragged is not None
        if self._ragged is not None and self._options.batch_attention:
            self.keeper.is_on = attends_in_blocks(stage, self._ragged, self._new_cache)
            if self.keeper.is_on and attends_to_parts(stage, self._ragged, self._new_cache):
                self.capabilities = replace(self.capabilities, shares_from=LEAST_SHARED)
        mx.clear_cache()
