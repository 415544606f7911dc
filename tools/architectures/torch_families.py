"""Tiny configs of many families of transformers, eight layers each, with windows shorter than the test's prompt."""

from __future__ import annotations

from typing import Any

VOCAB = 96
NUM_LAYERS = 8
WINDOW = 16

COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
MOE: dict[str, Any] = {
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
LATENT: dict[str, Any] = {
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
SLIDING: dict[str, Any] = {"sliding_window": WINDOW, "use_sliding_window": True}
MAMBA: dict[str, Any] = {
    "mamba_d_ssm": 64, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_d_state": 16,
    "mamba_expand": 2, "mamba_chunk_size": 8,
}  # fmt: skip
LINEAR: dict[str, Any] = {
    "linear_num_value_heads": 2, "linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 3,
}  # fmt: skip
HYBRID_TYPES = ["linear_attention", "linear_attention", "linear_attention", "full_attention"] * 2

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": SLIDING,
    "ministral": SLIDING,
    "ministral3": {},
    "qwen2": {},
    "qwen3": {},
    "qwen2_moe": {**MOE, "decoder_sparse_step": 1},
    "qwen3_moe": {**MOE, "decoder_sparse_step": 1},
    "qwen3_next": {**MOE, **LINEAR, "layer_types": HYBRID_TYPES, "partial_rotary_factor": 0.5},
    "qwen3_5_text": {**LINEAR, "layer_types": HYBRID_TYPES},
    "mixtral": MOE,
    "gemma": {},
    "gemma2": SLIDING,
    "gemma3_text": SLIDING,
    "gemma3n_text": {
        **SLIDING, "num_kv_shared_layers": 3, "vocab_size_per_layer_input": VOCAB, "hidden_size_per_layer_input": 8,
        "laurel_rank": 8, "intermediate_size": [64] * NUM_LAYERS, "activation_sparsity_pattern": [0.0] * NUM_LAYERS,
        "layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 2,
    },
    "gemma4_text": {
        **SLIDING, "num_kv_shared_layers": 3, "vocab_size_per_layer_input": VOCAB, "hidden_size_per_layer_input": 8,
        "global_head_dim": 16, "layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 2,
    },
    "vaultgemma": SLIDING,
    "gpt_oss": {**SLIDING, **MOE},
    "phi": {},
    "phi3": {"sliding_window": WINDOW},
    "phimoe": {**MOE, "sliding_window": WINDOW},
    "olmo": {},
    "olmo2": {},
    "olmo3": SLIDING,
    "olmoe": MOE,
    "flex_olmo": MOE,
    "glm": {},
    "glm4": {},
    "glm4_moe": {**LATENT, "num_key_value_heads": 2},
    "deepseek_v2": {**LATENT, "topk_method": "greedy"},
    "deepseek_v3": LATENT,
    "youtu": LATENT,
    "minicpm3": LATENT,
    "dots1": {**LATENT, **SLIDING, "num_key_value_heads": 2},
    "granite": {"embedding_multiplier": 3.0, "residual_multiplier": 0.5, "logits_scaling": 2.0},
    "granitemoe": {**MOE, "embedding_multiplier": 3.0},
    "granitemoehybrid": {
        **MOE, **MAMBA, "shared_intermediate_size": 32, "layer_types": (["mamba"] * 3 + ["attention"]) * 2,
    },
    "cohere": {},
    "cohere2": SLIDING,
    "exaone4": SLIDING,
    "smollm3": {},
    "starcoder2": {"sliding_window": WINDOW},
    "stablelm": {},
    "gpt_neox": {},
    "gpt2": {"n_embd": 32, "n_layer": NUM_LAYERS, "n_head": 4, "n_positions": 512},
    "gptj": {"n_embd": 32, "n_layer": NUM_LAYERS, "n_head": 4, "n_positions": 512, "rotary_dim": 8},
    "gpt_bigcode": {"n_embd": 32, "n_layer": NUM_LAYERS, "n_head": 4, "n_positions": 512},
    "gpt_neo": {
        "num_layers": NUM_LAYERS, "num_heads": 4, "attention_types": [[["global", "local"], 4]], "window_size": WINDOW,
    },
    "opt": {"ffn_dim": 64, "word_embed_proj_dim": 32},
    "bloom": {"n_layer": NUM_LAYERS, "n_head": 4},
    "falcon": {"multi_query": False, "alibi": False, "head_dim": None},
    "mpt": {"d_model": 32, "n_heads": 4, "n_layers": NUM_LAYERS, "max_seq_len": 512},
    "codegen": {"n_embd": 32, "n_layer": NUM_LAYERS, "n_head": 4, "n_positions": 512, "rotary_dim": 8, "n_ctx": 512},
    "persimmon": {},
    "nemotron": {},
    "ernie4_5": {},
    "ernie4_5_moe": {**MOE, "moe_num_experts": 4, "moe_k": 2, "moe_num_shared_experts": 1},
    "seed_oss": {},
    "apertus": {},
    "arcee": {},
    "hunyuan_v1_dense": {},
    "hunyuan_v1_moe": {**MOE, "moe_topk": 2, "num_shared_expert": 1},
    "helium": {},
    "llama4_text": {
        **MOE, "intermediate_size_mlp": 64, "attention_chunk_size": WINDOW, "num_experts_per_tok": 1,
        "moe_layers": [1, 3, 5, 7], "no_rope_layers": [1, 1, 1, 0] * 2,
    },
    "nanochat": {},
    "diffllama": {},
    "jetmoe": {**MOE, "kv_channels": 8},
    "minimax_m2": MOE,
    "lfm2": {
        "conv_L_cache": 3, "block_auto_adjust_ff_dim": False, "full_attn_idxs": [2, 5],
        "layer_types": ["conv", "conv", "full_attention"] * 2 + ["conv", "conv"],
    },
    "lfm2_moe": {
        **MOE, "conv_L_cache": 3, "num_dense_layers": 1,
        "layer_types": ["conv", "conv", "full_attention"] * 2 + ["conv", "conv"],
    },
    "mamba": {"state_size": 8, "intermediate_size": 64, "time_step_rank": 4},
    "mamba2": {"num_heads": 8, "head_dim": 8, "state_size": 16, "n_groups": 1, "chunk_size": 8},
    "falcon_mamba": {"state_size": 8, "intermediate_size": 64, "time_step_rank": 4},
    "falcon_h1": MAMBA,
    "bamba": {**MAMBA, "attn_layer_indices": [3, 7]},
    "jamba": {**MOE, "mamba_d_state": 8, "mamba_dt_rank": 4, "attn_layer_period": 4, "attn_layer_offset": 3},
    "nemotron_h": {
        "hybrid_override_pattern": "M-M*M-M*", "mamba_num_heads": 8, "mamba_head_dim": 8, "ssm_state_size": 16,
        "n_groups": 1, "chunk_size": 8, **MOE, "n_routed_experts": 4,
    },
    "zamba2": {
        **MAMBA, "mamba_ngroups": 1, "n_mamba_heads": 8, "layers_block_type": (["mamba"] * 3 + ["hybrid"]) * 2,
        "num_mem_blocks": 1, "use_shared_attention_adapter": False, "hybrid_layer_ids": [3, 7],
    },
    "recurrent_gemma": {"attention_window_size": WINDOW, "lru_width": 32},
    "kimi_linear": {**LATENT},
    "afmoe": {**SLIDING, **MOE, "num_dense_layers": 1, "num_shared_experts": 1},
    "bitnet": {},
    "solar_open": LATENT,
    "exaone_moe": {**SLIDING, **LATENT, "num_key_value_heads": 2, **MOE, "num_shared_experts": 1},
    "laguna": {**MOE, **SLIDING},
    "olmo_hybrid": {**LINEAR, "layer_types": HYBRID_TYPES},
    "glm_moe_dsa": {**LATENT, "index_n_heads": 2, "index_head_dim": 8, "index_topk": 8},
    "deepseek_v32": {**LATENT, "index_n_heads": 2, "index_head_dim": 8, "index_topk": 8},
    "axk2": {**LATENT, "head_dim": None, "index_n_heads": 2, "index_head_dim": 8, "index_topk": 8},
    "deepseek_v4": {
        **MOE, "num_key_value_heads": 1, "q_lora_rank": 16, "head_dim": 16, "o_groups": 2, "o_lora_rank": 8,
        "sliding_window": WINDOW, "index_n_heads": 2, "index_head_dim": 8, "index_topk": 4, "n_routed_experts": 4,
        "hc_mult": 2, "intermediate_size": None,
        "layer_types": ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"] * 2
        + ["compressed_sparse_attention"] * 2,
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
        "mlp_layer_types": ["hash_moe"] + ["moe"] * 7,
    },
    "dots3_note_text": {
        **LATENT, "index_n_heads": 2, "index_head_dim": 8, "index_topk": 8, "head_dim": 16,
        "shared_experts_intermediate_size": 32, "sliding_window_size": WINDOW, "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 4, "swa_q_lora_rank": 16, "swa_kv_lora_rank": 16, "swa_head_dim": 16,
        "swa_qk_nope_head_dim": 8, "swa_v_head_dim": 8,
    },
    "biogpt": {},
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}}},
    "qwen4_exp_text": {
        **MOE, **LINEAR, "layer_types": HYBRID_TYPES, "hc_count": 2, "hc_lowrank": 8, "ple_layer_ids": [2],
        "ple_embed_dim": 16, "heads_per_ngram": 2, "ngram_vocab_size_base": 50, "make_ngram_vocab_size_divisible_by": 8,
        "split_ngram_parts": 1, "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8,
        "indexer_budget": 8, "indexer_compress_ratio": 2,
    },
    "zaya": {**MOE, "num_experts_per_tok": 1, "router_hidden_size": 16, "rope_parameters": None},
    "dbrx": {
        "d_model": 32, "n_heads": 4, "n_layers": NUM_LAYERS, "max_seq_len": 512,
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 10000.0},
        "ffn_config": {"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "inkling2_loop_text": {
        **MOE, "n_routed_experts": 4, "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 8,
        "sliding_window_size": WINDOW, "d_rel": 4, "rel_extent": WINDOW, "unpadded_vocab_size": VOCAB,
        "layer_types": ["hybrid", "hybrid_sliding"] * 4, "n_layers_per_attn_res_block": 2,
        "loop_layer_index_start": 2, "loop_layer_index_end": 6, "loop_num_passes": 2, "loop_gate_rank": 8,
    },
    "glm5_next_text": {
        **LATENT, "qk_rope_head_dim": 0, "head_dim": 0, "index_n_heads": 2, "index_head_dim": 8, "index_topk": 8,
        "index_kpool": 2, "linear_head_dim": 8, "linear_num_heads": 4, "linear_conv_kernel_dim": 3, "hc_mult": 2,
        "layer_types": ["linear_attention", "linear_attention", "linear_attention", "indexed_attention"] * 2,
    },
    "hy_v4_vl_text": {
        **LATENT, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]},
    },
    "internlm3": {},
    "xglm": {"d_model": 32, "num_layers": NUM_LAYERS, "attention_heads": 4, "ffn_dim": 64},
}  # fmt: skip

_TOWER = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "patch_size": 14,
    "image_size": 28, "text_hidden_size": 32, "depth": 2, "num_heads": 4, "out_hidden_size": 32,
}  # fmt: skip
_ADAPTED = {"adapter_out_dim": COMMON["hidden_size"]}
_INKLING = {"vision_config": {"model_type": "inkling2_vision", **_TOWER}}
LARGER: dict[str, tuple[str, dict[str, Any]]] = {
    "dots3_note": ("dots3_note_text", {"vision_config": _ADAPTED, "audio_config": _ADAPTED}),
    "qwen4_exp": ("qwen4_exp_text", {}),
    "glm5_next": ("glm5_next_text", {"vision_config": _TOWER}),
    "hy_v4_vl": ("hy_v4_vl_text", {"vision_config": _TOWER}),
    "inkling2": ("inkling2_text", _INKLING),
    "inkling2_loop": ("inkling2_loop_text", _INKLING),
    "lfm3_vl": ("lfm3", {"vision_config": _TOWER}),
}
"""Models of several kinds of input: the family of their text layers, and settings besides."""
