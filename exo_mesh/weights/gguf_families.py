"""The model families whose GGUF files are read like checkpoints: names in both worlds, and how tensors differ. Pure.

A family is described as the converters that write GGUF files describe it: which tensors they rename, whose rows they
reorder, and to which norms they add one. Files of other families keep their names; only llama.cpp itself runs them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import msgspec

_ATTENTION = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
}
_DENSE = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_PLAIN = {**_ATTENTION, **_DENSE, "ffn_norm": "post_attention_layernorm"}
_EXPERTS = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.switch_mlp.gate_proj",
    "ffn_up_exps": "mlp.switch_mlp.up_proj",
    "ffn_down_exps": "mlp.switch_mlp.down_proj",
}
_SHARED_EXPERT = {
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
_FOUR_NORMS = {
    **_ATTENTION,
    **_DENSE,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_OUTSIDE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}

ROPE_FACTORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""Tensors that belong to the config: divisors of the frequencies of the rotary embedding."""

_IN_LAYER = re.compile(r"blk\.(0|[1-9][0-9]{0,8})\.([a-z_]+)\.(weight|bias)")
_BESIDE = re.compile(r"([a-z_]+)\.(weight|bias)")


class GgufFamily(msgspec.Struct, frozen=True):
    """One value of general.architecture.

    model_type: of config.json. names: of a layer's modules. interleaved: the rows of queries and keys are in the order
    of llama.cpp's rotary embedding, which pairs neighbours instead of halves. plus_one: one was added to the weights of
    all norms. experts: model_type and names of a file with experts, if they differ.
    """

    model_type: str
    names: Mapping[str, str] = msgspec.field(default_factory=lambda: _PLAIN)
    interleaved: bool = False
    plus_one: bool = False
    experts: GgufFamily | None = None


_MIXTRAL = {
    **_ATTENTION,
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": "block_sparse_moe.switch_mlp.gate_proj",
    "ffn_up_exps": "block_sparse_moe.switch_mlp.up_proj",
    "ffn_down_exps": "block_sparse_moe.switch_mlp.down_proj",
}

FAMILIES: Mapping[str, GgufFamily] = {
    "llama": GgufFamily("llama", interleaved=True, experts=GgufFamily("mixtral", _MIXTRAL, interleaved=True)),
    "smollm3": GgufFamily("smollm3", interleaved=True),
    "granite": GgufFamily("granite", interleaved=True),
    "qwen2": GgufFamily("qwen2"),
    "qwen3": GgufFamily("qwen3"),
    "qwen2moe": GgufFamily("qwen2_moe", {**_PLAIN, **_EXPERTS, **_SHARED_EXPERT}),
    "qwen3moe": GgufFamily("qwen3_moe", {**_PLAIN, **_EXPERTS}),
    "gemma": GgufFamily("gemma", plus_one=True),
    "gemma2": GgufFamily("gemma2", _FOUR_NORMS, plus_one=True),
    "gemma3": GgufFamily("gemma3_text", _FOUR_NORMS, plus_one=True),
    "olmo2": GgufFamily(
        "olmo2",
        {
            **_ATTENTION,
            **_DENSE,
            "post_attention_norm": "post_attention_layernorm",
            "post_ffw_norm": "post_feedforward_layernorm",
        },
    ),
    "phi3": GgufFamily("phi3", {**_PLAIN, "attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}),
}
"""{value of general.architecture: family}."""


def family_of(architecture: str, num_experts: int) -> GgufFamily | None:
    """The family of a file; None if it is not supported."""
    found = FAMILIES.get(architecture)
    return found.experts if found is not None and num_experts and found.experts is not None else found


def checkpoint_name(family: GgufFamily, name: str) -> str | None:
    """The name that a tensor of a GGUF file has in checkpoints of transformers, with the experts of a layer stacked as
    mlx-lm stacks them; None for a tensor that does not belong to the family."""
    if (found := _IN_LAYER.fullmatch(name)) is not None:
        module = family.names.get(found[2])
        return None if module is None else f"model.layers.{found[1]}.{module}.{found[3]}"
    found = _BESIDE.fullmatch(name)
    module = None if found is None else _OUTSIDE.get(found[1])
    return None if found is None or module is None else f"{module}.{found[2]}"
