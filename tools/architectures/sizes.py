"""Tiny values for the settings of mlx-lm's ModelArgs, by their names. Windows are shorter than the prompt."""

from __future__ import annotations

from typing import Any

LAYERS = 6
HIDDEN = 32
HEADS = 4
KV_HEADS = 2
HEAD_DIM = 8
VOCAB = 96
WINDOW = 16
EXPERTS = 4

_LAYERS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers", "num_transformer_layers")
_HIDDEN = ("hidden_size", "hidden_dim", "d_model", "n_embd", "model_dim", "block_dim")
_HEADS = ("num_attention_heads", "num_heads", "n_head", "n_heads", "swa_num_attention_heads", "num_swa_attention_heads")
_KV_HEADS = (
    "num_key_value_heads", "num_kv_heads", "n_kv_heads", "swa_num_key_value_heads", "num_swa_key_value_heads",
    "num_attention_groups",
)  # fmt: skip
_HEAD_DIMS = (
    "head_dim", "v_head_dim", "qk_rope_head_dim", "qk_nope_head_dim", "swa_head_dim", "swa_v_head_dim", "kv_channels",
    "hidden_size_per_head", "index_head_dim", "mamba_d_head", "mamba_head_dim", "rotary_dim", "global_head_dim",
)  # fmt: skip
_VOCAB = ("vocab_size", "num_vocab", "vocab_size_per_layer_input")
_WINDOWS = (
    "sliding_window", "window_size", "attention_window_size", "sliding_window_size", "loop_window_size",
    "attention_chunk_size", "index_topk",
)  # fmt: skip
_EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
_TOP_EXPERTS = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "moe_top_k", "top_k_experts")
_ONE = (
    "num_shared_experts", "n_shared_experts", "num_shared_expert", "moe_num_shared_experts", "n_group", "topk_group",
    "num_expert_group", "first_k_dense_replace", "num_dense_layers", "mamba_n_groups", "n_groups", "moe_layer_freq",
    "decoder_sparse_step", "moe_layer_interval", "group_norm_size", "n_shared_head",
)  # fmt: skip
_WIDE = (
    "intermediate_size", "block_ff_dim", "intermediate_size_mlp", "dense_intermediate_size", "n_inner",
    "ffn_hidden_size", "ff_intermediate_size",
)  # fmt: skip
_NARROW = (
    "moe_intermediate_size", "shared_expert_intermediate_size", "moe_shared_expert_intermediate_size",
    "shared_intermediate_size", "expert_ffn_hidden_size", "share_expert_dim", "moe_hidden_size", "moe_latent_size",
    "linear_key_head_dim", "linear_value_head_dim",
)  # fmt: skip
_RANKS = (
    "q_lora_rank", "kv_lora_rank", "o_lora_rank", "dim_model_base", "state_size", "mamba_d_state", "ssm_state_size",
)  # fmt: skip
_LOW_RANKS = (
    "a_low_rank_dim", "v_low_rank_dim", "gate_low_rank_dim", "decay_low_rank_dim", "laurel_rank",
    "hidden_size_per_layer_input",
)  # fmt: skip
_CONTEXTS = ("max_position_embeddings", "n_positions", "n_ctx", "block_size", "model_max_length")
_EPSILONS = ("rms_norm_eps", "norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "layernorm_epsilon")
_KERNELS = ("conv_kernel", "conv_L_cache", "conv_window", "mamba_d_conv", "conv1d_width", "linear_conv_kernel_dim")

BY_NAME: dict[str, Any] = {
    **dict.fromkeys(_LAYERS, LAYERS),
    **dict.fromkeys(_HIDDEN, HIDDEN),
    **dict.fromkeys(_HEADS, HEADS),
    **dict.fromkeys(_KV_HEADS, KV_HEADS),
    **dict.fromkeys(_HEAD_DIMS, HEAD_DIM),
    **dict.fromkeys(_VOCAB, VOCAB),
    **dict.fromkeys(_WINDOWS, WINDOW),
    **dict.fromkeys(_EXPERTS, EXPERTS),
    **dict.fromkeys(_TOP_EXPERTS, 2),
    **dict.fromkeys(_ONE, 1),
    **dict.fromkeys(_WIDE, 64),
    **dict.fromkeys(_NARROW, 32),
    **dict.fromkeys(_RANKS, 16),
    **dict.fromkeys(_LOW_RANKS, 8),
    **dict.fromkeys(_CONTEXTS, 512),
    **dict.fromkeys(_EPSILONS, 1e-5),
    **dict.fromkeys(_KERNELS, 3),
    "rope_theta": 10000.0,
    "swa_rope_theta": 5000.0,
    "rope_local_base_freq": 5000.0,
    "sliding_window_pattern": 3,
    "full_attention_interval": 3,
    "partial_rotary_factor": 0.5,
    "linear_num_value_heads": 2,
    "linear_num_key_heads": 2,
    "index_n_heads": 2,
    "mamba_n_heads": 4,
    "mamba_num_heads": 4,
    "query_pre_attn_scalar": 8.0,
    "hidden_act": "silu",
}
"""Applies to required and optional settings alike."""


def layers_alternate(usual: Any, other: Any, *others_at: int, layers: int = LAYERS) -> list[Any]:
    """Returns `usual` for every layer except those at `others_at`."""
    return [other if index in others_at else usual for index in range(layers)]
