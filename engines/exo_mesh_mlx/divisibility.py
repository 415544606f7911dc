"""Decides from config.json alone, without importing mlx, whether a model can be split over the ranks of a tensor group.

mlx-lm's `shard()` hardly checks: three KV heads over two ranks fail only in the forward pass. Each rank gets a share
of: attention heads with their keys and values, the inner width of the feed-forward layers, also of every expert, and in
some architectures the vocabulary. A share of a quantised tensor must hold whole quantisation groups.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from exo_mesh.domain.model_settings import text_config

SHARED_OUT = {
    "num_attention_heads": "attention heads",
    "num_key_value_heads": "KV heads",
    "num_attention_groups": "KV heads",
    "linear_num_key_heads": "key heads of linear attention",
    "linear_num_value_heads": "value heads of linear attention",
    "o_groups": "output groups of attention",
    "intermediate_size": "inner width",
    "dense_intermediate_size": "inner width of dense layers",
    "moe_intermediate_size": "inner width of an expert",
    "shared_intermediate_size": "inner width of the shared expert",
    "shared_expert_intermediate_size": "inner width of the shared expert",
    "share_expert_dim": "inner width of the shared expert",
    "ffn_hidden_size": "inner width",
    "expert_ffn_hidden_size": "inner width of an expert",
}
"""Keys of config.json that must be multiples of the number of ranks, and what they count."""

KV_HEADS = ("num_key_value_heads", "num_attention_groups")
REPEATS_KV_HEADS = ("qwen3_5", "qwen3_5_moe", "qwen3_5_text", "qwen3_5_moe_text")
"""Architectures that repeat KV heads if there are fewer than ranks."""

SHARES_VOCABULARY = (*REPEATS_KV_HEADS, "muse_spark")
SHARES_INDEX_HEADS = ("minimax_m3_vl",)


def division_obstacle(config: Mapping[str, Any], size: int) -> str:
    """The reason, with the numbers, why the tensors that `shard()` splits have no `size` equal shares; "" if they have.
    Raises ValueError for a size below 2."""
    if size < 2:
        raise ValueError(f"a tensor group has at least two ranks, not {size}")
    settings = {**text_config(config), "model_type": config.get("model_type")}
    uneven = [f"{value} {what} ({key})" for key, value, what in _shared_out(settings, size) if value % size]
    if uneven:
        return f"{size} ranks cannot share out evenly: {', '.join(uneven)}"
    return _quantisation_obstacle(config, settings, size)


def _shared_out(settings: Mapping[str, Any], size: int) -> Iterator[tuple[str, int, str]]:
    """(key, value, meaning) of everything that must be a multiple of size."""
    model_type = settings.get("model_type")
    for key, what in SHARED_OUT.items():
        value = settings.get(key)
        if not isinstance(value, int) or isinstance(value, bool):
            continue
        if key in KV_HEADS and settings.get("kv_lora_rank"):
            continue  # latent attention: the stored keys and values are whole on every rank
        if key in KV_HEADS and model_type in REPEATS_KV_HEADS and size % value == 0:
            continue
        yield key, value, what
    if model_type in SHARES_INDEX_HEADS and settings.get("index_n_heads"):
        yield "index_n_heads", settings["index_n_heads"], "index heads"
    tied = settings.get("tie_word_embeddings", False)
    if model_type in SHARES_VOCABULARY and not tied and settings.get("vocab_size"):
        yield "vocab_size", settings["vocab_size"], "token ids"


def _quantisation_obstacle(config: Mapping[str, Any], settings: Mapping[str, Any], size: int) -> str:
    """The reason why shares of quantised tensors would not hold whole groups, or "". A tensor that is split along its
    input axis (outputs of attention, and the inner width) has one scale for each group of inputs."""
    quantisation = config.get("quantization") or config.get("quantization_config")
    group_sizes = sorted(_group_sizes(quantisation)) if isinstance(quantisation, Mapping) else []
    for key, width, what in _split_inputs(settings):
        for group_size in group_sizes:
            if width // size % group_size:
                return (
                    f"{width} {what} ({key}) over {size} ranks are {width // size} each, "
                    f"which is not a multiple of the quantisation group of {group_size}"
                )
    return ""


def _group_sizes(quantisation: Mapping[str, Any]) -> set[int]:
    """Group sizes of the whole model and of modules with their own settings; embeddings and head are not split."""
    own = [value for name, value in quantisation.items() if isinstance(value, Mapping) and "layers." in name]
    found = [settings.get("group_size") for settings in (quantisation, *own)]
    return {value for value in found if isinstance(value, int) and value > 0}


def _split_inputs(settings: Mapping[str, Any]) -> Iterator[tuple[str, int, str]]:
    """(key, inputs, what they are) of tensors that are split along their input axis."""
    for key, what in SHARED_OUT.items():
        value = settings.get(key)
        if "width" in what and isinstance(value, int):
            yield key, value, what
    heads = settings.get("num_attention_heads")
    if isinstance(heads, int) and "o_groups" not in settings:
        hidden = settings.get("hidden_size") or 0
        width = settings.get("v_head_dim") or settings.get("head_dim") or hidden // max(1, heads)
        yield "num_attention_heads", heads * width, "outputs of attention"
