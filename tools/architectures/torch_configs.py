"""Makes a tiny config for every causal family of the installed transformers, from a table or from its settings'
names."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from exo_mesh_torch.families import TEXT_OF_FAMILIES
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tools.architectures.sizes import BY_NAME, LAYERS
from tools.architectures.torch_families import COMMON, FAMILIES, LARGER, NUM_LAYERS, VOCAB, WINDOW

_MORE: dict[str, Any] = {
    "dff": 64,
    "query_pre_attn_scalar": 8,
    "ffn_dim": 64,
    "encoder_layers": NUM_LAYERS,
    "decoder_layers": NUM_LAYERS,
    "num_decoder_layers": NUM_LAYERS,
    "local_attention": WINDOW,
    "unpadded_vocab_size": VOCAB,
    "shared_experts_intermediate_size": 32,
    "image_size": 28,
    "patch_size": 14,
}
_LAYER_NAMES = {name for name, value in BY_NAME.items() if value == LAYERS and "layer" in name}


def causal_families() -> list[str]:
    """Lists every `model_type` for which transformers has a causal language model, and those of larger models of which
    the engine runs the text layers."""
    return sorted({*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *TEXT_OF_FAMILIES}, key=str.lower)


def tiny_settings(family: str) -> dict[str, Any]:
    """Returns arguments for the family's config class."""
    if family in LARGER:
        text, more = LARGER[family]
        return {**more, "text_config": {"model_type": text, **tiny_settings(text)}}
    if family in FAMILIES:
        return {name: value for name, value in {**COMMON, **FAMILIES[family]}.items() if value is not None}
    return _by_name(CONFIG_MAPPING[family])


def _by_name(config_class: Any) -> dict[str, Any]:
    """Returns small values for the settings of a config class, also for those of the models inside."""
    names = {field.name for field in fields(config_class)} | set(config_class.attribute_map)
    names -= set(config_class.attribute_map.values())
    sizes = {**BY_NAME, **_MORE, **dict.fromkeys(_LAYER_NAMES, NUM_LAYERS), **COMMON}
    settings = {name: sizes[name] for name in sorted(names & set(sizes))}
    if {"kv_lora_rank", "num_key_value_heads"} <= names:  # every head has its own part of the latent
        settings["num_key_value_heads"] = COMMON["num_attention_heads"]
    for name in config_class.sub_configs:
        inner = getattr(config_class(), name, None)  # of a class that the family itself chooses
        if inner is not None:
            settings[name] = {"model_type": inner.model_type} | _by_name(type(inner))
    return settings
