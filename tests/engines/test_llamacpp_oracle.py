"""The llama.cpp engine computes what transformers computes, for every family that it takes from safetensors."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
import transformers
from exo_mesh_llamacpp import provider
from exo_mesh_llamacpp.families import FAMILIES

from exo_mesh.domain.frame import Row
from tests.support.ring import Ring

pytestmark = pytest.mark.skipif(not provider.availability().available, reason="xllamacpp is not installed")

NUM_LAYERS = 4
IDS = np.random.default_rng(11).integers(0, 290, 100).astype(np.int32)
SLACK = 2e-5
"""Largest difference of logits relative to their size."""

SLACK_OF_GELU = 5e-3
"""The same for models with GELU, which llama.cpp looks up in a table of float16."""

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 290,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "head_dim": 16,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
EXPERTS = {"num_experts_per_tok": 2}

CONFIGS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("llama", "Llama", {}),
    "llama, tied, many heads to one": ("llama", "Llama", {"tie_word_embeddings": True, "num_key_value_heads": 1}),
    "llama, head_dim of its own": ("llama", "Llama", {"head_dim": 24}),
    "llama, biases everywhere": ("llama", "Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, scaled as Llama 3.1": ("llama", "Llama", {"rope_parameters": LLAMA3}),
    "llama, linear": ("llama", "Llama", {"rope_parameters": LINEAR}),
    "mistral, no window": ("mistral", "Mistral", {"sliding_window": None}),
    "mixtral": ("mixtral", "Mixtral", {**EXPERTS, "num_local_experts": 4, "sliding_window": None}),
    "granite": (
        "granite",
        "Granite",
        {
            "embedding_multiplier": 1.5,
            "residual_multiplier": 0.75,
            "attention_multiplier": 0.2,
            "logits_scaling": 1.25,
        },
    ),
    "qwen2": ("qwen2", "Qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", "Qwen3", {"tie_word_embeddings": True}),
    "qwen3_moe": (
        "qwen3_moe",
        "Qwen3Moe",
        {**EXPERTS, "num_experts": 4, "moe_intermediate_size": 96, "norm_topk_prob": True, "mlp_only_layers": []},
    ),
    "olmo2": ("olmo2", "Olmo2", {}),
    "gemma3_text": ("gemma3_text", "Gemma3", {"sliding_window": 32, "query_pre_attn_scalar": 16}),
}


def build(name: str) -> Any:
    """A transformers model with wide random weights, so that logits are flat and every part matters."""
    family, prefix, changes = CONFIGS[name]
    config_name = "Gemma3TextConfig" if prefix == "Gemma3" else f"{prefix}Config"
    config = getattr(transformers, config_name)(**(SIZES | changes), eos_token_id=0, bos_token_id=0, pad_token_id=0)
    assert config.model_type == family
    model = getattr(transformers, f"{prefix}ForCausalLM")(config).eval()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "norm" in key:
                parameter.copy_((0 if prefix == "Gemma3" else 1) + 0.1 * noise)
            else:
                parameter.copy_(noise * (0.1 if parameter.ndim == 1 else parameter.shape[-1] ** -0.5))
    return model


def test_every_family_is_compared() -> None:
    assert {family for family, _, _ in CONFIGS.values()} == set(FAMILIES)


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    model = build(name)
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        want = model(torch.tensor(IDS[None].astype(np.int64))).logits[0].float().numpy()
    for cuts in ((), provider.survey(tmp_path, {}).legal_cuts[:2]):
        got = logits_of(tmp_path, cuts)
        worst = float(np.abs(got - want).max() / np.sqrt(np.mean(np.square(want))))
        assert worst <= (SLACK_OF_GELU if "gemma" in name else SLACK), worst


def logits_of(directory: Path, cuts: Sequence[int]) -> np.ndarray:
    """A prompt of 90 tokens, then ten one by one."""
    ring = Ring(provider, directory, NUM_LAYERS, cuts, kv="f32", threads="1")
    ring.insert(1)
    got = [ring.forward([Row(1, 0, 90, 90)], IDS[:90])]
    got += [ring.forward([Row(1, pos0, 1, 1)], IDS[pos0 : pos0 + 1]) for pos0 in range(90, 100)]
    ring.close()
    return np.concatenate(got)
