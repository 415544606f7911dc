"""Makes the stages of a model in GGUF files: its tensors as they are, numbered as layers of the stage."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from exo_mesh.errors import ModelError
from exo_mesh.weights.gguf import BLOCKS, GgufArray, GgufHeader
from exo_mesh.weights.gguf_table import file_table, read_headers
from exo_mesh.weights.model_files import named
from exo_mesh.weights.safetensors import TensorInfo, on_disk
from exo_mesh_llamacpp.container import Metadata, Value
from exo_mesh_llamacpp.gguf_rules import RULES, ArchRules
from exo_mesh_llamacpp.plan import STUB_TOKENS, Planned, hole
from exo_mesh_llamacpp.types import KNOWN, Q4_0, GgmlType, fitting

MAX_LAYERS = 10_000
CHUNK_BYTES = 2**22
"""Bytes of a tensor that are copied at once."""

_IN_LAYER = re.compile(r"blk\.(0|[1-9][0-9]{0,5})\.(.+)")
_HEAD = re.compile(r"output(_norm)?\.|token_embd_norm\.|per_layer_token_embd\.")
_NUMBERS = {name: number for number, (name, _, _) in BLOCKS.items()}
_DENSE_FIRST = "leading_dense_block_count"
"""Key with the number of layers without experts at the beginning; less in later stages."""

_NOT_COPIED = ("general.", "tokenizer.", "split.", "quantize.")
"""Beginnings of keys that do not describe the layers."""

_PERIODS = ("full_attention_interval", "interleave_moe_layer_step", "moe_every_n_layers")
"""Keys with the number of layers after which the kinds of layers repeat; llama.cpp counts from the first layer."""

_WINDOW_UNUSED = ("llama", "phi3", "qwen2", "qwen3")
"""Architectures for which llama.cpp does not use a window, even if a file has one."""

_POSITIONS = "position_embd.weight"
"""Learned positions, which are added to the embedding."""

_LONG_ROPE = ("rope_factors_long.weight", "rope_factors_short.weight")


class GgufModel:
    """See ModelSource."""

    def __init__(self, model_dir: Path, first: str, rules: ArchRules | None = None) -> None:
        """first: the name of the only file, or of the first shard. rules: instead of the architecture's, to try one.
        Raises ModelError naming the file for a model that this engine does not run."""
        headers = read_headers(model_dir, first)
        self._file = named(model_dir / first)
        self._header: GgufHeader = headers[0]
        self._table = file_table(headers)
        self._arch = self._header.architecture
        found = rules or RULES.get(self._arch)
        if found is None:
            known = ", ".join(RULES)
            raise self._refusal(f'the llamacpp engine does not split "{self._arch[:100]}"; it splits {known}')
        self._rules = found
        self.num_layers = self._size("block_count") - (self._header.integer(self._key("nextn_predict_layers"), 0) or 0)
        if not 0 < self.num_layers <= MAX_LAYERS:
            raise self._refusal(f"{self.num_layers} layers are not between 1 and {MAX_LAYERS}")
        self.hidden_size = self._size("embedding_length")
        self.vocab_size = self._info("token_embd.weight").shape[0]
        self.recurrent = found.recurrent
        self.shares_embedding = "output.weight" not in self._table and not found.own_head
        self.embedding_scale = math.sqrt(self.hidden_size) if found.sqrt_scale else 1.0
        if found.scale_key:
            self.embedding_scale = self._header.number(self._key(found.scale_key), 1.0) or 1.0
        self.num_heads = max(self._of_layer("attention.head_count", index, 0) for index in range(self.num_layers))
        self._layers = self._sorted_layers()
        self._windows = self._window_flags()
        self.windowed = any(self._windows) or self._key("attention.sliding_window") in self._header.metadata
        self._refuse()
        kinds = [self._layer_kind(index) for index in range(self.num_layers)]
        self.layer_kinds = tuple(kinds)
        self.kv_values = tuple(self._kv_values(index) for index in range(self.num_layers))
        self.kv_fixed = tuple(self._state_values(index) for index in range(self.num_layers))
        self.legal_cuts = self._cuts()

    # -- what a stage consists of

    def metadata(self, start: int, stop: int, *, scales: bool = False) -> Metadata:
        if stop - start in self._rules.refused_layers and stop - start < self.num_layers:
            raise self._refusal(f"llama.cpp computes {self._arch} of {stop - start} layers with other constants")
        is_last = stop == self.num_layers
        total = self._size("block_count")
        found: dict[str, Value] = {"general.architecture": self._arch, "tokenizer.ggml.model": "none"}
        for key, value in self._header.metadata.items():
            if key.startswith(_NOT_COPIED):
                continue
            if isinstance(value, GgufArray):
                if value.is_text:
                    continue
                numbers = value.numbers()
                found[key] = numbers[start:stop] if len(numbers) == total else numbers
            else:
                found[key] = value
        found[self._key("block_count")] = stop - start
        found[self._key("vocab_size")] = self.vocab_size if is_last else STUB_TOKENS
        if self._key("nextn_predict_layers") in found:
            found[self._key("nextn_predict_layers")] = 0
        if (count := self._header.integer(self._key(_DENSE_FIRST))) is not None:
            found[self._key(_DENSE_FIRST)] = max(0, count - start)
        if any(self._windows[start:stop]):
            # llama.cpp would begin its pattern again in every stage
            found[self._key("attention.sliding_window_pattern")] = self._windows[start:stop]
        elif self._windows:
            found.pop(self._key("attention.sliding_window"), None)
            found.pop(self._key("attention.sliding_window_pattern"), None)
        if self._rules.scale_key and not scales:
            found[self._key(self._rules.scale_key)] = 0.0  # rows of the embedding are scaled where they are looked up
        return found

    def layer(self, index: int) -> list[Planned]:
        return [self._planned(name, short) for short, name in self._layers[index].items()]

    def shared(self, is_first: bool) -> list[Planned]:
        names = [
            name
            for name in self._table
            if not _IN_LAYER.fullmatch(name) and not _HEAD.match(name) and name != "token_embd.weight"
        ]
        found = [self._planned(name, name) for name in names if name != _POSITIONS]
        if _POSITIONS in names:
            # the library would add them again in every stage: later ones get zeros
            table = self._planned(_POSITIONS, _POSITIONS)
            found.append(table if is_first else hole(_POSITIONS, table.kind, table.shape))
        return found

    def head(self) -> list[Planned]:
        found = [self._planned(name, name) for name in self._head_names() if name != "output.weight"]
        head = "output.weight" if "output.weight" in self._table else "token_embd.weight"
        if not self._rules.own_head:
            return [*found, self._planned(head, "token_embd.weight")]
        unused = hole("token_embd.weight", fitting(Q4_0, self.hidden_size), (self.hidden_size, self.vocab_size))
        return [*found, unused, self._planned(head, "output.weight")]

    def stub(self) -> list[Planned]:
        f32 = KNOWN[0]
        names = [name for name in self._head_names() if name != "output.weight"]
        found = [hole(name, f32, self._stub_shape(self._table[name])) for name in names]
        matrices = ("token_embd.weight", "output.weight") if self._rules.own_head else ("token_embd.weight",)
        return [*found, *(hole(name, f32, (self.hidden_size, STUB_TOKENS)) for name in matrices)]

    def embedding(self) -> Planned:
        return self._planned("token_embd.weight", "token_embd.weight")

    # -- checks

    def _refuse(self) -> None:
        """Raises ModelError for a model whose stages would compute something else."""
        window = self._header.metadata.get(self._key("attention.sliding_window"), 0)
        has_pattern = self._key("attention.sliding_window_pattern") in self._header.metadata
        if window and not self._windows and not has_pattern and self._arch not in _WINDOW_UNUSED:
            raise self._refusal(f"{self._arch} with windows is not proved to be right in parts")
        for name in _LONG_ROPE:
            if name in self._table:
                raise self._refusal(f"{name}: llama.cpp chooses these factors by the size of its cache")
        for index, names in enumerate(self._layers):
            if not names:
                raise self._refusal(f"it has no tensors of layer {index}")
        for name, info in self._table.items():
            if _NUMBERS[info.dtype] not in KNOWN and info.dtype != "I32":
                raise self._refusal(f"{name} is {info.dtype}, which is not supported")

    def _refusal(self, why: str) -> ModelError:
        return ModelError(f"{self._file}: {why}")

    def _key(self, name: str) -> str:
        return f"{self._arch}.{name}"

    def _size(self, name: str) -> int:
        value = self._header.integer(self._key(name))
        if value is None or not 0 < value < 2**31:
            raise self._refusal(f"{self._key(name)} is {value}, not a usable size")
        return value

    def _of_layer(self, name: str, index: int, default: int) -> int:
        """A number that may be one for all layers, or one for each."""
        value = self._header.metadata.get(self._key(name), default)
        if isinstance(value, GgufArray) and not value.is_text and index < value.length:
            value = value.numbers()[index]
        if not isinstance(value, int) or not 0 <= value < 2**31:
            raise self._refusal(f"{self._key(name)} is not a usable size of layer {index}")
        return int(value)

    def _info(self, name: str) -> TensorInfo:
        info = self._table.get(name)
        if info is None or not info.shape:
            raise self._refusal(f"it has no tensor {name}")
        return info

    # -- layers

    def _sorted_layers(self) -> list[dict[str, str]]:
        """For each layer {name within the layer: name in the file}."""
        layers: list[dict[str, str]] = [{} for _ in range(self.num_layers)]
        for name in self._table:
            match = _IN_LAYER.fullmatch(name)
            if match and int(match[1]) < self.num_layers:
                layers[int(match[1])][match[2]] = name
        return layers

    def _window_flags(self) -> tuple[bool, ...]:
        """Whether each layer attends to a window, where the pattern follows from the number of the layer."""
        if self._key("attention.sliding_window") not in self._header.metadata or not self._rules.window_period:
            return ()
        value = self._header.metadata.get(self._key("attention.sliding_window_pattern"))
        if isinstance(value, GgufArray) and not value.is_text and value.length == self._size("block_count"):
            return tuple(bool(flag) for flag in value.numbers()[: self.num_layers])
        period = value if isinstance(value, int) and not isinstance(value, bool) else self._rules.window_period
        return tuple(period == 0 or (index + 1) % period != 0 for index in range(self.num_layers))

    def _layer_kind(self, index: int) -> str:
        window = " window" if self._windows and self._windows[index] else ""
        shapes = sorted((short, self._table[name].shape) for short, name in self._layers[index].items())
        return f"{hash(tuple(shapes)):x}{window}"

    def _is_attention(self, index: int) -> bool:
        heads = self._of_layer("attention.head_count_kv", index, self._of_layer("attention.head_count", index, 0))
        return heads > 0 and any(name.startswith(("attn_q", "attn_kv", "attn_k")) for name in self._layers[index])

    def _kv_values(self, index: int) -> int:
        if not self._is_attention(index):
            return 0
        heads = self._of_layer("attention.head_count", index, 0)
        kv_heads = self._of_layer("attention.head_count_kv", index, heads)
        width = self.hidden_size // max(1, heads)
        keys = self._of_layer("attention.key_length", index, width)
        return kv_heads * (keys + self._of_layer("attention.value_length", index, width))

    def _state_values(self, index: int) -> int:
        if not self.recurrent or self._is_attention(index):
            return 0
        conv = self._of_layer("shortconv.l_cache", index, 0)
        if conv:
            return (conv - 1) * self.hidden_size
        inner, state = self._of_layer("ssm.inner_size", index, 0), self._of_layer("ssm.state_size", index, 0)
        groups = self._of_layer("ssm.group_count", index, 0)
        kernel = max(1, self._of_layer("ssm.conv_kernel", index, 1))
        return (kernel - 1) * (inner + 2 * groups * state) + state * inner

    def _cuts(self) -> tuple[int, ...]:
        """Layers before which a stage may begin. The library aborts for a stage that has no layer of a needed kind."""
        if self.num_layers in self._rules.refused_layers:
            return ()
        every = math.lcm(self._rules.every, *(self._of_layer(key, 0, 1) or 1 for key in _PERIODS))
        cuts = range(every, self.num_layers, every)
        needed = [kind for kind in self._needed_kinds() if kind]
        found: list[int] = []
        previous = 0
        for cut in cuts:
            if all(any(previous <= index < cut for index in kind) and kind[-1] >= cut for kind in needed):
                found.append(cut)
                previous = cut
        return tuple(found)

    def _needed_kinds(self) -> list[list[int]]:
        """Layers by kind: every stage must have a layer of each kind."""
        layers = range(self.num_layers)
        kinds = []
        if self.recurrent:
            kinds = [[index for index in layers if self._is_attention(index) == wanted] for wanted in (True, False)]
        if self._rules.needs_window:
            kinds.append([index for index in layers if self._windows and self._windows[index]])
        return kinds

    # -- tensors

    def _head_names(self) -> list[str]:
        return [name for name in self._table if _HEAD.match(name)]

    def _stub_shape(self, info: TensorInfo) -> tuple[int, ...]:
        return tuple(STUB_TOKENS if size == self.vocab_size else size for size in reversed(info.shape))

    def _planned(self, name: str, target: str) -> Planned:
        info = self._info(name)
        kind = KNOWN.get(_NUMBERS[info.dtype]) or GgmlType(info.dtype.lower(), _NUMBERS[info.dtype], 1, 4)
        return Planned(
            target,
            kind,
            tuple(reversed(info.shape)),
            lambda out: _copy(out, info, name),
            lambda offset: _part(info, name, offset),
        )


def _part(info: TensorInfo, name: str, offset: int) -> np.ndarray:
    """At most CHUNK_BYTES of a tensor from an offset on. Raises ModelError if the file ends too early."""
    wanted = min(CHUNK_BYTES, info.num_bytes - offset)
    try:
        with on_disk(info.file).open("rb", buffering=0) as stream:
            stream.seek(info.start + offset)
            found = stream.read(wanted)
    except OSError as exc:
        raise ModelError(f"{named(info.file)}: {name} cannot be read: {exc.strerror or exc}") from exc
    if not found:
        raise ModelError(f"{named(info.file)}: {name} cannot be read: the file ends {wanted} bytes too early")
    return np.frombuffer(found, np.uint8)


def _copy(out: BinaryIO, info: TensorInfo, name: str) -> None:
    """Copy the bytes of a tensor. Raises ModelError if the file ends too early."""
    try:
        with on_disk(info.file).open("rb", buffering=0) as stream:
            stream.seek(info.start)
            left = info.num_bytes
            while left:
                part: Any = stream.read(min(left, CHUNK_BYTES))
                if not part:
                    raise ModelError(f"{named(info.file)}: {name} cannot be read: the file ends {left} bytes too early")
                out.write(part)
                left -= len(part)
    except OSError as exc:
        raise ModelError(f"{named(info.file)}: {name} cannot be read: {exc.strerror or exc}") from exc
