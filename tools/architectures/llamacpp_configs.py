"""The architectures of the library, and metadata for a tiny model of each."""

from __future__ import annotations

from exo_mesh_llamacpp.container import Value

LAYERS = 8
VOCAB = 256
HIDDEN = 64

_NAMES = """
afmoe apertus arcee arctic arwkv7 baichuan bailingmoe bailingmoe2 bailingmoe3 bert bitnet bloom chameleon chatglm
codeshell cogvlm cohere2 cohere2moe command-r dbrx deci deepseek deepseek2 deepseek2-ocr deepseek32 deepseek4 dots1
dots3note dream ernie4_5 ernie4_5-moe eurobert exaone exaone-moe exaone4 falcon falcon-h1 gemma gemma-embedding
gemma-embedding2 gemma2 gemma3 gemma3n gemma4 glm-dsa glm4 glm4moe glm5-next gpt-oss gpt2 gptneox granite granite_swa
granitehybrid granitemoe graniteswitch grok grovemoe hrm_text hunyuan-dense hunyuan-moe hunyuan_vl hy_v3 hy_v4
internlm2 jais jais2 jamba k2-horizon kimi-k3 kimi-linear laguna lfm2 lfm2moe llada llada-moe llama llama-embed llama4
maincoder mamba mamba2 maple mellum mimo2 minicpm minicpm3 minimax-01 minimax-m2 mistral3 mistral4 modern-bert mpt
nanbeige nemotron nemotron_h nemotron_h_moe neo-bert nomic-bert nomic-bert-moe olmo olmo2 olmoe openelm orion
paddleocr pangu-embedded phi2 phi3 phimoe plamo plamo2 plamo3 plm qwen qwen2 qwen2moe qwen2vl qwen3 qwen35 qwen35moe
qwen3moe qwen3next qwen3vl qwen3vlmoe qwen4exp refact rnd1 rwkv6 rwkv6qwen2 rwkv7 seed_oss smallthinker smollm3
spark2_5 stablelm starcoder starcoder2 step35 t5 talkie xverse
"""

ARCHITECTURES = tuple(_NAMES.split())
"""Those of xllamacpp 2026.10.11549, without encoders of sound and pictures."""

DENSE: dict[str, Value] = {
    "context_length": 512,
    "embedding_length": HIDDEN,
    "block_count": LAYERS,
    "feed_forward_length": 96,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "attention.layer_norm_epsilon": 1e-5,
    "rope.dimension_count": 16,
    "rope.freq_base": 10000.0,
    "vocab_size": VOCAB,
}
"""Metadata of every model."""

EXPERTS: dict[str, Value] = {
    "expert_count": 4,
    "expert_used_count": 2,
    "expert_feed_forward_length": 48,
    "expert_shared_feed_forward_length": 48,
    "expert_shared_count": 1,
    "leading_dense_block_count": 1,
    "expert_weights_scale": 1.0,
    "expert_weights_norm": True,
    "expert_gating_func": 1,
    "expert_group_count": 1,
    "expert_group_used_count": 1,
    "interleave_moe_layer_step": 1,
    "moe_every_n_layers": 1,
}
"""Added for the variant with experts."""

ON_DEMAND: dict[str, Value] = {
    **EXPERTS,
    "attention.sliding_window": 16,
    "attention.sliding_window_pattern": 4,
    "attention.key_length": 16,
    "attention.value_length": 16,
    "attention.q_lora_rank": 24,
    "attention.kv_lora_rank": 24,
    "attention.key_length_mla": 24,
    "attention.value_length_mla": 16,
    "attention.clamp_kqv": 8.0,
    "attention.max_alibi_bias": 8.0,
    "attention.group_norm_groups": 1,
    "attention.group_norm_epsilon": 1e-5,
    "attention.scale": 0.25,
    "attention.causal": True,
    "attention.indexer.head_count": 2,
    "attention.indexer.key_length": 16,
    "attention.indexer.top_k": 64,
    "attention.shared_kv_layers": 0,
    "attention.token_shift_count": 2,
    "attention.decay_lora_rank": 16,
    "attention.iclr_lora_rank": 16,
    "attention.value_residual_mix_lora_rank": 16,
    "attention.gate_lora_rank": 16,
    "attention.output_scale": 1.0,
    "attention.temperature_length": 256,
    "attention.temperature_scale": 0.1,
    "rope.scaling.type": "none",
    "rope.scaling.yarn_log_multiplier": 0.1,
    "rope.dimension_sections": (4, 4, 0, 0),
    "rope.freq_base_swa": 10000.0,
    "logit_scale": 1.0,
    "embedding_scale": 1.5,
    "residual_scale": 0.75,
    "ssm.conv_kernel": 4,
    "ssm.inner_size": 128,
    "ssm.state_size": 16,
    "ssm.time_step_rank": 8,
    "ssm.group_count": 2,
    "shortconv.l_cache": 3,
    "wkv.head_size": 16,
    "time_mix_extra_dim": 16,
    "time_decay_extra_dim": 16,
    "rescale_every_n_layers": 0,
    "token_shift_count": 2,
    "full_attention_interval": 4,
    "altup.num_inputs": 4,
    "altup.active_idx": 0,
    "embedding_length_per_layer_input": 8,
    "xielu.alpha_n": (0.8,) * LAYERS,
    "xielu.alpha_p": (0.8,) * LAYERS,
    "xielu.beta": (0.5,) * LAYERS,
    "xielu.eps": (-1e-6,) * LAYERS,
    "kda.head_dim": 16,
    "n_deepstack_layers": 0,
    "swiglu_clamp_exp": (7.0,) * LAYERS,
    "swiglu_clamp_shexp": (7.0,) * LAYERS,
    "use_parallel_residual": True,
    "decoder_block_count": LAYERS,
    "decoder_start_token_id": 0,
    "attention.relative_buckets_count": 32,
    "pooling_type": 0,
    "expert_chunk_feed_forward_length": 24,
    "expert_group_scale": 0.5,
    "experts_per_group": 2,
    "moe_latent_size": 32,
}
"""Values of keys that the library asks for by their names."""

_HYBRID_KV = tuple(2 if index % 4 in (1, 3) else 0 for index in range(LAYERS))

_THIRD_KV, _THIRD_FF = (0, 2, 0, 0, 2, 0, 0, 2), (0, 0, 96, 0, 0, 96, 0, 0)
_WINDOWS = tuple(index % 4 != 3 for index in range(LAYERS))
_SSM: dict[str, Value] = {
    "ssm.conv_kernel": 4,
    "ssm.inner_size": 128,
    "ssm.state_size": 16,
    "ssm.time_step_rank": 8,
    "ssm.group_count": 2,
}
_MLA: dict[str, Value] = {
    "attention.head_count_kv": 1,
    "attention.key_length": 32,
    "attention.value_length": 24,
    "attention.key_length_mla": 24,
    "attention.value_length_mla": 16,
    "attention.kv_lora_rank": 24,
    "attention.q_lora_rank": 24,
    "rope.dimension_count": 8,
}
_NO_LAYER_INPUT: dict[str, Value] = {"embedding_length_per_layer_input": 0}
_ROPE_8: dict[str, Value] = {"rope.dimension_count": 8}
_PATTERN: dict[str, Value] = {"attention.sliding_window": 16, "attention.sliding_window_pattern": _WINDOWS}

SPECIAL: dict[str, dict[str, Value]] = {
    "gemma3": {"attention.sliding_window": 16},
    "gemma2": {"attention.sliding_window": 16},
    "granite": {"embedding_scale": 1.5, "residual_scale": 0.75, "attention.scale": 0.3, "logit_scale": 1.5},
    "granitemoe": {"embedding_scale": 1.5, "residual_scale": 0.75, "attention.scale": 0.3, "logit_scale": 1.5},
    "granitehybrid": {"attention.head_count_kv": _HYBRID_KV, **_SSM, "embedding_scale": 1.5},
    "falcon-h1": _SSM,
    "mamba": _SSM,
    "mamba2": _SSM,
    "deepseek2": _MLA,
    "mistral4": _MLA,
    "deepseek32": _MLA,
    "glm-dsa": _MLA,
    "olmoe": {"attention.head_count_kv": 4},
    "dots1": {"attention.head_count_kv": 4},
    "paddleocr": {"rope.dimension_sections": (4, 4, 0, 0)},
    "gemma4": {**_PATTERN, "attention.key_length_swa": 16, "attention.value_length_swa": 16, **_NO_LAYER_INPUT},
    "spark2_5": _PATTERN,
    "maple": _PATTERN,
    "exaone-moe": {"attention.sliding_window": 16},
    "plm": _MLA,
    "minicpm3": {"attention.q_lora_rank": 24, "attention.kv_lora_rank": 24, "attention.key_length": 24, **_ROPE_8},
    "granite_swa": _PATTERN,
    "mimo2": _PATTERN,
    "laguna": _PATTERN,
    "cohere2moe": {**_PATTERN, "logit_scale": 0.5},
    "mellum": {"attention.sliding_window": 16},
    "plamo3": {"attention.sliding_window": 16},
    "step35": _PATTERN,
    "afmoe": _PATTERN,
    "lfm2": {"attention.head_count_kv": _HYBRID_KV},
    "lfm2moe": {"attention.head_count_kv": _HYBRID_KV},
    "jamba": {"attention.head_count_kv": _HYBRID_KV, **_SSM},
    "nemotron_h": {"attention.head_count_kv": _THIRD_KV, "feed_forward_length": _THIRD_FF, **_SSM},
    "nemotron_h_moe": {"attention.head_count_kv": _THIRD_KV, "feed_forward_length": _THIRD_FF, **_SSM},
    "plamo2": {"attention.head_count_kv": _HYBRID_KV, **_SSM, "ssm.group_count": 0},
    "kimi-linear": {"attention.head_count_kv": _HYBRID_KV},
    "cohere2": {"attention.sliding_window": 16, "logit_scale": 0.5},
    "command-r": {"logit_scale": 0.5},
    "minicpm": {"embedding_scale": 1.5, "residual_scale": 0.75, "logit_scale": 1.5},
    "gpt-oss": {"attention.sliding_window": 16, "rope.dimension_count": 16, "attention.key_length": 16},
    "exaone4": {"attention.sliding_window": 16},
    "olmo2": {"attention.sliding_window": 16},
    "smollm3": {},
}
"""Metadata of single architectures."""


_ENCODERS = (
    *("bert", "dream", "eurobert", "gemma-embedding", "gemma-embedding2", "llada", "llada-moe", "llama-embed"),
    *("modern-bert", "neo-bert", "nomic-bert", "nomic-bert-moe", "rnd1", "t5"),
)
_NOT_CAUSAL = "not a causal language model"
_NO_OUTPUT = "the library gives no name to the output of a layer"
_SCALED = "the library scales hidden states where they come in"

REASONS: dict[str, str] = {
    **dict.fromkeys(_ENCODERS, _NOT_CAUSAL),
    **dict.fromkeys(("mimo2", "nemotron_h", "nemotron_h_moe", "plamo2", "step35"), _NO_OUTPUT),
    **dict.fromkeys(("gemma", "gemma2"), _SCALED),
    **dict.fromkeys(("glm4", "glm4moe"), "the library takes no hidden states"),
    **dict.fromkeys(("deepseek4", "hy_v4", "qwen4exp"), "several hidden states for each token"),
    "bloom": "the library normalises hidden states where they come in",
    "cogvlm": "hidden states are taken for those of pictures",
    "gemma3n": "later layers need token ids",
    "grok": "the scale of the embedding is not in every file",
    "llama4": "sequences cannot be moved between caches",
}
"""Why architectures are refused, where the library's own words say little."""


def metadata_of(arch: str, experts: bool) -> dict[str, Value]:
    """The metadata to begin with."""
    own = {**DENSE, **(EXPERTS if experts else {}), **SPECIAL.get(arch, {})}
    bare = {key: own.pop(key) for key in tuple(own) if key.startswith("xielu.")}
    return {
        **bare,
        "general.architecture": arch,
        "tokenizer.ggml.model": "none",
        **{f"{arch}.{key}": value for key, value in own.items()},
    }
