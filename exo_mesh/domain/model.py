"""What planning needs to know about a model, read from its files without loading a weight."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from exo_mesh.domain.device import PeerInfo
from exo_mesh.domain.embedding import DECODER_TASKS
from exo_mesh.domain.peer_names import matching


class ModelCard(msgspec.Struct, frozen=True):
    """A model's sizes and structure. Exact byte counts come from the safetensors headers.

    layer_bytes[i]: tensors of layer i. embed_bytes: what the first stage needs besides its layers. head_bytes: what the
    last one needs (final norm and head; with tied embeddings the embedding table again). kv_bytes_per_token: KV cache
    of one layer for one token. legal_cuts: layer indexes where a stage may begin. digest: SHA-256 over the config, the
    tensor table and the first bytes of a few tensors, by which two peers recognise the same model. text_digest: SHA-256
    over the files that turn text into ids; models of equal weights may differ there. kv_layer_bytes[i],
    kv_fixed_bytes[i]: KV of layer i for one token, and for one sequence of any length, where an engine has reported
    them; else all layers take kv_bytes_per_token. tasks: what the model is for, by the names on cards. quantization: of
    the files, such as 4bit, gptq-4bit, or the type of most bytes of a GGUF file; "" if they are plain or a peer of an
    older version sent the card. table_bytes[i]: tables of layer i of which a token reads a few rows, on disk and not in
    memory; they are not in layer_bytes. () if there are none. A card can also describe how one engine holds the model,
    which may differ from the files.
    """

    name: str
    architecture: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    context_length: int
    layer_bytes: tuple[int, ...]
    embed_bytes: int
    head_bytes: int
    tied: bool
    kv_bytes_per_token: int
    dtype: str
    eos_ids: tuple[int, ...]
    legal_cuts: tuple[int, ...]
    digest: str
    text_digest: str = ""
    kv_layer_bytes: tuple[int, ...] = ()
    kv_fixed_bytes: tuple[int, ...] = ()
    tasks: tuple[str, ...] = DECODER_TASKS
    quantization: str = ""
    table_bytes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for sizes in (
            self.layer_bytes,
            self.kv_layer_bytes or self.layer_bytes,
            self.kv_fixed_bytes or self.layer_bytes,
            self.table_bytes or self.layer_bytes,
        ):
            if len(sizes) != self.num_layers:
                raise ValueError(f"{len(sizes)} layer sizes for {self.num_layers} layers")

    @property
    def total_bytes(self) -> int:
        """Bytes of all weights; a tied embedding counts once, as it would on one machine."""
        return sum(self.layer_bytes) + self.head_bytes + (0 if self.tied else self.embed_bytes) + self.disk_bytes

    @property
    def disk_bytes(self) -> int:
        """Bytes of the weights that stay on disk: tables of which a token reads a few rows."""
        return sum(self.table_bytes)

    def shard_bytes(self, start: int, stop: int) -> int:
        """Bytes of weights that the stage `[start, stop)` loads into memory."""
        total = sum(self.layer_bytes[start:stop])
        if start == 0:
            total += self.embed_bytes
        if stop == self.num_layers:
            total += self.head_bytes
        if self.tied and len(range(start, stop)) == self.num_layers:
            total -= min(self.embed_bytes, self.head_bytes)
        return total

    def step_bytes(self, start: int, stop: int) -> int:
        """Bytes of weights that a decode step reads in the stage `[start, stop)`; only a row of the embedding table."""
        return sum(self.layer_bytes[start:stop]) + (self.head_bytes if stop == self.num_layers else 0)

    def kv_bytes(self, start: int, stop: int, tokens: int, sequences: int) -> int:
        """KV of the layers `[start, stop)` for `sequences` sequences that hold `tokens` tokens together."""
        per_token = (
            sum(self.kv_layer_bytes[start:stop]) if self.kv_layer_bytes else (stop - start) * self.kv_bytes_per_token
        )
        return per_token * tokens + sum(self.kv_fixed_bytes[start:stop]) * sequences


class CardRules(msgspec.Struct, frozen=True):
    """The rules of a card. Backends are engines or capability tags, such as `torch` or `mlx-metal`.

    backends: a peer needs one of them; () allows every engine. preferred: the most wanted first; a ring uses others
    only if it has to. min_memory_bytes: the least memory of a peer's device. max_context: most tokens of context for an
    instance whose request and settings name no limit. excluded: the peers that never run the model, see
    peer_names.matching.
    """

    backends: tuple[str, ...] = ()
    preferred: tuple[str, ...] = ()
    min_memory_bytes: int = 0
    max_context: int | None = None
    excluded: tuple[str, ...] = ()

    def allowed(self, info: PeerInfo, engines: Iterable[str]) -> tuple[str, ...]:
        """A peer's engines that the card allows; the preferred ones first."""
        able = [engine for engine in engines if not self.backends or _tags(info, engine) & set(self.backends)]
        return tuple(sorted(able, key=lambda engine: self.rank(info, engine)))

    def rank(self, info: PeerInfo, engine: str) -> int:
        """The place of an engine in the order of preference; 0 is the most wanted."""
        tags = _tags(info, engine)
        return next((place for place, wanted in enumerate(self.preferred) if wanted in tags), len(self.preferred))

    def why_not(self, info: PeerInfo, memory_bytes: int) -> str:
        """Explains why a peer may not run the model, whatever its engines; "" if it may. memory_bytes: of its device;
        0 if unknown."""
        if any(matching(text, [info]) for text in self.excluded):
            return "is excluded by the card"
        if memory_bytes < self.min_memory_bytes:
            return f"has less memory than the {self.min_memory_bytes / 2**30:g} GiB that the card asks for"
        return ""


NO_RULES = CardRules()


def _tags(info: PeerInfo, engine: str) -> set[str]:
    detail = info.engine_info(engine)
    return {engine} if detail is None else {engine, detail.tag}
