"""Settings of architectures besides sizes: patterns of layer kinds, and values that must fit together."""

from __future__ import annotations

from typing import Any

from tools.architectures.sizes import LAYERS, layers_alternate

DROP: Any = object()
"""As a value: omit the setting, so that its default is used."""

TEXT_MODELS = {
    "gemma3": "gemma3_text",
    "gemma4": "gemma4_text",
    "kimi_k25": "deepseek_v3",
    "lfm2-vl": "lfm2",
    "mistral3": "ministral3",
    "pixtral": "llama",
    "prism_hadamard_qwen35": "qwen3_5",
    "qwen2_vl": "qwen2",
    "qwen3_5_moe": "qwen3_5",
    "qwen3_vl": "qwen3",
    "qwen3_vl_moe": "qwen3_moe",
}
"""For a multimodal architecture: the architecture whose settings its text_config has."""

_FULL, _SLIDING = "full_attention", "sliding_attention"
_WINDOWED = layers_alternate(_SLIDING, _FULL, 2, 5)
_LINEAR = layers_alternate("linear_attention", _FULL, 2, 5)
_CONV = layers_alternate("conv", _FULL, 2, 5)
_ROPES = {"full_attention": {"rope_theta": 10000.0}, "sliding_attention": {"rope_theta": 5000.0}}
_MOE_FROM_1 = layers_alternate(1, 0, 0)
_YARN = {"original_max_position_embeddings": 16, "rope_theta": 10000.0, "rope_type": "default", "type": "default"}
_LLAMA_4_ROPE = {**_YARN, "llama_4_scaling_beta": 0.1}
_KDA = {"kda_layers": [1, 2, 4, 5], "full_attn_layers": [3, 6]} | {
    "num_heads": 4,
    "head_dim": 8,
    "short_conv_kernel_size": 3,
}
_QWEN_ROPE = {"type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 0]}

FAMILIES: dict[str, dict[str, Any]] = {
    "afm7": {"num_kv_reuse_layers": 2, "hidden_dim_scale_factor": 2.0},
    "afmoe": {"layer_types": _WINDOWED},
    "baichuan_m1": {"conv_window": 2, "sliding_window_layers": [1, 2, 4]},
    "bailing_hybrid": {"layer_group_size": 3},
    "bailing_moe_linear": {"layer_group_size": 3},
    "bailing_moe_v3": {
        "layer_group_size": 3, "model_type": "bailing_hybrid", "architectures": ["BailingMoeV3ForCausalLM"],
    },
    "dbrx": {
        "ffn_config": {"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2},
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 10000.0},
    },
    "deepseek_v2": {"rope_scaling": {"type": "yarn", "factor": 2, "original_max_position_embeddings": 16}},
    "deepseek_v41": {
        "compress_ratios": [0, 2, 2, 2, 2, 0], "kv_source_layer_ids": [1, 3], "index_source_layer_ids": [1, 3],
        "o_groups": 2, "hc_mult": 2, "qk_rope_head_dim": 4,
    },
    "exaone4": {"sliding_window_pattern": "LLG"},
    "exaone_moe": {"layer_types": _WINDOWED, "is_moe_layer": layers_alternate(True, False, 0)},
    "falcon_h1": {"mamba_d_ssm": 32, "lm_head_multiplier": 1.0},
    "gear": {"layer_types": ["conv_mixer", _SLIDING, _FULL, "conv_mixer", _SLIDING, _FULL]},
    "gemma3n": {
        "layer_types": [_SLIDING, _FULL, _SLIDING, _SLIDING, _FULL, _SLIDING], "num_kv_shared_layers": 2,
        "activation_sparsity_pattern": layers_alternate(0.0, 0.5, 0, 1), "altup_num_inputs": 3,
        "altup_coef_clip": 120.0, "altup_active_idx": 0, "altup_correct_scale": True, "final_logit_softcapping": 30.0,
    },
    "gemma4_text": {"num_kv_shared_layers": 2, "layer_types": [_SLIDING, _FULL, _SLIDING, _FULL, _SLIDING, _FULL]},
    "glm_moe_dsa": {
        "topk_method": "noaux_tc", "scoring_func": "sigmoid",
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    },
    "granitemoehybrid": {
        "layer_types": layers_alternate("mamba", "attention", 2, 5), "mamba_n_heads": 4, "mamba_d_head": 16,
        "mamba_proj_bias": False, "mamba_conv_bias": True,
    },
    "hunyuan": {
        "use_cla": True, "cla_share_factor": 2, "rope_scaling": {"alpha": 1.0, "factor": 1.0, "type": "dynamic"},
    },
    "jamba": {
        "attn_layer_offset": 1, "attn_layer_period": 3, "expert_layer_offset": 1, "expert_layer_period": 2,
        "mamba_expand": 2,
    },
    "kimi_k3": {
        "hidden_act": "situ", "activation_situ_beta": 1.0, "linear_attn_config": _KDA, "attn_res_block_size": 2,
        "num_key_value_heads": 4,
    },
    "kimi_linear": {"linear_attn_config": _KDA, "num_key_value_heads": 4},
    "laguna": {"layer_types": _WINDOWED, "rope_parameters": _ROPES},
    "lfm2": {"layer_types": _CONV, "block_multiple_of": 16, "block_ffn_dim_multiplier": 1.0},
    "lfm2_moe": {"layer_types": _CONV},
    "lille-130m": {"n_embd": 128},
    "llama": {"layer_types": _WINDOWED},
    "llama4": {"num_experts_per_tok": 1, "interleave_moe_layer_step": 2},
    "llama4_text": {"no_rope_layers": layers_alternate(1, 0, 2, 5)},
    "longcat_flash": {
        "zero_expert_type": "identity", "attention_method": "MLA", "mla_scale_q_lora": True, "mla_scale_kv_lora": True,
    },
    "longcat_flash_ngram": {"mla_scale_q_lora": True, "mla_scale_kv_lora": True, "ngram_vocab_size_ratio": 3},
    "mamba2": {"time_step_limit": [0.01, 100.0], "time_step_rank": "auto"},
    "mellum": {"layer_types": _WINDOWED, "rope_parameters": _ROPES},
    "mimo_v2_flash": {
        "moe_layer_freq": _MOE_FROM_1, "hybrid_layer_pattern": layers_alternate(1, 0, 0, 3), "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
    },
    "minicpm3": {"rope_scaling": {"original_max_position_embeddings": 16, "long_factor": [1.0], "short_factor": [1.0]}},
    "minimax_m3_vl": {
        "moe_layer_freq": _MOE_FROM_1, "index_block_size": 4, "index_topk_blocks": 2,
        "sparse_attention_freq": _MOE_FROM_1,
    },
    "ministral3": {"layer_types": layers_alternate(_SLIDING, _FULL, 0, 5), "rope_parameters": _LLAMA_4_ROPE},
    "mistral4": {"rope_parameters": _LLAMA_4_ROPE},
    "muse_glimmer": {"layer_types": _WINDOWED},
    "muse_spark": {
        "rope_parameters": {"rope_theta": 10000.0}, "layer_rope_theta": layers_alternate(10000.0, 0.0, 2, 5),
        "layer_types": _WINDOWED, "num_shared_experts": 0,
    },
    "nanbeige": {"num_loops": 2},
    "nemotron-nas": {
        "block_configs": layers_alternate(
            {"attention": {"n_heads_in_group": 2}, "ffn": {"ffn_mult": 2.0}},
            {"attention": {"no_op": True}, "ffn": {"ffn_mult": 1.0}},
            1, 3,
        ),
    },
    "nemotron_h": {"hybrid_override_pattern": list("M*-MEM*"), "num_hidden_layers": 7, "routed_scaling_factor": 1.5},
    "olmo3": {"layer_types": _WINDOWED},
    "olmo_hybrid": {"layer_types": _LINEAR},
    "openelm": {
        "num_query_heads": [4] * LAYERS, "num_kv_heads": [2] * LAYERS, "ffn_multipliers": [2.0] * LAYERS,
        "ffn_dim_divisor": 8,
    },
    # its forward masks token ids up to 100,351, regardless of vocab_size
    "phi3small": {
        "vocab_size": 100352, "dense_attention_every_n_layers": 2, "gegelu_limit": 20.0, "blocksparse_block_size": 32,
        "blocksparse_num_local_blocks": 1, "blocksparse_vert_stride": 2,
    },
    "plamo2": {"full_attention_idx": [2, 5]},
    "prism_hadamard_qwen35": {  # its quantisation has groups of 128, also in each of two shares
        "hidden_size": 128, "head_dim": 64, "intermediate_size": 256, "moe_intermediate_size": 256,
        "shared_expert_intermediate_size": 256,
    },
    "qwen3_next": {"norm_topk_prob": True},
    "qwen3_5": {"rope_parameters": _QWEN_ROPE, "num_experts": 0},
    "qwen3_5_moe": {"num_experts": 4},
    "recurrent_gemma": {"block_types": ["recurrent", "recurrent", "attention"], "logits_soft_cap": 30.0},
    "smollm3": {"layer_types": _WINDOWED},
    "spark2_5": {"hidden_act": "gelu", "layer_types": _WINDOWED, "rope_parameters": _ROPES},
    "step3p5": {"layer_types": _WINDOWED, "moe_layers_enum": "2,3,4,5", "attention_other_setting": DROP},
}  # fmt: skip
"""By architecture. Settings of a text model also apply inside the text_config of models that contain it."""

OUTER: dict[str, dict[str, Any]] = {
    "prism_hadamard_qwen35": {
        "schema_version": 1,
        "tensor_namespace": "mlx-lm-text",
        "quantization": {"bits": 2, "group_size": 128, "mode": "affine"},
        "modules": [{"path": "model.layers.0.mlp.gate_proj", "embedding": False, "dtype": "float16", "block": 0}],
    },
}  # fmt: skip
"""Settings beside text_config."""
