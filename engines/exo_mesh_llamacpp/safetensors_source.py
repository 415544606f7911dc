"""Makes llama.cpp's tensors from a safetensors checkpoint: names, order of rows, types."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import numpy as np

from exo_mesh.errors import ModelError
from exo_mesh.weights.safetensors import TensorInfo, on_disk, read_tensor_table
from exo_mesh_llamacpp.container import Metadata, Value
from exo_mesh_llamacpp.families import Change, TensorPart
from exo_mesh_llamacpp.hf_config import HfModel, read_hf_model
from exo_mesh_llamacpp.library import Library
from exo_mesh_llamacpp.plan import STUB_TOKENS, Planned, hole
from exo_mesh_llamacpp.types import BF16, F16, F32, Q4_0, QUANTS, GgmlType, fitting
from exo_mesh_llamacpp.wire import narrowed_to_bfloat16, widened

CHUNK_VALUES = 2**20
"""Values that are converted at once."""

_FLOATS: dict[str, tuple[GgmlType, np.dtype[Any], str]] = {
    "F32": (F32, np.dtype("<f4"), "float32"),
    "F16": (F16, np.dtype("<f2"), "float16"),
    "BF16": (BF16, np.dtype("<u2"), "bfloat16"),
}
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
_HARMLESS = re.compile(r"\.rotary_emb\.inv_freq$")
_EXPERT = re.compile(r"\.experts\.\d+\.")
_EMBEDDING, _NORM, _HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"


class SafetensorsSource:
    """See ModelSource. get_library: opens llama.cpp, which quantises; called only when a tensor is written."""

    recurrent = False

    def __init__(self, model_dir: Path, quant: str, get_library: Callable[[], Library]) -> None:
        """Raises ModelError naming file and key or tensor for whatever this engine cannot compute exactly."""
        self._model: HfModel = read_hf_model(model_dir)
        self._dir = model_dir
        self._quant = QUANTS.get(quant)
        self._library = get_library
        self._table = read_tensor_table(model_dir)
        model = self._model
        self.num_layers, self.hidden_size = model.num_layers, model.sizes["hidden"]
        self.vocab_size = model.sizes["vocab"]
        every = model.family.cut_every
        self.legal_cuts = tuple(range(every, model.num_layers, every))
        self.kv_values = (2 * model.sizes["kv"],) * model.num_layers
        self.kv_fixed = (0,) * model.num_layers
        self.layer_kinds = tuple("window" if window else "full" for window in model.windows)
        self.num_heads = model.num_heads
        self.embedding_scale = model.embedding_scale
        self.windowed = any(model.windows)
        self._tied = model.tied if model.tied is not None else _HEAD not in self._table
        self.shares_embedding = self._tied and not model.family.own_head
        self._check()

    def metadata(self, start: int, stop: int, *, scales: bool = False) -> Metadata:
        arch = self._model.family.arch
        is_last = stop == self.num_layers
        found: dict[str, Value] = {"general.architecture": arch, "tokenizer.ggml.model": "none"}
        found |= {f"{arch}.{key}": value for key, value in self._model.metadata.items()}
        found[f"{arch}.block_count"] = stop - start
        found[f"{arch}.vocab_size"] = self.vocab_size if is_last else STUB_TOKENS
        if self.windowed:
            # llama.cpp would begin its pattern again in every stage
            found[f"{arch}.attention.sliding_window_pattern"] = self._model.windows[start:stop]
        if arch == "granite":
            # rows of the embedding are scaled where they are looked up
            found[f"{arch}.embedding_scale"] = self.embedding_scale if scales else 0.0
        return found

    def layer(self, index: int) -> list[Planned]:
        return [self._planned(part, index) for part in self._present(index)]

    def shared(self, is_first: bool) -> list[Planned]:
        factors = np.array(self._model.rope_freqs, np.float32)
        if not len(factors):
            return []
        return [Planned("rope_freqs.weight", F32, (len(factors),), lambda out: _put(out, factors))]

    def head(self) -> list[Planned]:
        source = _EMBEDDING if self._tied else _HEAD
        plus: Change = "plus one" if self._model.family.plus_one else ""
        norm = self._single(TensorPart("output_norm.weight", _NORM, ("hidden",), plus), _NORM)
        shape = ("vocab", "hidden")
        if not self._model.family.own_head:
            return [self._single(TensorPart("token_embd.weight", source, shape), source), norm]
        unused = hole("token_embd.weight", fitting(Q4_0, self.hidden_size), (self.hidden_size, self.vocab_size))
        return [unused, self._single(TensorPart("output.weight", source, shape), source), norm]

    def stub(self) -> list[Planned]:
        matrices = ("token_embd.weight", "output.weight") if self._model.family.own_head else ("token_embd.weight",)
        found = [hole(name, F32, (self.hidden_size, STUB_TOKENS)) for name in matrices]
        return [*found, hole("output_norm.weight", F32, (self.hidden_size,))]

    def embedding(self) -> Planned:
        return self._single(TensorPart("token_embd.weight", _EMBEDDING, ("vocab", "hidden")), _EMBEDDING)

    # -- checks

    def _check(self) -> None:
        """Raises ModelError if a tensor is missing, has another shape, or would be left out."""
        for index in range(self.num_layers):
            for part in self._present(index):
                for name in self._names(part, index):
                    self._info(name, self._shape(part))
        for name, shape in ((_EMBEDDING, ("vocab", "hidden")), (_NORM, ("hidden",))):
            self._info(name, self._shape(TensorPart("", name, shape)))
        if not self._tied:
            self._info(_HEAD, self._shape(TensorPart("", _HEAD, ("vocab", "hidden"))))
        known = {part.source for part in self._model.family.parts}
        for name in self._table:
            layer = _LAYER.fullmatch(name)
            if name in (_EMBEDDING, _NORM, _HEAD) or _HARMLESS.search(name):
                continue
            if layer and int(layer[1]) >= self.num_layers:
                continue  # multi-token prediction
            if layer is None or _EXPERT.sub(".experts.{}.", layer[2]) not in known:
                raise ModelError(f"{self._table[name].file}: {name} is not used by a model of this config")

    def _present(self, index: int) -> Iterator[TensorPart]:
        """The parts that a layer has: all but the optional ones that the checkpoint lacks."""
        for part in self._model.family.parts:
            if not part.optional or self._names(part, index)[0] in self._table:
                yield part

    def _names(self, part: TensorPart, index: int) -> list[str]:
        name = f"model.layers.{index}.{part.source}"
        return [name.format(expert) for expert in range(self._experts)] if part.per_expert else [name]

    @property
    def _experts(self) -> int:
        return self._model.sizes.get("experts", 0)

    def _shape(self, part: TensorPart) -> tuple[int, ...]:
        return tuple(self._model.sizes[size] for size in part.shape)

    def _info(self, name: str, shape: tuple[int, ...]) -> TensorInfo:
        info = self._table.get(name)
        if info is None:
            raise ModelError(f"{self._dir}: the checkpoint has no tensor {name}")
        if info.shape != shape:
            raise ModelError(f"{info.file}: {name} has shape {list(info.shape)}, config.json requires {list(shape)}")
        if info.dtype not in _FLOATS:
            raise ModelError(f"{info.file}: {name} is {info.dtype}; the llamacpp engine reads {', '.join(_FLOATS)}")
        return info

    # -- tensors

    def _planned(self, part: TensorPart, index: int) -> Planned:
        names = self._names(part, index)
        if not part.per_expert:
            return self._single(part, names[0])
        infos = [self._info(name, self._shape(part)) for name in names]
        tensors = [_Stored(part, name, info, self._kind(infos[0])) for name, info in zip(names, infos, strict=True)]
        return self._made_of(tensors, (*reversed(infos[0].shape), len(infos)))

    def _single(self, part: TensorPart, name: str) -> Planned:
        info = self._info(name, self._shape(part))
        kind = F32 if part.name.endswith("ffn_gate_inp.weight") else self._kind(info)
        return self._made_of([_Stored(part, name, info, kind)], tuple(reversed(info.shape)))

    def _made_of(self, tensors: Sequence[_Stored], shape: tuple[int, ...]) -> Planned:
        """The tensor that consists of tensors of the checkpoint, of equal shapes, one after the other."""
        each = tensors[0].num_bytes

        def part(offset: int) -> np.ndarray:
            return self._part(tensors[offset // each], offset % each)

        def write(out: BinaryIO) -> None:
            offset = 0
            while offset < each * len(tensors):
                made = part(offset)
                out.write(made.data)
                offset += len(made)

        return Planned(tensors[0].part.name, tensors[0].kind, shape, write, part)

    def _kind(self, info: TensorInfo) -> GgmlType:
        """The type that a tensor is held in: vectors in float32, as llama.cpp requires."""
        if len(info.shape) < 2:
            return F32
        return fitting(self._quant, info.shape[-1]) if self._quant else _FLOATS[info.dtype][0]

    def _part(self, tensor: _Stored, offset: int) -> np.ndarray:
        """The bytes of a converted tensor from an offset to the end of the chunk of rows that it is in.

        Rows of a rotated head are reordered within the head, so a chunk has whole heads.
        """
        part, info = tensor.part, tensor.info
        stored, dtype, label = _FLOATS[info.dtype]
        unit = self._model.sizes["head_dim"] if part.change.startswith("rotary") else 1
        step = max(1, CHUNK_VALUES // (tensor.width * unit)) * unit
        first = offset // tensor.row_bytes // step * step
        count = min(step, info.shape[0] - first) * tensor.width
        raw = _read(info, tensor.name, dtype, first * tensor.width, count).reshape(-1, tensor.width)
        if part.change.startswith("rotary"):
            raw = _pairs(raw, unit)
        if tensor.kind is not stored or part.change == "plus one":
            values = np.ascontiguousarray(widened(raw, label))
            raw = self._converted(values + np.float32(1) if part.change == "plus one" else values, tensor.kind)
        return np.ascontiguousarray(raw).reshape(-1).view(np.uint8)[offset - first * tensor.row_bytes :]

    def _converted(self, values: np.ndarray, kind: GgmlType) -> np.ndarray:
        """float32 `[rows, width]` in another type."""
        if kind is F32:
            return values
        if kind is F16:
            return values.astype(np.float16)
        if kind is BF16:
            return narrowed_to_bfloat16(values)
        rows, width = values.shape
        packed = np.empty(rows * kind.row_bytes(width), np.uint8)
        written = self._library().call.ggml_quantize_chunk(
            kind.number, values.ctypes.data, packed.ctypes.data, 0, rows, width, None
        )
        assert written == packed.nbytes, f"{kind.name}: {written} bytes instead of {packed.nbytes}"
        return packed


class _Stored(msgspec.Struct, frozen=True):
    """A tensor of the checkpoint, its counterpart in the library, and the type that it is converted to."""

    part: TensorPart
    name: str
    info: TensorInfo
    kind: GgmlType

    @property
    def width(self) -> int:
        """Values of a row; a vector is a column."""
        return self.info.shape[-1] if len(self.info.shape) > 1 else 1

    @property
    def row_bytes(self) -> int:
        """Bytes of a converted row."""
        return self.kind.row_bytes(self.width)

    @property
    def num_bytes(self) -> int:
        return self.row_bytes * self.info.shape[0]


def _pairs(rows: np.ndarray, head_dim: int) -> np.ndarray:
    """Rows of heads whose halves are rotated together, reordered for a rotation of neighbours."""
    heads = rows.reshape(-1, 2, head_dim // 2, rows.shape[-1])
    return np.ascontiguousarray(heads.swapaxes(1, 2)).reshape(rows.shape)


def _put(out: BinaryIO, values: np.ndarray) -> None:
    out.write(np.ascontiguousarray(values).reshape(-1).view(np.uint8).data)


def _read(info: TensorInfo, name: str, dtype: np.dtype[Any], first: int, count: int) -> np.ndarray:
    """`count` values of a tensor from value `first` on. Raises ModelError if the file ends too early."""
    values = np.empty(count, dtype)
    view = values.view(np.uint8).data
    try:
        with on_disk(info.file).open("rb", buffering=0) as stream:
            stream.seek(info.start + first * dtype.itemsize)
            while view:
                got = stream.readinto(view)
                if not got:
                    raise ModelError(f"{info.file}: {name} cannot be read: the file ends {len(view)} bytes too early")
                view = view[got:]
    except OSError as exc:
        raise ModelError(f"{info.file}: {name} cannot be read: {exc.strerror or exc}") from exc
    return values
