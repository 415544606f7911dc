"""The stage: load a range of layers, then compute rows. This is all that an engine must do."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from msgspec.structs import replace

from exo_mesh.domain.frame import HIDDEN, Fault, Row
from exo_mesh.domain.tensor import Tensor
from exo_mesh.engine.contract import (
    ANY_POSITION,
    UNKNOWN_STAGE,
    Capabilities,
    LoadProgress,
    LoadRequest,
    StageInput,
    StageOutput,
    TensorSpec,
    row_defect,
)
from exo_mesh.errors import EngineError, InputError
from exo_mesh_engine_example.model import EMBED, HEAD, MIX, BigramFiles


class BigramStage:
    """Keeps no KV: of a sequence it knows its length and the room that was made for it."""

    # one token at a time through the same matrix-vector products, so no row can change the bits of another
    capabilities = Capabilities(ragged=True, rollback=ANY_POSITION, dtypes=("float32",), kv=(), row_exact=True)

    def __init__(self) -> None:
        self._mix: list[np.ndarray] = []
        self._embed: np.ndarray | None = None
        self._head: np.ndarray | None = None
        self._files: BigramFiles | None = None
        self._lengths: dict[int, int] = {}
        self._rooms: dict[int, int] = {}

    def load(self, request: LoadRequest, progress: LoadProgress) -> None:
        for name in request.options:
            raise InputError(f"the example engine has no option {name!r}", param=name)
        if request.activation_dtype not in ("", "float32"):
            raise InputError(f"the example engine hands on float32, not {request.activation_dtype}", param="dtype")
        shard, files = request.shard, BigramFiles(request.model_dir)
        if files.num_layers != shard.num_layers:
            raise EngineError(f"{shard} does not fit: {request.model_dir} has {files.num_layers} layers")
        progress(0, len(shard))
        for done, layer in enumerate(shard.layers, 1):
            self._mix.append(files.read(MIX.format(layer)))
            progress(done, len(shard))
        self._embed = files.read(EMBED) if shard.is_first else None
        self._head = files.read(HEAD) if shard.is_last else None
        spec = (TensorSpec(HIDDEN, "float32", (files.hidden_size,)),)
        self.capabilities = replace(
            self.capabilities, inputs=() if shard.is_first else spec, outputs=() if shard.is_last else spec
        )
        self._files = files

    def insert(self, sequence: int, max_tokens: int) -> None:
        self._lengths.setdefault(sequence, 0)
        self._rooms.setdefault(sequence, max_tokens)

    def forward(self, stage_input: StageInput) -> StageOutput:
        if self._files is None:
            raise EngineError("the stage is not loaded")
        hidden = self._received(stage_input, self._files)
        faults: dict[int, Fault] = {}
        wanted: list[int] = []  # positions in the frame whose logits are asked for
        start = 0
        for row in stage_input.rows:
            part = range(start, start + row.n)
            start = part.stop
            wanted += part[row.n - row.num_logits :]
            if defect := self._append(row, [stage_input.token_ids[index] for index in part]):
                faults.setdefault(row.sequence, Fault(row.sequence, UNKNOWN_STAGE, "bad_row", defect))
                hidden[part.start : part.stop] = 0
                continue
            for index in part:
                x = hidden[index] if self._embed is None else self._embed[stage_input.token_ids[index]]
                for mix in self._mix:
                    x = x + np.tanh(mix @ x)
                hidden[index] = x
        if self._head is None:
            return StageOutput(tensors={HIDDEN: Tensor.from_numpy(hidden)}, faults=tuple(faults.values()))
        logits = np.zeros((len(wanted), self._files.vocab_size), np.float32)
        for index, position in enumerate(wanted):
            logits[index] = self._head @ hidden[position]
        return StageOutput(logits=logits, faults=tuple(faults.values()))

    def remove(self, sequence: int) -> None:
        self._lengths.pop(sequence, None)
        self._rooms.pop(sequence, None)

    def sequences(self) -> Sequence[int]:
        return list(self._lengths)

    def memory_bytes(self) -> int:
        return sum(array.nbytes for array in (*self._mix, self._embed, self._head) if array is not None)

    def close(self) -> None:
        self._files = self._embed = self._head = None
        self._mix.clear()
        self._lengths.clear()
        self._rooms.clear()

    def _received(self, stage_input: StageInput, files: BigramFiles) -> np.ndarray:
        """Float32 `[tokens, hidden]`: what the stage before gave, or room for what this one computes."""
        shape = (len(stage_input.token_ids), files.hidden_size)
        if self._embed is not None or not stage_input.rows:
            return np.zeros(shape, np.float32)
        given = stage_input.tensors.get(HIDDEN)
        if given is None or (given.dtype, given.shape) != ("float32", shape):
            what = "nothing" if given is None else f"{given.dtype}{list(given.shape)}"
            raise EngineError(f"expected activations float32{list(shape)}, got {what}")
        return given.numpy().copy()

    def _append(self, row: Row, tokens: Sequence[int]) -> str | None:
        """Bring the sequence to the row's end; why that cannot be done, or None."""
        defect = row_defect(row, self._lengths.get(row.sequence), self._rooms.get(row.sequence, 0))
        assert self._files is not None
        if defect is None and not 0 <= min(tokens) <= max(tokens) < self._files.vocab_size:
            defect = f"a token id is outside 0..{self._files.vocab_size - 1}"
        if defect is None:
            self._lengths[row.sequence] = row.pos0 + row.n
        return defect
