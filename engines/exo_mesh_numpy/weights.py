"""The weights of a stage as this engine holds them: float32, projections of one input joined into one matrix."""

from __future__ import annotations

import re
from collections.abc import Iterator

import msgspec
import numpy as np

from exo_mesh.domain.shard import Shard
from exo_mesh.engine.contract import LoadProgress
from exo_mesh.errors import ModelError
from exo_mesh_numpy.checkpoint import NumpyCheckpoint
from exo_mesh_numpy.model_config import ModelConfig

EMBEDDING = "model.embed_tokens"
FINAL_NORM = "model.norm.weight"
HEAD = "lm_head"

_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_HARMLESS = re.compile(r"\.rotary_emb\.inv_freq$")
"""Frequencies in old checkpoints; they follow from the config."""


class Linear(msgspec.Struct):
    """y = x · weightᵀ + bias. weight: float32 `[outputs, inputs]`, as in checkpoints."""

    weight: np.ndarray
    bias: np.ndarray | None = None

    @property
    def num_bytes(self) -> int:
        return self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)


class LayerWeights(msgspec.Struct):
    """One decoder layer. qk_norm: float32 `[heads + kv_heads, head_dim]`, each head's own row, or None."""

    input_norm: np.ndarray
    qkv: Linear
    qk_norm: np.ndarray | None
    output: Linear
    mlp_norm: np.ndarray
    gate_up: Linear
    down: Linear
    has_rope: bool

    @property
    def num_bytes(self) -> int:
        vectors = [self.input_norm, self.mlp_norm, *([] if self.qk_norm is None else [self.qk_norm])]
        matrices = (self.qkv, self.output, self.gate_up, self.down)
        return sum(vector.nbytes for vector in vectors) + sum(linear.num_bytes for linear in matrices)


class StageWeights(msgspec.Struct):
    """The weights of one stage. embedding: float32 `[vocab, hidden]`, on the first stage only. norm and head: on the
    last stage only; the head of a tied model that is one stage is the embedding itself."""

    layers: list[LayerWeights] = msgspec.field(default_factory=list)
    embedding: np.ndarray | None = None
    norm: np.ndarray | None = None
    head: np.ndarray | None = None

    @property
    def num_bytes(self) -> int:
        ends = [array for array in (self.embedding, self.norm) if array is not None]
        if self.head is not None and self.head is not self.embedding:
            ends.append(self.head)
        return sum(array.nbytes for array in ends) + sum(layer.num_bytes for layer in self.layers)


class Projection(msgspec.Struct, frozen=True):
    """A linear layer of the checkpoint: its place in a layer, and `[rows, columns]`."""

    name: str
    rows: int
    columns: int
    has_bias: bool


def projections(config: ModelConfig) -> dict[str, tuple[Projection, ...]]:
    """The matrices of a layer as they are held, each with the parts of the checkpoint that are joined in it."""
    hidden, middle = config.hidden_size, config.intermediate_size
    query, key_value = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    return {
        "qkv": (
            Projection("self_attn.q_proj", query, hidden, config.bias),
            Projection("self_attn.k_proj", key_value, hidden, config.bias),
            Projection("self_attn.v_proj", key_value, hidden, config.bias),
        ),
        "output": (Projection("self_attn.o_proj", hidden, query, config.output_bias),),
        "gate_up": (
            Projection("mlp.gate_proj", middle, hidden, config.mlp_bias),
            Projection("mlp.up_proj", middle, hidden, config.mlp_bias),
        ),
        "down": (Projection("mlp.down_proj", hidden, middle, config.mlp_bias),),
    }


def norms(config: ModelConfig) -> dict[str, int]:
    """{name of a layer's norm in the checkpoint: size}."""
    found = {"input_layernorm.weight": config.hidden_size, "post_attention_layernorm.weight": config.hidden_size}
    if config.qk_norm:
        found |= {"self_attn.q_norm.weight": config.head_dim, "self_attn.k_norm.weight": config.head_dim}
    return found


def is_tied(checkpoint: NumpyCheckpoint, config: ModelConfig) -> bool:
    """Whether the head uses the embedding. If the config has no value: yes if there is no separate head."""
    return config.tied if config.tied is not None else not checkpoint.has(f"{HEAD}.weight")


def layer_bytes(config: ModelConfig) -> int:
    """Bytes of one layer as it is held."""
    parts = [part for joined in projections(config).values() for part in joined]
    values = sum(part.rows * (part.columns + part.has_bias) for part in parts) + 2 * config.hidden_size
    heads = config.num_heads + config.num_kv_heads if config.qk_norm else 0
    return 4 * (values + heads * config.head_dim)


def check_tensors(checkpoint: NumpyCheckpoint, config: ModelConfig) -> None:
    """Check that every tensor of the model is there, in the right shape, and that none would be left out.

    Raises ModelError naming file and tensor. Layers past num_layers (multi-token prediction) do not count.
    """
    used = set(_wanted(checkpoint, config))
    for name in checkpoint.names():
        layer = _LAYER.match(name)
        beyond = layer is not None and int(layer[1]) >= config.num_layers
        harmless = _HARMLESS.search(name) or checkpoint.is_spare(name)
        if name in used or beyond or harmless or name.startswith(f"{HEAD}."):
            continue
        raise ModelError(f"{checkpoint.file_of(name)}: {name} is not used by a model of this config")


def _wanted(checkpoint: NumpyCheckpoint, config: ModelConfig) -> Iterator[str]:
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}."
        for name, size in norms(config).items():
            yield from checkpoint.vector_tensors(prefix + name, size)
        for part in (part for joined in projections(config).values() for part in joined):
            yield from checkpoint.matrix_tensors(prefix + part.name, part.rows, part.columns)
            if part.has_bias:
                yield from checkpoint.vector_tensors(f"{prefix}{part.name}.bias", part.rows)
    yield from checkpoint.vector_tensors(FINAL_NORM, config.hidden_size)
    yield from checkpoint.matrix_tensors(EMBEDDING, config.vocab_size, config.hidden_size)
    if not is_tied(checkpoint, config):
        yield from checkpoint.matrix_tensors(HEAD, config.vocab_size, config.hidden_size)


def load_weights(
    checkpoint: NumpyCheckpoint, config: ModelConfig, shard: Shard, progress: LoadProgress
) -> StageWeights:
    """Read the tensors of the shard and nothing else. progress is in bytes as held."""
    weights = StageWeights()
    one_layer, table = layer_bytes(config), 4 * config.vocab_size * config.hidden_size
    shares_table = shard.is_first and shard.is_last and is_tied(checkpoint, config)
    total = len(shard) * one_layer + table * (shard.is_first + shard.is_last - shares_table)
    total += 4 * config.hidden_size * shard.is_last
    progress(0, total)
    if shard.is_first:
        weights.embedding = _matrix(checkpoint, EMBEDDING, config)
        progress(weights.num_bytes, total)
    for layer in shard.layers:
        weights.layers.append(_load_layer(checkpoint, config, layer))
        progress(weights.num_bytes, total)
    if shard.is_last:
        weights.norm = np.empty(config.hidden_size, np.float32)
        checkpoint.read_vector(FINAL_NORM, weights.norm)
        tied = is_tied(checkpoint, config)
        weights.head = weights.embedding if shares_table else _matrix(checkpoint, EMBEDDING if tied else HEAD, config)
        progress(weights.num_bytes, total)
    return weights


def _matrix(checkpoint: NumpyCheckpoint, module: str, config: ModelConfig) -> np.ndarray:
    out = np.empty((config.vocab_size, config.hidden_size), np.float32)
    checkpoint.read_matrix(module, out)
    return out


def _load_layer(checkpoint: NumpyCheckpoint, config: ModelConfig, layer: int) -> LayerWeights:
    prefix = f"model.layers.{layer}."
    vectors = {name: np.empty(size, np.float32) for name, size in norms(config).items()}
    for name, vector in vectors.items():
        checkpoint.read_vector(prefix + name, vector)
    qk_norm = None
    if config.qk_norm:
        query, key = vectors["self_attn.q_norm.weight"], vectors["self_attn.k_norm.weight"]
        qk_norm = np.stack([query] * config.num_heads + [key] * config.num_kv_heads)
    joined = {name: _join(checkpoint, prefix, parts) for name, parts in projections(config).items()}
    return LayerWeights(
        input_norm=vectors["input_layernorm.weight"],
        qkv=joined["qkv"],
        qk_norm=qk_norm,
        output=joined["output"],
        mlp_norm=vectors["post_attention_layernorm.weight"],
        gate_up=joined["gate_up"],
        down=joined["down"],
        has_rope=config.rope_layers[layer],
    )


def _join(checkpoint: NumpyCheckpoint, prefix: str, parts: tuple[Projection, ...]) -> Linear:
    """The parts below each other, read into one matrix without a copy in between."""
    rows = sum(part.rows for part in parts)
    weight = np.empty((rows, parts[0].columns), np.float32)
    bias = np.empty(rows, np.float32) if parts[0].has_bias else None
    begin = 0
    for part in parts:
        span = slice(begin, begin + part.rows)
        checkpoint.read_matrix(prefix + part.name, weight[span])
        if bias is not None:
            checkpoint.read_vector(f"{prefix}{part.name}.bias", bias[span])
        begin = span.stop
    return Linear(weight, bias)
