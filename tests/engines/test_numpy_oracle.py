"""The NumPy engine computes what transformers and mlx-lm compute, in float32, on tiny models with every feature."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
import transformers
from exo_mesh_numpy import provider

from exo_mesh.domain.frame import Row
from exo_mesh.errors import ModelError
from tests.support.checkpoints import write_json
from tests.support.ring import Ring

NUM_LAYERS = 4
IDS = np.random.default_rng(11).integers(0, 290, 150).astype(np.int32)
SLACK = 2e-5
"""Largest difference of logits, which are about 4 in size. The requirement is 1e-3."""

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
YARN = {"rope_type": "yarn", "rope_theta": 3000.0, "factor": 4.0, "original_max_position_embeddings": 64}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}

CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama, tied, many heads to one": ("Llama", {"tie_word_embeddings": True, "num_key_value_heads": 1}),
    "llama, no sharing of heads": ("Llama", {"num_key_value_heads": 4, "rms_norm_eps": 1e-3}),
    "llama, head_dim of its own": ("Llama", {"head_dim": 24}),
    "llama, biases everywhere": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, scaled as Llama 3.1": ("Llama", {"rope_parameters": LLAMA3}),
    "llama, linear": ("Llama", {"rope_parameters": LINEAR}),
    "mistral, no window": ("Mistral", {"sliding_window": None}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2, yarn": ("Qwen2", {"rope_parameters": YARN}),
    "qwen3": ("Qwen3", {"tie_word_embeddings": True}),
    "qwen3, yarn and head_dim of its own": ("Qwen3", {"rope_parameters": YARN, "head_dim": 32}),
    "smollm3, layers without rope": ("SmolLM3", {"no_rope_layers": [1, 0, 1, 0], "pad_token_id": 0}),
}

IN_MLX = (
    "llama",
    "llama, biases everywhere",
    "llama, scaled as Llama 3.1",
    "qwen2",
    "qwen3, yarn and head_dim of its own",
)
"""What mlx-lm is asked for besides transformers: each family, and what each of the two has written for itself."""


def build(name: str) -> Any:
    """A transformers model with wide random weights, so that logits are flat and every part matters."""
    family, changes = CONFIGS[name]
    config = getattr(transformers, f"{family}Config")(**(SIZES | changes), eos_token_id=0, bos_token_id=0)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "norm" in key:
                parameter.copy_(1 + 0.1 * noise)
            else:
                parameter.copy_(noise * (0.1 if parameter.ndim == 1 else parameter.shape[-1] ** -0.5))
    return model


@pytest.fixture(scope="module", params=CONFIGS)
def written(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, np.ndarray]:
    """(name of the config, its checkpoint as transformers saves it, logits of every position by transformers)."""
    model = build(request.param)
    directory = tmp_path_factory.mktemp("oracle")
    model.save_pretrained(directory)
    with torch.no_grad():
        logits = model(torch.tensor(IDS.astype(np.int64))[None]).logits[0].numpy()
    return request.param, directory, logits


def logits_of(engine: Any, directory: Path, **options: str) -> np.ndarray:
    """Two stages; two chunks of prefill, then a token at a time."""
    ring = Ring(engine, directory, NUM_LAYERS, (1,), **options)
    ring.insert(1, max_tokens=len(IDS))
    spans = [(0, 77), (77, 68), *((145 + i, 1) for i in range(len(IDS) - 145))]
    got = [ring.forward([Row(1, pos0, n, n)], IDS[pos0 : pos0 + n]) for pos0, n in spans]
    ring.close()
    return np.concatenate(got)


@pytest.mark.parametrize("mode", ["fast", "deterministic"])
def test_logits_are_those_of_transformers(written: tuple[str, Path, np.ndarray], mode: str) -> None:
    _, directory, expected = written
    assert expected.std() > 0.3, "logits so small that a mistake would not show"
    np.testing.assert_allclose(logits_of(provider, directory, mode=mode), expected, rtol=0, atol=SLACK)


@pytest.mark.parametrize("written", IN_MLX, indirect=True)
def test_logits_are_those_of_mlx(written: tuple[str, Path, np.ndarray]) -> None:
    mlx = pytest.importorskip("exo_mesh_mlx")
    pytest.importorskip("mlx_lm")
    _, directory, _ = written
    expected = logits_of(mlx.provider, directory)
    np.testing.assert_allclose(logits_of(provider, directory), expected, rtol=0, atol=SLACK)


def test_the_settings_matter() -> None:
    """Two configs that differ in one setting have other logits, so none of the comparisons above is empty."""
    with torch.no_grad():
        ids = torch.tensor(IDS.astype(np.int64))[None]
        results = {name: build(name)(ids).logits[0].numpy() for name in ("llama", *CONFIGS) if name.startswith("llama")}
    for name, logits in results.items():
        assert name == "llama" or np.abs(logits - results["llama"]).max() > 0.05, name


OLDER = {"llama, scaled as Llama 3.1": LLAMA3, "llama, linear": LINEAR}


@pytest.mark.parametrize("name", OLDER)
def test_a_config_with_the_older_names_means_the_same(name: str, tmp_path: Path) -> None:
    build(name).save_pretrained(tmp_path)
    expected = logits_of(provider, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    rope = dict(config.pop("rope_parameters"))
    config["rope_theta"] = rope.pop("rope_theta")
    config["rope_scaling"] = {"type" if key == "rope_type" else key: value for key, value in rope.items()}
    write_json(tmp_path / "config.json", config)
    # not bit by bit: the number of threads follows the free cores, and with it the order of sums
    np.testing.assert_allclose(logits_of(provider, tmp_path), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"model_type": "gemma3_text"}, "model_type"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "dynamic"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "factor"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "rope_parameters"),
        ({"model_type": "mistral", "sliding_window": 64}, "sliding_window"),
        ({"model_type": "mistral", "sliding_window": None, "hidden_size": "64"}, "hidden_size"),
        (
            {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 64, "layer_types": None},
            "sliding_window",
        ),
        ({"model_type": "qwen2", "layer_types": ["full_attention"] * 3 + ["linear_attention"]}, "layer_types"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"rms_norm_eps": None}, "rms_norm_eps"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
        ({"quantization_config": {"quant_method": "bitnet", "bits": 4}}, 'quant_method "bitnet"'),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_it_cannot_compute_exactly_is_refused(tmp_path: Path, changes: dict[str, Any], key: str) -> None:
    build("llama").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    write_json(tmp_path / "config.json", config | changes)
    with pytest.raises(ModelError, match=key) as caught:
        Ring(provider, tmp_path, NUM_LAYERS, ())
    assert str(tmp_path / "config.json") in str(caught.value)


def test_the_loop_that_bench_compares_with_computes_the_same(tmp_path: Path) -> None:
    from exo_mesh_numpy.model_config import read_model_config
    from exo_mesh_numpy.plain import PlainLoop

    build("llama").save_pretrained(tmp_path)
    expected = logits_of(provider, tmp_path)
    ring = Ring(provider, tmp_path, NUM_LAYERS, ())
    loop = PlainLoop(read_model_config(tmp_path), ring.stages[0].weights, len(IDS))  # type: ignore[attr-defined]
    for pos0, n in ((0, 100), (100, 1), (101, 20)):
        np.testing.assert_allclose(loop.forward(IDS[pos0 : pos0 + n], pos0), expected[pos0 + n - 1], rtol=0, atol=SLACK)
