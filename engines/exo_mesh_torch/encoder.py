"""The part of the torch engine that runs encoders: whole texts in, states or scores out, and no KV."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

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
from exo_mesh.errors import EngineError, MeshError, ModelError
from exo_mesh_torch import wire
from exo_mesh_torch.devices import choose_device, choose_dtype
from exo_mesh_torch.encoder_model import EncoderStage, check_range, open_encoder
from exo_mesh_torch.loading import StageLoader, num_bytes
from exo_mesh_torch.options import check_options

WARM_UP_SEQUENCE = -1


class TorchEncoder:
    """Runs a layer range of an encoder. Texts of one length share a forward."""

    def __init__(self, request: LoadRequest, progress: LoadProgress) -> None:
        """Load the stage. Raises ModelError naming file and tensor."""
        check_options(request.options)
        device, shard = choose_device(request.options), request.shard
        opened = open_encoder(request.model_dir, lambda own: choose_dtype(request.options, own, device))
        check_range(opened, shard.start, shard.stop, shard.num_layers)
        StageLoader(opened.checkpoint, opened.model, opened.trace, device).load(shard.start, shard.stop, progress)
        self._stage = EncoderStage(opened, device, shard.start, shard.stop)
        self._width, self._dtype = opened.trace.hidden_shape[0], opened.trace.hidden_dtype
        self._vocab_size, self._scores = opened.vocab_size, opened.is_classifier
        self._passed_on = wire.torch_dtype(request.activation_dtype) if request.activation_dtype else self._dtype
        self._max_tokens: dict[int, int] = {}
        self.num_bytes = num_bytes(opened.model)
        spec = (TensorSpec(HIDDEN, wire.dtype_name(self._passed_on), (self._width,)),)
        self.capabilities = Capabilities(
            ragged=True,
            rollback=ANY_POSITION,
            dtypes=wire.ACTIVATION_DTYPES,
            kv=(),
            inputs=() if shard.is_first else spec,
            outputs=() if shard.is_last else spec,
        )
        self._warm_up(request.model_dir)

    def insert(self, sequence: int, max_tokens: int) -> None:
        self._max_tokens.setdefault(sequence, max_tokens)

    def remove(self, sequence: int) -> None:
        self._max_tokens.pop(sequence, None)

    def sequences(self) -> Sequence[int]:
        return list(self._max_tokens)

    def close(self) -> None:
        self._stage.close()
        self._max_tokens.clear()

    def forward(self, stage_input: StageInput) -> StageOutput:
        """See StageEngine. Each row is a whole text."""
        rows = stage_input.rows
        try:
            with torch.inference_mode():
                starts = np.cumsum([0, *(row.n for row in rows)]).tolist()
                faults = self._bad_rows(rows, stage_input.token_ids, starts)
                hidden = self._received(stage_input)
                results: list[torch.Tensor | None] = [None] * len(rows)
                for (_, second), group in self._groups(rows, faults).items():
                    ids = [stage_input.token_ids[starts[i] : starts[i + 1]] for i in group]
                    given = None
                    if hidden is not None:
                        given = torch.stack([hidden[starts[i] : starts[i + 1]] for i in group])
                    for i, values in zip(group, self._stage.forward(ids, second, given), strict=True):
                        results[i] = values
                return self._output(rows, results, tuple(faults.values()))
        except MeshError:
            raise
        except Exception as exc:  # model code and torch may raise anything
            raise EngineError(f"torch failed in a forward of {len(rows)} texts: {exc}") from exc

    def _received(self, stage_input: StageInput) -> torch.Tensor | None:
        """The hidden state of all rows, `[tokens, width]`. Raises EngineError if the frame is wrong."""
        if self._stage.is_first or not stage_input.rows:
            return None
        tensor = stage_input.tensors.get(HIDDEN)
        expected = (len(stage_input.token_ids), self._width)
        if tensor is None or tensor.shape != expected:
            found = "none" if tensor is None else list(tensor.shape)
            raise EngineError(f"the frame must have a hidden state of shape {list(expected)}; it has {found}")
        return wire.from_tensor(tensor, self._stage.device).to(self._dtype)

    def _bad_rows(self, rows: Sequence[Row], token_ids: Sequence[int], starts: Sequence[int]) -> dict[int, Fault]:
        """The faults of rows that cannot be computed, by sequence."""
        faults: dict[int, Fault] = {}
        for i, row in enumerate(rows):
            ids = token_ids[starts[i] : starts[i + 1]]
            known = row.sequence in self._max_tokens
            defect = row_defect(row, 0 if known else None, self._max_tokens.get(row.sequence, 0))
            if not defect and row.num_logits:
                defect = "this model gives vectors or scores, and no tokens"
            if not defect and not 0 <= min(ids) <= max(ids) < self._vocab_size:
                defect = f"a token id is outside 0..{self._vocab_size - 1}"
            if defect:
                faults.setdefault(row.sequence, Fault(row.sequence, UNKNOWN_STAGE, "bad_row", defect))
        return faults

    def _groups(self, rows: Sequence[Row], faults: Mapping[int, Fault]) -> dict[tuple[int, int], list[int]]:
        """The rows that can be computed, by their length and the place of their second text."""
        groups: dict[tuple[int, int], list[int]] = {}
        for i, row in enumerate(rows):
            if row.sequence not in faults:
                groups.setdefault((row.n, row.second), []).append(i)
        return groups

    def _output(
        self, rows: Sequence[Row], results: Sequence[torch.Tensor | None], faults: tuple[Fault, ...]
    ) -> StageOutput:
        if not self._stage.is_last:
            parts = [
                torch.zeros((row.n, self._width), dtype=self._passed_on, device=self._stage.device)
                if result is None
                else result.to(self._passed_on)
                for row, result in zip(rows, results, strict=True)
            ]
            return StageOutput({HIDDEN: wire.to_tensor(torch.cat(parts))} if parts else {}, faults=faults)
        width = next((result.shape[-1] for result in results if result is not None), 1)
        wanted = [
            np.zeros((row.num_hidden, width), np.float32) if result is None else self._values(row, result)
            for row, result in zip(rows, results, strict=True)
        ]
        hidden = np.concatenate(wanted) if any(row.num_hidden for row in rows) else None
        return StageOutput(logits=np.zeros((0, self._vocab_size), np.float32), faults=faults, hidden=hidden)

    def _values(self, row: Row, result: torch.Tensor) -> np.ndarray:
        """What a row wants of its text: states of its last tokens, or its scores, once for each."""
        values = result.float().cpu()
        chosen = values.expand(row.num_hidden, -1) if self._scores else values[row.n - row.num_hidden :]
        return np.asarray(chosen)

    def _warm_up(self, model_dir: Path) -> None:
        """Run one forward over zeros: it builds kernels, and shows that the cut works."""
        self.insert(WARM_UP_SEQUENCE, 2)
        tensors: Mapping[str, Tensor] = {}
        if not self._stage.is_first:
            tensors = {HIDDEN: wire.to_tensor(torch.zeros((2, self._width), dtype=self._dtype))}
        try:
            self.forward(StageInput((Row(WARM_UP_SEQUENCE, 0, 2, num_hidden=1),), (0, 0), tensors))
        except EngineError as exc:
            raise ModelError(f"{model_dir}: transformers' code fails on this part of the model ({exc})") from exc
        finally:
            self.remove(WARM_UP_SEQUENCE)
