"""The dummy StageEngine: no weights and no computing, but with the row rules, payload check and cost of a real
engine."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
from msgspec.structs import replace

from exo_mesh.domain.frame import HIDDEN, Fault, Row
from exo_mesh.domain.tensor import Tensor
from exo_mesh.engine.contract import (
    ANY_POSITION,
    LEAST_SHARED,
    UNKNOWN_STAGE,
    Capabilities,
    GroupCheck,
    LoadProgress,
    LoadRequest,
    SavedSequence,
    StageInput,
    StageOutput,
    TensorSpec,
    copy_defect,
    row_defect,
)
from exo_mesh.engine.shared_positions import SharedPositions
from exo_mesh.errors import CanaryError, EngineError, InputError
from exo_mesh_dummy.model import read_dummy_model
from exo_mesh_dummy.options import parse_options
from exo_mesh_dummy.payload import MIN_WORDS, Payloads, check_marks, kv_marks, mix, write_marks

KV_BYTES = 16
"""Reported bytes of one position of a sequence; a saved position really takes them."""

SPIN_S = 0.0002
"""Seconds before its end at which a wait stops sleeping: a sleep wakes 0.1 ms late, and a device is not late."""

CERTAIN = 50.0
"""One logit beside zeros: at temperature 1 another token comes once in 10^19 draws, so no answer ends by chance."""

_LAYER_S = 0.001
"""Reported seconds of one layer on one machine alone, for one token."""

_WRONG = 77
"""Chooses the positions of wrong guesses."""

KV = "kv"
DTYPE = "uint32"


class _DummySequence(msgspec.Struct):
    max_tokens: int
    length: int = 0


def _wait_until(deadline: float) -> None:
    """Wait until this time of `perf_counter`, to some microseconds; other threads may run meanwhile."""
    if (rest := deadline - time.perf_counter()) > SPIN_S:
        time.sleep(rest - SPIN_S)
    while time.perf_counter() < deadline:
        time.sleep(0)


class DummyStage:
    """A stage whose next token is a hash of (last token, its position), so every split of the layers gives the same
    text."""

    capabilities = Capabilities(
        ragged=True, rollback=ANY_POSITION, dtypes=(DTYPE,), row_exact=True, shares_from=LEAST_SHARED
    )

    def __init__(self) -> None:
        self._sequences: dict[int, _DummySequence] = {}
        self._shared = SharedPositions(LEAST_SHARED)
        self._request: LoadRequest | None = None
        self._payloads = Payloads()
        self._num_forwards = 0

    def load(self, request: LoadRequest, progress: LoadProgress) -> None:
        if request.activation_dtype not in ("", DTYPE):
            raise InputError(f"the dummy engine passes on {DTYPE}, not {request.activation_dtype}", param="dtype")
        self._options = parse_options(request.options)
        self._model = read_dummy_model(request.model_dir)
        self._num_words = max(MIN_WORDS, (self._options.payload_bytes or 4 * self._model.hidden_size) // 4)
        self._request = request
        spec = (TensorSpec(HIDDEN, DTYPE, (self._num_words,)),)
        self.capabilities = replace(
            self.capabilities,
            inputs=() if request.shard.is_first else spec,
            outputs=() if request.shard.is_last else spec,
        )
        progress(0, len(request.shard))
        time.sleep(self._options.load_ms / 1000)
        progress(len(request.shard), len(request.shard))

    def verify(self, chunk_tokens: int, progress: LoadProgress) -> GroupCheck:
        """Report the configured figures: the ranks exchange nothing, because each of them generates all of the text."""
        if self._options.fail_group:
            raise CanaryError("the ranks compute wrong results, as the option fail_group demands")
        reduce_s, chunk_s = self._options.reduce_ms / 1000, self._options.cost_ms / 1000
        return GroupCheck(reduce_s, 1e9, chunk_s, _LAYER_S, 10 * _LAYER_S, 0.0)

    def insert(self, sequence: int, max_tokens: int) -> None:
        self._sequences.setdefault(sequence, _DummySequence(max_tokens))

    def forward(self, stage_input: StageInput) -> StageOutput:
        if self._request is None:
            raise EngineError("the stage is not loaded")
        rows = stage_input.rows
        cost_ms = self._cost_ms(rows)
        deadline = time.perf_counter() + cost_ms / 1000
        self._num_forwards += 1
        if self._num_forwards == self._options.fail_at:
            raise EngineError(f"forward {self._num_forwards} fails, as the option fail_at demands")
        output = self._compute(rows, stage_input.token_ids, stage_input.tensors)
        if cost_ms:
            _wait_until(deadline)
        return output

    def _cost_ms(self, rows: Sequence[Row]) -> float:
        assert self._request is not None, "asked before"
        options = self._options
        cost_ms = options.cost_ms + options.layer_cost_ms * len(self._request.shard) + options.row_cost_ms * len(rows)
        further = sum(row.n - 1 for row in rows if row.num_logits) if options.token_cost_ms else 0
        return cost_ms + options.token_cost_ms * further

    @property
    def drafts(self) -> bool:
        """See DraftingEngine."""
        return self._options.draft_right > 0

    def draft(self, token_ids: Sequence[int], most: int) -> list[int]:
        """See DraftingEngine. Which guesses are wrong depends only on the position."""
        printable = self._model.printable
        last, found = int(token_ids[-1]), []
        for position in range(len(token_ids) - 1, len(token_ids) - 1 + most):
            is_wrong = mix(_WRONG, position) % 10_000 >= 10_000 * self._options.draft_right
            last = int(printable[(mix(last, position) + is_wrong) % len(printable)])
            found.append(last)
        return found

    def remove(self, sequence: int) -> None:
        self._sequences.pop(sequence, None)
        self._shared.remove(sequence)

    def sequences(self) -> Sequence[int]:
        return list(self._sequences)

    def memory_bytes(self) -> int:
        # a copy: heartbeats read this while a frame may insert or remove
        return KV_BYTES * (sum(held.length for held in list(self._sequences.values())) - self._shared.saved)

    def save(self, sequence: int) -> SavedSequence:
        held = self._sequences.get(sequence)
        if held is None:
            raise EngineError(f"sequence {sequence} is not known here")
        return SavedSequence(held.length, {KV: Tensor.from_numpy(self._kv(held.length))})

    def restore(self, sequence: int, max_tokens: int, saved: SavedSequence) -> None:
        if not 0 <= saved.length <= max_tokens:
            raise EngineError(f"{saved.length} saved positions do not fit into {max_tokens}")
        wanted = Tensor.from_numpy(self._kv(saved.length))
        tensor = saved.tensors.get(KV)
        if tensor is None or len(saved.tensors) != 1 or (tensor.dtype, tensor.shape) != (wanted.dtype, wanted.shape):
            given = {name: f"{one.dtype}{list(one.shape)}" for name, one in saved.tensors.items()}
            raise EngineError(f"expected {KV} {wanted.dtype}{list(wanted.shape)}, got {json.dumps(given)}")
        if bytes(tensor.data) != bytes(wanted.data):
            raise EngineError("the saved sequence is of another shard")
        self.remove(sequence)
        self._sequences[sequence] = _DummySequence(max_tokens, saved.length)

    def copy(self, source: int, sequence: int, upto: int, max_tokens: int) -> None:
        """See SequenceCopier."""
        held = self._sequences.get(source)
        if defect := copy_defect(source, None if held is None else held.length, upto, max_tokens):
            raise EngineError(defect)
        self.remove(sequence)
        self._sequences[sequence] = _DummySequence(max_tokens, upto)
        self._shared.copy(source, sequence, upto)

    def move(self, source: int, sequence: int, upto: int, max_tokens: int) -> None:
        """See SequenceMover."""
        self.copy(source, sequence, upto, max_tokens)
        self.remove(source)

    def close(self) -> None:
        self._sequences.clear()
        self._shared.clear()
        self._request = None

    def _compute(self, rows: Sequence[Row], token_ids: Sequence[int], tensors: Mapping[str, Tensor]) -> StageOutput:
        assert self._request is not None
        shard = self._request.shard
        if not rows:
            return StageOutput(logits=np.zeros((0, self._model.vocab_size), np.float32) if shard.is_last else None)
        received = None if shard.is_first else self._received(tensors, len(token_ids))
        size = 4 * self._num_words
        payload = None if shard.is_last else self._payloads.get(size, [row.n for row in rows])
        num_logits = sum([row.num_logits for row in rows])
        logits = np.zeros((num_logits, self._model.vocab_size), np.float32) if shard.is_last else None
        faults: dict[int, Fault] = {}
        start = first_logit = 0
        for row in rows:
            part = slice(start, start + row.n)
            start, tokens = part.stop, token_ids[part]
            defect = self._append(row, tokens)
            if defect or row.sequence in faults:
                faults.setdefault(row.sequence, Fault(row.sequence, UNKNOWN_STAGE, "bad_row", defect or ""))
            elif received is not None:
                check_marks(received[part.start * size : part.stop * size], size, row.pos0, tokens, shard.start)
            if payload is not None:
                write_marks(payload[part.start * size : part.stop * size], size, row.pos0, tokens, shard.stop)
            elif logits is not None and row.sequence not in faults:
                self._write_logits(logits[first_logit : first_logit + row.num_logits], row, tokens)
            first_logit += row.num_logits
        if payload is None:
            return StageOutput(logits=logits, faults=tuple(faults.values()))
        hidden = Tensor(DTYPE, (len(token_ids), self._num_words), payload)
        return StageOutput(tensors={HIDDEN: hidden}, faults=tuple(faults.values()))

    def _kv(self, length: int) -> np.ndarray:
        """Stand-in for the KV, uint32 `[length, 4]`, recognisable by position and shard."""
        if self._request is None:
            raise EngineError("the stage is not loaded")
        return kv_marks(length, self._request.shard.start, self._request.shard.stop)

    def _received(self, tensors: Mapping[str, Tensor], num_tokens: int) -> memoryview:
        tensor = tensors.get(HIDDEN)
        if tensor is None or tensor.dtype != DTYPE or tensor.shape != (num_tokens, self._num_words):
            what = "nothing" if tensor is None else f"{tensor.dtype}{list(tensor.shape)}"
            raise EngineError(f"expected activations {DTYPE}[{num_tokens}, {self._num_words}], got {what}")
        return memoryview(tensor.data)

    def _append(self, row: Row, tokens: Sequence[int]) -> str | None:
        """Set the sequence's length as real KV would; returns the reason if the row cannot be done, or None."""
        held = self._sequences.get(row.sequence)
        defect = row_defect(row, None if held is None else held.length, 0 if held is None else held.max_tokens)
        if defect or held is None:
            return defect
        if not 0 <= min(tokens) <= max(tokens) < self._model.vocab_size:
            return f"a token id is outside 0..{self._model.vocab_size - 1}"
        held.length = row.pos0 + row.n
        return None

    def _write_logits(self, logits: np.ndarray, row: Row, tokens: Sequence[int]) -> None:
        """Fill float32 `[num_logits, vocab]` zeros: CERTAIN at the next token of each of the row's last positions."""
        printable = self._model.printable
        skipped = row.n - row.num_logits
        for index, token in enumerate(tokens[skipped:]):
            logits[index, printable[mix(token, row.pos0 + skipped + index) % len(printable)]] = CERTAIN
