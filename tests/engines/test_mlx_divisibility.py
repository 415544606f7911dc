"""Which models have equal shares for how many ranks; told from config.json, with the numbers."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from exo_mesh_mlx import provider
from exo_mesh_mlx.divisibility import division_obstacle

from exo_mesh.engine.contract import Groupable

LLAMA_8B: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}
FOUR_BIT = {"quantization": {"group_size": 64, "bits": 4}}


@pytest.mark.parametrize(
    ("changes", "size", "expected"),
    [
        ({}, 2, ""),
        ({}, 8, ""),
        ({}, 3, "3 ranks cannot share out evenly: 32 attention heads (num_attention_heads), 8 KV heads"),
        ({"num_key_value_heads": 1}, 2, "2 ranks cannot share out evenly: 1 KV heads (num_key_value_heads)"),
        ({"intermediate_size": 255}, 2, "255 inner width (intermediate_size)"),
        (FOUR_BIT, 4, ""),
        # 14336 / 16 = 896 = 14 groups of 64, but 896 is seven groups of 128
        ({"quantization": {"group_size": 128, "bits": 4}, "num_key_value_heads": 32}, 16, ""),
        (FOUR_BIT | {"intermediate_size": 11008 + 64}, 4, "over 4 ranks are 2768 each, which is not a multiple of"),
        (FOUR_BIT | {"head_dim": 80}, 32, "32 ranks cannot share out evenly: 8 KV heads"),
        (FOUR_BIT | {"head_dim": 80, "num_key_value_heads": 32}, 16, "outputs of attention (num_attention_heads)"),
        # keys and values of latent attention are whole on every rank
        ({"num_key_value_heads": 1, "kv_lora_rank": 512}, 2, ""),
        ({"model_type": "qwen3_5", "num_key_value_heads": 2, "vocab_size": 151936}, 4, ""),
        ({"model_type": "qwen3_5", "vocab_size": 151935}, 2, "151935 token ids (vocab_size)"),
        ({"model_type": "qwen3_5", "vocab_size": 151935, "tie_word_embeddings": True}, 2, ""),
    ],
)
def test_what_cannot_be_shared_out_is_named_with_its_number(changes: dict[str, Any], size: int, expected: str) -> None:
    obstacle = division_obstacle(LLAMA_8B | changes, size)
    assert expected in obstacle if expected else obstacle == ""


def test_settings_of_a_module_count_only_if_it_is_split() -> None:
    of_head = {"quantization": {"group_size": 64, "bits": 4, "lm_head": {"group_size": 4096, "bits": 8}}}
    assert division_obstacle(LLAMA_8B | of_head, 2) == ""
    of_layer = {"quantization": {"group_size": 64, "bits": 4, "model.layers.0.mlp.down_proj": {"group_size": 7168 * 2}}}
    assert "not a multiple of the quantisation group of 14336" in division_obstacle(LLAMA_8B | of_layer, 2)


def test_the_language_model_inside_a_model_that_sees_counts() -> None:
    outer = {"model_type": "kimi_k25", "text_config": {"model_type": "deepseek_v3", "num_attention_heads": 63}}
    assert "63 attention heads" in provider.group_obstacle(outer, 2)


def test_a_model_without_shard_is_refused_with_those_that_have_it() -> None:
    assert isinstance(provider, Groupable)
    refusal = provider.group_obstacle(LLAMA_8B | {"model_type": "gemma3_text"}, 2)
    assert "no shard() for gemma3_text" in refusal and "qwen3_moe" in refusal
    assert provider.group_obstacle(LLAMA_8B | {"model_type": "mistral"}, 2) == "", "mlx-lm runs it as llama"
    assert "no model" in provider.group_obstacle(LLAMA_8B | {"model_type": "../llama"}, 2)


def test_a_group_of_one_is_a_mistake_of_the_caller() -> None:
    with pytest.raises(ValueError, match="at least two"):
        division_obstacle(LLAMA_8B, 1)


@pytest.mark.extended
def test_what_the_source_says_is_what_the_classes_have() -> None:
    """Read in a process of its own, as it imports every model of mlx-lm."""
    script = (
        "import importlib, sys\n"
        "from exo_mesh_mlx.provider import groupable, _defines_a_model, _mlx_lm_dir\n"
        "told = set(groupable()); assert 'mlx' not in sys.modules\n"
        "for name in ('llama', 'qwen3', 'qwen3_moe', 'qwen3_5_moe', 'glm_moe_dsa', 'solar_open', 'lfm2'):\n"
        "    model = importlib.import_module('mlx_lm.models.' + name).Model\n"
        "    assert hasattr(model, 'shard') == (name in told), name\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
