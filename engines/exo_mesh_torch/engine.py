"""The torch StageEngine: rows in, activations or logits out. Rows that decode together share a forward."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from msgspec.structs import replace

from exo_mesh.domain.embedding import is_encoder
from exo_mesh.domain.frame import HIDDEN, Fault, Row
from exo_mesh.domain.images import PictureSpec
from exo_mesh.domain.shard import Shard
from exo_mesh.domain.tensor import Tensor
from exo_mesh.engine.contract import (
    LEAST_SHARED,
    UNKNOWN_STAGE,
    Capabilities,
    LibraryMemory,
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
from exo_mesh.errors import EngineError, InputError, MeshError, ModelError
from exo_mesh.weights.model_files import read_json
from exo_mesh_torch import saving, wire
from exo_mesh_torch.batches import Batches
from exo_mesh_torch.caches import StageCache
from exo_mesh_torch.devices import choose_device, choose_dtype, set_threads, wants_batching
from exo_mesh_torch.dry_run import takes_up_states
from exo_mesh_torch.encoder import TorchEncoder
from exo_mesh_torch.image_rows import ShownImage, cut_image, overlaps
from exo_mesh_torch.loading import StageLoader, num_bytes
from exo_mesh_torch.model import StageModel, open_model
from exo_mesh_torch.options import check_options
from exo_mesh_torch.packing import PackedLinears, wants_packing
from exo_mesh_torch.parts import install
from exo_mesh_torch.small_weights import SmallWeights, wants_small_weights
from exo_mesh_torch.vision import VisionTower
from exo_mesh_torch.wire import compute_by_token, rows_of, states_of

WARM_UP_SEQUENCE = -1

MOST_SHARING_ERROR = 0.05
"""Largest difference of a result with shared positions from one without, relative to the largest value: several times
the rounding of bfloat16, while a wrong order of heads or positions differs by about 1."""

_log = logging.getLogger(__name__)

MAX_JOINED_TOKENS = 16
"""Rows of at most this many tokens share a forward: decode steps with their drafts. A longer row fills the cores alone,
and joining it would copy its KV."""


class TorchStage:
    """Runs a layer range of one of transformers' models on one device."""

    capabilities = Capabilities(ragged=True, rollback=0, dtypes=wire.ACTIVATION_DTYPES)

    def __init__(self) -> None:
        self._encoder: TorchEncoder | None = None
        self._threads = ThreadsByLoad(1, torch.set_num_threads)
        self._model: StageModel | None = None
        self._batches: Batches | None = None
        self._max_tokens: dict[int, int] = {}
        self._images: dict[int, list[ShownImage]] = {}
        self._tower: VisionTower | None = None
        self._no_images = ""
        self._weight_bytes = 0
        self._joins = True
        self._activation_dtype: torch.dtype | None = None
        self._shapes: saving.Shapes = {}
        self._by_token = False
        """Whether a row behind earlier positions is computed token by token."""

    def load(self, request: LoadRequest, progress: LoadProgress) -> None:
        check_options(request.options)
        device, shard = choose_device(request.options), request.shard
        self._threads = set_threads(request.options, device)
        packs, keeps_codes = wants_packing(request.options, device), wants_small_weights(request.options, device)
        if is_encoder(read_json(request.model_dir / "config.json")):
            self._encoder = TorchEncoder(request, progress)
            self.capabilities = self._encoder.capabilities
            return
        opened = open_model(
            request.model_dir, request.context_limit, lambda own: choose_dtype(request.options, own, device)
        )
        if opened.trace.num_layers != shard.num_layers:
            raise EngineError(f"{shard} does not fit: {request.model_dir} has {opened.trace.num_layers} layers")
        opened.check_range(shard.start, shard.stop)
        packed = PackedLinears()
        pack = packed.pack if packs else None
        small = SmallWeights() if keeps_codes else None
        loader = StageLoader(opened.checkpoint, opened.model, opened.trace, device, pack, small, request.options)
        loader.load(shard.start, shard.stop, progress)
        if shard.start == 0:
            dtype = opened.trace.hidden_dtype
            self._tower, self._no_images = VisionTower.load_or_explain(opened.checkpoint, dtype, device)
        self._model = StageModel(opened, device, shard.start, shard.stop)
        self._batches = Batches(opened.caches)
        install()
        self._joins = wants_batching(request.options) and opened.batchable
        if request.activation_dtype:
            self._activation_dtype = wire.torch_dtype(request.activation_dtype)
        self.capabilities = self._declare()
        try:
            self._warm_up(shard, request.model_dir)
        except ModelError as exc:
            if small is not None and small.num_bytes:
                raise ModelError(f"{exc}; load the model with --engine-option quantised=off") from exc
            if not packed.num_bytes:
                raise
            _log.warning("using plain weights, because this model's code does not work with packed ones: %s", exc)
            packed.unpack()
            self.remove(WARM_UP_SEQUENCE)
            self._warm_up(shard, request.model_dir)
        if device.type == "cpu" and self._joins:
            self._try_sharing()
        others = (packed, small, self._tower)
        self._weight_bytes = num_bytes(opened.model) + sum(part.num_bytes for part in others if part is not None)

    def warm_up(self, context_limit: int) -> None:
        # on a CPU, and for encoders, `load` has computed enough
        if self._encoder is None and self._loaded()[0].device.type != "cpu":
            run_first_passes(self, context_limit, on_gpu=True)

    def insert(self, sequence: int, max_tokens: int) -> None:
        if self._encoder is not None:
            self._encoder.insert(sequence, max_tokens)
            return
        _, batches = self._loaded()
        if sequence not in batches:
            batches.begin(sequence)
            self._max_tokens[sequence] = max_tokens

    def forward(self, stage_input: StageInput) -> StageOutput:
        self._threads.adapt()
        if self._encoder is not None:
            return self._encoder.forward(stage_input)
        model, _ = self._loaded()
        rows = stage_input.rows
        if not rows:
            return StageOutput(logits=np.zeros((0, model.vocab_size), np.float32) if model.is_last else None)
        try:
            with torch.inference_mode():
                hidden = self._received(stage_input)
                starts = np.cumsum([0, *(row.n for row in rows)]).tolist()
                faults = self._bad_rows(rows, stage_input.token_ids, starts)
                results: list[torch.Tensor | None] = [None] * len(rows)
                for group in self._groups([i for i, row in enumerate(rows) if row.sequence not in faults], rows):
                    self._compute(group, rows, starts, stage_input.token_ids, hidden, results)
                return self._output(rows, results, tuple(faults.values()))
        except MeshError:
            raise
        except Exception as exc:  # model code and torch may raise anything
            raise EngineError(f"torch failed in a forward of {len(rows)} rows: {exc}") from exc

    def remove(self, sequence: int) -> None:
        if self._encoder is not None:
            self._encoder.remove(sequence)
        if self._batches is not None:
            self._batches.remove(sequence)
            self._max_tokens.pop(sequence, None)
            self._images.pop(sequence, None)

    def sequences(self) -> Sequence[int]:
        if self._encoder is not None:
            return self._encoder.sequences()
        return [] if self._batches is None else list(self._batches)

    def memory_bytes(self) -> int:
        if self._encoder is not None:
            return self._encoder.num_bytes
        return self._weight_bytes + (0 if self._batches is None else self._batches.num_bytes())

    def library_memory(self) -> LibraryMemory | None:
        """See MemoryTeller."""
        if self._model is None or self._model.device.type != "cuda":
            return None
        device = self._model.device
        active, reserved = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
        return LibraryMemory("torch", active, reserved - active, torch.cuda.max_memory_allocated(device))

    def close(self) -> None:
        self._threads.close()
        if self._encoder is not None:
            self._encoder.close()
            self._encoder = None
        if self._model is not None:
            self._model.close()
        self._model = self._batches = self._tower = None
        self._images.clear()
        self._max_tokens.clear()
        self._weight_bytes = 0

    def show(self, sequence: int, picture: PictureSpec, pixels: Tensor | None) -> None:
        """See ImageTaker. The vision tower runs here, so that the rows of the image wait for nothing."""
        model, batches = self._loaded()
        if not model.takes_images or (model.is_first and self._tower is None):
            reason = self._no_images or "it has no vision tower that the torch engine runs"
            raise InputError(f"the model takes no images: {reason}")
        if sequence not in batches:
            raise EngineError(f"sequence {sequence} is not known here")
        rows = None
        if model.is_first:
            if pixels is None or self._tower is None:
                raise EngineError("the first stage got an image without its pixels")
            rows = self._tower.rows(picture, pixels)
        others = [image for image in self._images.get(sequence, ()) if image.spec.start != picture.start]
        self._images[sequence] = sorted([*others, ShownImage(picture, rows)], key=lambda image: image.spec.start)

    def save(self, sequence: int) -> SavedSequence:
        """See SequenceSaver."""
        cache = self._saved_cache(sequence)
        model, batches = self._loaded()
        return saving.save(cache, model.layers, batches.length(sequence))

    def save_parts(self, sequence: int) -> Iterator[SavedSequence]:
        """See PartSaver. One part for each layer."""
        self._saved_cache(sequence)
        model, batches = self._loaded()
        length = batches.length(sequence)

        def find() -> StageCache:
            cache = self._saved_cache(sequence)
            if batches.length(sequence) != length:
                raise EngineError(f"sequence {sequence} has changed while it was copied out")
            return cache

        yield from saving.save_parts(find, model.layers, length)

    def _saved_cache(self, sequence: int) -> StageCache:
        """The KV of a sequence that can be copied out. Raises EngineError."""
        _, batches = self._loaded()
        if sequence in self._images:
            raise EngineError("a sequence with images cannot be copied out: its pixels would be missing")
        if sequence not in batches:
            raise EngineError(f"sequence {sequence} is not known here")
        with torch.inference_mode():
            return batches.single(sequence)

    def restore(self, sequence: int, max_tokens: int, saved: SavedSequence) -> None:
        """See SequenceSaver."""
        model, batches = self._loaded()
        if saved.length > max_tokens:
            raise EngineError(f"{saved.length} saved positions do not fit in room for {max_tokens}")
        with torch.inference_mode():
            cache = saving.restore(model.new_cache(), model.layers, saved, self._shapes, model.device)
        batches.put(sequence, saved.length, cache)
        self._max_tokens[sequence] = max_tokens

    def copy(self, source: int, sequence: int, upto: int, max_tokens: int) -> None:
        """See SequenceCopier."""
        _, batches = self._loaded()
        held = batches.length(source) if source in batches else None
        if defect := copy_defect(source, held, upto, max_tokens):
            raise EngineError(defect)
        batches.copy(source, sequence, upto)
        self._max_tokens[sequence] = max_tokens
        self._share_images(source, sequence, upto)

    def move(self, source: int, sequence: int, upto: int, max_tokens: int) -> None:
        """See SequenceMover."""
        _, batches = self._loaded()
        held = batches.length(source) if source in batches else None
        if defect := copy_defect(source, held, upto, max_tokens):
            raise EngineError(defect)
        batches.move(source, sequence, upto)
        self._max_tokens.pop(source, None)
        self._max_tokens[sequence] = max_tokens
        self._share_images(source, sequence, upto)
        self._images.pop(source, None)

    def _share_images(self, source: int, sequence: int, upto: int) -> None:
        """Note the images in the first positions of `source` for a copy of it. Their rows are not needed again."""
        self._images.pop(sequence, None)
        if kept := [ShownImage(image.spec) for image in self._images.get(source, ()) if image.spec.start < upto]:
            self._images[sequence] = kept

    def _loaded(self) -> tuple[StageModel, Batches]:
        if self._model is None or self._batches is None:
            raise EngineError("the stage is not loaded")
        return self._model, self._batches

    def _declare(self) -> Capabilities:
        """The capabilities of this stage, from its layers."""
        model, _ = self._loaded()
        name = wire.dtype_name(self._activation_dtype or model.hidden_dtype)
        spec = (TensorSpec(HIDDEN, name, (math.prod(model.hidden_shape),)),)
        return Capabilities(
            ragged=True,
            rollback=model.rollback,
            cuts_at_rows="recurrent" in model.kv_kinds,
            dtypes=wire.ACTIVATION_DTYPES,
            kv=model.kv_kinds,
            inputs=() if model.is_first else spec,
            outputs=() if model.is_last else spec,
        )

    def _received(self, stage_input: StageInput) -> torch.Tensor | None:
        """The hidden state of all rows, `[tokens, …]`. Raises EngineError if the frame is wrong."""
        model, _ = self._loaded()
        if model.is_first:
            return None
        tensor = stage_input.tensors.get(HIDDEN)
        if tensor is None:
            raise EngineError(
                f"the frame lacks tensor {json.dumps(HIDDEN)}; it has {json.dumps(sorted(stage_input.tensors))}"
            )
        expected = (sum(row.n for row in stage_input.rows), math.prod(model.hidden_shape))
        if tensor.shape != expected:
            raise EngineError(f"tensor {json.dumps(HIDDEN)} has shape {list(tensor.shape)}, expected {list(expected)}")
        return wire.from_tensor(tensor, model.device).to(model.hidden_dtype).reshape(-1, *model.hidden_shape)

    def _bad_rows(self, rows: Sequence[Row], token_ids: Sequence[int], starts: Sequence[int]) -> dict[int, Fault]:
        """The faults of rows that cannot be computed, by sequence: the first one of each. Changes nothing."""
        model, batches = self._loaded()
        lengths = {row.sequence: batches.length(row.sequence) for row in rows if row.sequence in batches}
        faults: dict[int, Fault] = {}
        for i, row in enumerate(rows):
            ids = token_ids[starts[i] : starts[i + 1]]
            defect = row_defect(row, lengths.get(row.sequence), self._max_tokens.get(row.sequence, 0))
            if not defect and not 0 <= min(ids) <= max(ids) < model.vocab_size:
                defect = f"a token id is outside 0..{model.vocab_size - 1}"
            if not defect and self._images:
                defect = self._image_defect(row)
            if not defect and row.pos0 and not batches.can_cut(row.sequence, row.pos0):
                held = lengths[row.sequence]
                if row.pos0 < held and held == batches.length(row.sequence):
                    defect = f"this KV cache cannot be cut back from {held} to {row.pos0} positions"
            if defect:
                faults.setdefault(row.sequence, Fault(row.sequence, UNKNOWN_STAGE, "bad_row", defect))
            elif row.sequence in lengths:
                lengths[row.sequence] = row.pos0 + row.n
        return faults

    def _image_defect(self, row: Row) -> str | None:
        """The reason why a row cannot be computed with the images of its sequence, or None."""
        model, _ = self._loaded()
        images = self._images.get(row.sequence, ())
        if (spec := cut_image(images, row.pos0, row.n)) is not None:
            return f"the row has only a part of the image at position {spec.start}, whose tokens go together"
        if model.is_first and any(one.rows is None and overlaps([one], row.pos0, row.n) for one in images):
            return "the rows of an image are no longer here: they are used once"
        return None

    def _groups(self, indices: Sequence[int], rows: Sequence[Row]) -> list[list[int]]:
        """Groups of rows that are computed together: of one length, each of another sequence, all begun or all not."""
        if len({rows[i].sequence for i in indices}) < len(indices) or not self._joins:
            return [[i] for i in indices]
        groups: dict[tuple[int, bool, int, bool], list[int]] = {}
        for i in indices:
            row = rows[i]
            has_image = bool(self._images) and overlaps(self._images.get(row.sequence, ()), row.pos0, row.n)
            alone = i if row.n > MAX_JOINED_TOKENS or has_image else -1
            groups.setdefault((row.n, row.pos0 > 0, alone, row.num_hidden > 0), []).append(i)
        return list(groups.values())

    def _compute(
        self,
        group: Sequence[int],
        rows: Sequence[Row],
        starts: Sequence[int],
        token_ids: Sequence[int],
        hidden: torch.Tensor | None,
        results: list[torch.Tensor | None],
    ) -> None:
        """Run the rows of one group; put each row's values, `[n or num_logits, …]`, into results."""
        model, batches = self._loaded()
        if self._by_token and any(rows[i].pos0 and rows[i].n > 1 for i in group):
            compute_by_token(self._compute, model.is_last, group, rows, starts, token_ids, hidden, results)
            return
        for i in group:
            if rows[i].pos0 == 0 and batches.length(rows[i].sequence):
                batches.begin(rows[i].sequence)
        batch = batches.before([rows[i] for i in group])
        order = sorted(group, key=lambda i: batch.sequences.index(rows[i].sequence))
        ids = [token_ids[starts[i] : starts[i + 1]] for i in order]
        given = None if hidden is None else rows_of(hidden, [(starts[i], starts[i + 1]) for i in order])
        images = {s: self._images[s] for s in batch.sequences if s in self._images} if self._images else {}
        wants_states = rows[order[0]].num_hidden > 0
        num_logits = max(rows[i].num_logits for i in order)
        result = model.run(ids, batch, given, num_logits, images, wants_states=wants_states)
        for i, values in zip(order, result, strict=True):
            results[i] = values
            for image in images.get(rows[i].sequence, ()):
                if image.spec.stop <= rows[i].pos0 + rows[i].n:
                    image.rows = None

    def _output(
        self, rows: Sequence[Row], results: Sequence[torch.Tensor | None], faults: tuple[Fault, ...]
    ) -> StageOutput:
        model, _ = self._loaded()
        if model.is_last:
            wanted = [
                result[-row.num_logits :].float()
                if result is not None
                else torch.zeros(row.num_logits, model.vocab_size)
                for row, result in zip(rows, results, strict=True)
                if row.num_logits
            ]
            states = states_of(rows, results)
            if not wanted:
                logits_of_none = np.zeros((0, model.vocab_size), np.float32)
                return StageOutput(logits=logits_of_none, faults=faults, hidden=states)
            logits = wanted[0] if len(wanted) == 1 else torch.cat([part.to(model.device) for part in wanted])
            return StageOutput(logits=logits.cpu().numpy(), faults=faults, hidden=states)
        width = math.prod(model.hidden_shape)
        dtype = self._activation_dtype or model.hidden_dtype
        parts = [
            result.reshape(-1, width).to(dtype)
            if result is not None
            else torch.zeros((row.n, width), dtype=dtype, device=model.device)
            for row, result in zip(rows, results, strict=True)
        ]
        return StageOutput(
            tensors={HIDDEN: wire.to_tensor(parts[0] if len(parts) == 1 else torch.cat(parts))}, faults=faults
        )

    def _warm_up(self, shard: Shard, model_dir: Path) -> None:
        """Run forwards over zeros: they build kernels, show that the cut works, and show the shapes of the caches. One
        is a chunk with earlier positions: many models make no mask for a first chunk or a single token."""
        _, batches = self._loaded()
        self.insert(WARM_UP_SEQUENCE, 6)
        try:
            for pos0, n in ((0, 2), (2, 2), (4, 1)):
                self._run_zeros(Row(WARM_UP_SEQUENCE, pos0, n, 1))
        except EngineError as exc:
            layers = f"layers {shard.start} to {shard.stop - 1} of {shard.num_layers}"
            raise ModelError(f"{model_dir}: transformers' code fails on {layers} ({exc})") from exc
        self._shapes = saving.shapes(batches.single(WARM_UP_SEQUENCE), self._loaded()[0].layers)
        if self.capabilities.cuts_at_rows and not takes_up_states(
            lambda pos0, n: self._run_zeros(Row(WARM_UP_SEQUENCE, pos0, n, 1), fill=1.0),
            lambda: batches.single(WARM_UP_SEQUENCE).copy_states(0),
        ):
            self.capabilities = replace(self.capabilities, rollback=0, cuts_at_rows=False)
            self._by_token = True
        self.remove(WARM_UP_SEQUENCE)

    def _run_zeros(self, *rows: Row, fill: float = 0.0) -> np.ndarray:
        """The output of rows that consist of zeros, `[values, width]`. fill: what hidden states consist of."""
        model, _ = self._loaded()
        tensors: Mapping[str, Tensor] = {}
        if not model.is_first:
            shape = sum(row.n for row in rows), math.prod(model.hidden_shape)
            tensors = {HIDDEN: wire.to_tensor(torch.full(shape, fill, dtype=model.hidden_dtype))}
        output = self.forward(StageInput(rows, (0,) * sum(row.n for row in rows), tensors))
        if output.logits is not None:
            return output.logits
        values: np.ndarray = wire.from_tensor(output.tensors[HIDDEN], torch.device("cpu")).float().numpy()
        return values

    def _try_sharing(self) -> None:
        """Let sequences share what they begin with, if this model's code computes the same with shared positions."""
        _, batches = self._loaded()
        one, other = WARM_UP_SEQUENCE, WARM_UP_SEQUENCE - 1
        self.insert(one, 6)
        try:
            self._run_zeros(Row(one, 0, 4, 1))
            if batches.single(one).can_share:
                alone = self._run_zeros(Row(one, 4, 1, 1))[-1]
                self._run_zeros(Row(one, 0, 4, 1))
                batches.least_shared = 2
                self.copy(one, other, 4, 6)
                beside = self._run_zeros(Row(one, 4, 1, 1), Row(other, 4, 1, 1))[-1]
                error = float(np.abs(beside - alone).max()) / (float(np.abs(alone).max()) or 1.0)
                batches.least_shared = LEAST_SHARED if error <= MOST_SHARING_ERROR else 0
        except EngineError as exc:
            batches.least_shared = 0
            _log.info("sequences of this model do not share memory: %s", exc)
        self.remove(one)
        self.remove(other)
        self.capabilities = replace(self.capabilities, shares_from=batches.least_shared)
