"""What a stage is made of: llama.cpp's metadata, and tensors that can write their own bytes. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from io import SEEK_CUR
from typing import BinaryIO, Protocol

import msgspec
import numpy as np
from msgspec.structs import replace

from exo_mesh_llamacpp.container import Metadata
from exo_mesh_llamacpp.types import IQ1_S, Q4_0, Q4_K, GgmlType

REARRANGED = (Q4_0, Q4_K)
"""Types whose matrices the library copies into an order of its own for common CPUs."""

Write = Callable[[BinaryIO], None]
"""Writes all bytes of a tensor to an open file, in its type."""


Part = Callable[[int], np.ndarray]
"""The bytes of a tensor from an offset on, uint8: at least one, and as many as are handy."""


class Planned(msgspec.Struct, frozen=True):
    """A tensor of a stage. shape: the length of a row first, as ggml has it. part: set if its bytes need not be made
    all at once."""

    name: str
    kind: GgmlType
    shape: tuple[int, ...]
    write: Write
    part: Part | None = None

    @property
    def num_bytes(self) -> int:
        return self.kind.num_bytes(self.shape)


class Embedding(Protocol):
    """The embedding of the first stage, which is looked up outside of llama.cpp."""

    num_bytes: int

    def rows(self, token_ids: Sequence[int]) -> np.ndarray:
        """Float32 `[len(token_ids), hidden]`, scaled as the model wants it. The ids are in the vocabulary."""


class ModelSource(Protocol):
    """A model on disk, from which stages for llama.cpp are made.

    kv_values[i]: keys and values of layer i per position. kv_fixed[i]: values of a state of constant size. legal_cuts:
    layers before which a stage may begin. layer_kinds[i]: equal for layers of equal code and shapes. shares_embedding:
    the head is the embedding, and the library needs it once. embedding_scale: factor of the rows of the embedding.
    """

    num_layers: int
    hidden_size: int
    vocab_size: int
    num_heads: int
    legal_cuts: tuple[int, ...]
    kv_values: tuple[int, ...]
    kv_fixed: tuple[int, ...]
    layer_kinds: tuple[str, ...]
    shares_embedding: bool
    embedding_scale: float
    recurrent: bool
    windowed: bool

    def metadata(self, start: int, stop: int, *, scales: bool = False) -> Metadata:
        """llama.cpp's metadata of a model of layers `[start, stop)` alone. scales: the library scales the embedding,
        because it looks up token ids itself."""

    def layer(self, index: int) -> list[Planned]:
        """The tensors of a layer, without `blk.N.` before their names."""

    def shared(self, is_first: bool) -> list[Planned]:
        """Tensors that every stage needs besides its layers."""

    def head(self) -> list[Planned]:
        """The tensors of the last stage besides its layers: output_norm and the head. The head is `token_embd.weight`
        if the library's model code can use that as head: it requires this tensor, and so loads only one."""

    def stub(self) -> list[Planned]:
        """What a stage before the last one has instead of the head, because llama.cpp requires both tensors."""

    def embedding(self) -> Planned:
        """The embedding, `[vocab, hidden]`."""


def stage_tensors(source: ModelSource, start: int, stop: int) -> list[Planned]:
    """All tensors of a stage, under the names that llama.cpp looks for."""
    tensors = head_tensors(source) if stop == source.num_layers else source.stub()
    return [*tensors, *_below_head(source, start, stop)]


def head_tensors(source: ModelSource) -> list[Planned]:
    """The tensors of the last stage besides its layers. The library would keep an embedding that it also needs as head
    twice if it rearranges the head's type; then the embedding is a hole of the smallest type."""
    tensors = {tensor.name: tensor for tensor in source.head()}
    head = tensors.get("token_embd.weight")
    has_own_head = "output.weight" in tensors or source.shares_embedding
    if head is None or has_own_head or head.kind not in REARRANGED or head.shape[0] % IQ1_S.block:
        return list(tensors.values())
    unused = hole(head.name, IQ1_S, head.shape)
    return list((tensors | {unused.name: unused, "output.weight": replace(head, name="output.weight")}).values())


def _below_head(source: ModelSource, start: int, stop: int) -> list[Planned]:
    """What a stage has besides its head or stub."""
    tensors = source.shared(start == 0)
    for index in range(start, stop):
        tensors += [replace(tensor, name=f"blk.{index - start}.{tensor.name}") for tensor in source.layer(index)]
    return tensors


def plain_tensors(source: ModelSource) -> list[Planned]:
    """All tensors of a model that takes token ids: as in a stage of all layers, but with the embedding in its place."""
    tensors = [*source.head(), *_below_head(source, 0, source.num_layers)]
    if source.shares_embedding:
        return tensors
    head = {tensor.name: tensor for tensor in tensors}
    rows = replace(head.pop("token_embd.weight"), name="output.weight")
    return [source.embedding(), *({"output.weight": rows} | head).values()]


def hole(name: str, kind: GgmlType, shape: tuple[int, ...]) -> Planned:
    """A tensor of zeros that the library requires but never computes with."""
    return Planned(name, kind, shape, lambda out: _skip(out, kind.num_bytes(shape)))


def _skip(out: BinaryIO, num_bytes: int) -> None:
    out.seek(num_bytes, SEEK_CUR)


STUB_TOKENS = 32
"""Vocabulary of a stage before the last one: llama.cpp computes a head for it, which is free at this size."""
