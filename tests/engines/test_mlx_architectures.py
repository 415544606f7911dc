"""One architecture per rule of the ghost-layer method: cut where it may be cut, the bits are those of the whole.

Windows are shorter than the prompt, so rotating caches wrap; weights get noise, so that no two layers are alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("mlx_lm")

import mlx.core as mx
from exo_mesh_mlx import provider
from exo_mesh_mlx.cuts import legal_cuts
from exo_mesh_mlx.loading import open_checkpoint
from mlx.utils import tree_flatten, tree_map
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import _get_classes, load_model

from exo_mesh.domain.frame import Row
from exo_mesh.domain.shard import Shard
from exo_mesh.engine.contract import LoadRequest, StageEngine, StageInput
from exo_mesh.errors import ModelError
from tests.support.checkpoints import write_json
from tests.support.ring import Ring

VOCAB = 96
NUM_LAYERS = 8
IDS = np.random.default_rng(11).integers(0, VOCAB, 47).astype(np.int32)
SCHEDULE = [(0, 23), (23, 18), *((41 + i, 1) for i in range(6))]

DENSE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-5,
    "vocab_size": VOCAB,
    "rope_theta": 10000.0,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
MOE = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}

CONFIGS: dict[str, dict[str, Any]] = {
    # every layer alike
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {**MOE, "norm_topk_prob": True},
    "gemma2": {},
    "phi3": {"head_dim": None},
    # other names for layers and sizes
    "gpt2": {"n_ctx": 128, "n_embd": 32, "n_head": 4, "n_layer": 8, "n_positions": 128, "layer_norm_epsilon": 1e-5},
    # latent attention: two caches in one entry
    "deepseek_v3": {
        "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "v_head_dim": 8, "qk_nope_head_dim": 8,
        "num_key_value_heads": 4, "n_routed_experts": 4, "n_shared_experts": 1, "moe_intermediate_size": 32,
        "num_experts_per_tok": 2, "first_k_dense_replace": 1,
    },
    # masks from cache entries that lie on another stage
    "gemma3_text": {"sliding_window": 16, "sliding_window_pattern": 3, "query_pre_attn_scalar": 8},
    "cohere2": {"sliding_window": 16, "sliding_window_pattern": 3},
    "olmo3": {"sliding_window": 16},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 16},
    # attention in some layers, recurrent state in others
    "qwen3_next": {
        **MOE, "linear_num_value_heads": 2, "linear_num_key_heads": 2, "linear_key_head_dim": 32,
        "linear_value_head_dim": 32, "linear_conv_kernel_dim": 3, "shared_expert_intermediate_size": 32,
        "partial_rotary_factor": 0.5, "norm_topk_prob": True,
    },
    "lfm2": {
        "norm_eps": 1e-5, "conv_bias": False, "conv_L_cache": 3, "block_dim": 32, "block_multiple_of": 16,
        "block_ffn_dim_multiplier": 1.0, "block_auto_adjust_ff_dim": False, "block_ff_dim": 64,
        "full_attn_idxs": [2, 5],
    },
    "mamba2": {
        "num_heads": 8, "head_dim": 8, "intermediate_size": 64, "state_size": 8, "layer_norm_epsilon": 1e-5,
        "conv_kernel": 3, "n_groups": 1, "use_bias": False, "use_conv_bias": True, "time_step_limit": [0.01, 100.0],
        "time_step_rank": "auto",
    },
    # the offset of cache entry 0 serves every layer, though its kind lies elsewhere: phantoms
    "ministral3": {
        "sliding_window": 16,
        "layer_types": ["full_attention", *(["sliding_attention"] * 6), "full_attention"],
        "rope_parameters": {
            "rope_theta": 10000.0, "rope_type": "default", "original_max_position_embeddings": 16,
            "llama_4_scaling_beta": 0.1,
        },
    },
    # a value of layer 0 that every layer uses
    "rwkv7": {
        "norm_eps": 1e-5, "head_dim": 8, "a_low_rank_dim": 8, "v_low_rank_dim": 8, "gate_low_rank_dim": 8,
        "decay_low_rank_dim": 8,
    },
    # keys and values of one layer shared with the next
    "hunyuan": {
        "attention_bias": False, "moe_topk": 2, "num_experts": 4, "num_shared_expert": 1, "use_mixed_mlp_moe": True,
        "use_qk_norm": True, "use_cla": True, "cla_share_factor": 2,
        "rope_scaling": {"alpha": 1.0, "type": "dynamic", "factor": 1.0},
    },
    # all layers twice: cannot be cut
    "nanbeige": {"num_loops": 2},
    # later layers use the caches of earlier ones: only some cuts are legal
    "afm7": {
        "hidden_dim": 32, "num_layers": 8, "num_kv_reuse_layers": 4, "num_heads": 4, "num_kv_heads": 2,
        "hidden_dim_scale_factor": 2.0,
    },
}  # fmt: skip


def write_random_model(directory: Path, model_type: str) -> Path:
    """A checkpoint in mlx-lm's own format, with noise on every parameter."""
    config = {"model_type": model_type, **DENSE, **CONFIGS[model_type]}
    config = {key: value for key, value in config.items() if value is not None}
    write_json(directory / "config.json", config)
    mx.random.seed(3)
    model_class, args_class = _get_classes(config)
    model = model_class(args_class.from_dict(config))
    noisy = tree_map(_with_noise, model.parameters())
    mx.save_safetensors(str(directory / "model.safetensors"), dict(tree_flatten(noisy)))
    return directory


def _with_noise(array: mx.array) -> mx.array:
    return array + 0.1 * mx.random.normal(array.shape).astype(array.dtype) if array.dtype == mx.float32 else array


def whole_model_logits(model_dir: Path) -> np.ndarray:
    model, _ = load_model(model_dir)
    cache = make_prompt_cache(model)
    parts = [np.array(model(mx.array(IDS[pos0 : pos0 + n])[None], cache=cache)[0]) for pos0, n in SCHEDULE]
    return np.concatenate(parts)


def split_logits(model_dir: Path, cuts: Sequence[int]) -> np.ndarray:
    ring = Ring(provider, model_dir, NUM_LAYERS, cuts)
    ring.insert(1)
    parts = [ring.forward([Row(1, pos0, n, n)], IDS[pos0 : pos0 + n]) for pos0, n in SCHEDULE]
    ring.close()
    return np.concatenate(parts)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", [name for name in CONFIGS if name != "nanbeige"])
def test_every_legal_cut_keeps_the_bits(tmp_path: Path, model_type: str) -> None:
    model_dir = write_random_model(tmp_path, model_type)
    cuts = legal_cuts(open_checkpoint(model_dir))
    assert provider.supports(model_type)
    assert cuts == tuple(range(1, 4 if model_type == "afm7" else NUM_LAYERS))
    expected = whole_model_logits(model_dir)
    assert np.ptp(expected) > 0
    for split in [(), cuts[:1], cuts[-1:], (cuts[0], cuts[-2]), cuts]:
        np.testing.assert_array_equal(split_logits(model_dir, split), expected, err_msg=str(split))


@pytest.mark.parametrize("model_type", ["gemma3_text", "ministral3", "rwkv7"])
def test_a_middle_stage_keeps_the_bits(tmp_path: Path, model_type: str) -> None:
    model_dir = write_random_model(tmp_path, model_type)
    np.testing.assert_array_equal(split_logits(model_dir, (3, 5)), whole_model_logits(model_dir))


def load(model_dir: Path, start: int, stop: int) -> StageEngine:
    stage = provider.create()
    stage.load(LoadRequest(Shard("m", start, stop, 8), model_dir, 512), lambda done, total: None)
    return stage


def test_a_cut_inside_shared_caches_is_refused(tmp_path: Path) -> None:
    model_dir = write_random_model(tmp_path, "afm7")
    with pytest.raises(ModelError, match="cannot run as a stage"):
        load(model_dir, 6, 8)


def test_a_looped_model_runs_whole_or_not_at_all(tmp_path: Path) -> None:
    model_dir = write_random_model(tmp_path, "nanbeige")
    np.testing.assert_array_equal(split_logits(model_dir, ()), whole_model_logits(model_dir))
    with pytest.raises(ModelError, match="looped"):
        load(model_dir, 0, 4)


@pytest.mark.parametrize("model_type", ["mamba2", "gemma3_text"])
def test_caches_that_cannot_go_back_say_so_and_fault_only_then(tmp_path: Path, model_type: str) -> None:
    stage = load(write_random_model(tmp_path, model_type), 0, 4)
    assert stage.capabilities.rollback == "none"
    stage.insert(1, 64)
    send = lambda row: stage.forward(StageInput((row,), tuple(IDS[row.pos0 : row.pos0 + row.n].tolist()), {})).faults  # noqa: E731
    assert not send(Row(1, 0, 20))
    assert not send(Row(1, 20, 1))
    (fault,) = send(Row(1, 19, 1))
    assert (fault.sequence, fault.code) == (1, "bad_row")
    assert "cannot be cut back from 21 to 19" in fault.message
    assert not send(Row(1, 21, 1))
    assert not send(Row(1, 0, 20))
    stage.close()
