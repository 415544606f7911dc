"""Reads config.json into the sizes and the metadata that llama.cpp wants. A config that llama.cpp cannot express is
refused. Pure."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from exo_mesh.domain.model_settings import text_config
from exo_mesh.errors import ModelError
from exo_mesh.weights.model_files import read_json
from exo_mesh_llamacpp.container import Value
from exo_mesh_llamacpp.families import FAMILIES, HfFamily

MAX_SIZE = 2**31
MAX_LAYERS = 10_000
MISTRAL_WINDOW = 4096


class HfModel(msgspec.Struct, frozen=True):
    """A model as config.json describes it. sizes: by the names that TensorPart.shape uses. rope_freqs: factors of the
    rotary frequencies, or none. windows[i]: whether layer i attends to a window only."""

    file: Path
    family: HfFamily
    num_layers: int
    sizes: Mapping[str, int]
    num_heads: int
    num_kv_heads: int
    tied: bool | None
    metadata: Mapping[str, Value]
    rope_freqs: tuple[float, ...]
    windows: tuple[bool, ...]
    embedding_scale: float


def read_hf_model(model_dir: Path) -> HfModel:
    """Read the config of a model. Raises ModelError naming config.json and the key."""
    return _HfReader(model_dir / "config.json").read()


class _HfReader:
    """Reads one config.json; every error names the file and the key."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._config: Mapping[str, Any] = text_config(read_json(file))

    def read(self) -> HfModel:
        family = self._family()
        num_layers = self._size("num_hidden_layers")
        if num_layers > MAX_LAYERS:
            raise self._refusal("num_hidden_layers", f"{num_layers} is more than {MAX_LAYERS}")
        heads = self._size("num_attention_heads")
        kv_heads = self._size("num_key_value_heads", heads)
        hidden = self._size("hidden_size")
        head_dim = self._size("head_dim", hidden // heads)
        if heads % kv_heads:
            raise self._refusal("num_key_value_heads", f"{heads} query heads are not a multiple of {kv_heads}")
        if head_dim % 2:
            raise self._refusal("head_dim", f"{head_dim} is odd")
        sizes = {"hidden": hidden, "q": heads * head_dim, "kv": kv_heads * head_dim, "head_dim": head_dim}
        sizes |= {"mlp": self._size("intermediate_size"), "vocab": self._size("vocab_size")}
        if family.experts:
            sizes["experts"] = self._size("num_experts" if "num_experts" in self._config else "num_local_experts")
            sizes["expert_mlp"] = self._size("moe_intermediate_size", sizes["mlp"])
        self._check(family)
        windows = self._windows(family, num_layers)
        metadata, freqs = self._metadata(family, sizes, heads, kv_heads, windows)
        tied = self._config.get("tie_word_embeddings", True if family.scaled_embedding else None)
        return HfModel(
            self._file, family, num_layers, sizes, heads, kv_heads, tied, metadata, freqs, windows, self._scale(family)
        )

    def _refusal(self, key: str, why: str) -> ModelError:
        return ModelError(f"{self._file}: {key}: {why}")

    def _family(self) -> HfFamily:
        model_type = self._config.get("model_type")
        if not isinstance(model_type, str) or model_type not in FAMILIES:
            known = ", ".join(FAMILIES)
            raise self._refusal(
                "model_type", f"{json.dumps(model_type)} is not supported by the llamacpp engine; it runs {known}"
            )
        return FAMILIES[model_type]

    def _size(self, key: str, default: int | None = None) -> int:
        value = self._config.get(key)
        value = default if value is None else value
        if type(value) is not int or not 0 < value < MAX_SIZE:
            raise self._refusal(key, f"{json.dumps(value)} is not a usable size")
        return value

    def _number(self, key: str, default: float | None = None) -> float:
        value = self._config.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e9:
            raise self._refusal(key, f"{json.dumps(value)} is not a usable number")
        return float(value)

    def _check(self, family: HfFamily) -> None:
        """Raises ModelError for settings that would change the numbers and that llama.cpp's model code does not
        have."""
        key = "hidden_activation" if "hidden_activation" in self._config else "hidden_act"
        activation = self._config.get(key, family.activation[0])
        if activation not in family.activation:
            raise self._refusal(key, f"{json.dumps(activation)} is not supported; {family.activation[0]} is")
        for key in ("quantization", "quantization_config", "compression_config"):
            if self._config.get(key):
                raise self._refusal(key, "the llamacpp engine reads plain weights and quantises them itself")
        for key in ("attn_logit_softcapping", "final_logit_softcapping"):
            if self._config.get(key):
                raise self._refusal(key, "logits with a soft cap are not supported")
        if self._config.get("partial_rotary_factor", 1.0) != 1.0:
            raise self._refusal("partial_rotary_factor", "heads that are rotated in part are not supported")

    def _scale(self, family: HfFamily) -> float:
        if family.scaled_embedding:
            return math.sqrt(self._size("hidden_size"))
        return self._number("embedding_multiplier", 1.0) if family.arch == "granite" else 1.0

    def _windows(self, family: HfFamily, num_layers: int) -> tuple[bool, ...]:
        if family.windows == "none":
            return (False,) * num_layers
        kinds = self._config.get("layer_types")
        if isinstance(kinds, list):
            if len(kinds) != num_layers or set(kinds) - {"full_attention", "sliding_attention"}:
                raise self._refusal("layer_types", f"{json.dumps(kinds)[:200]} is not supported")
            windows = tuple(kind == "sliding_attention" for kind in kinds)
        elif family.windows == "layers":
            every = self._size("sliding_window_pattern", 6)
            windows = tuple((index + 1) % every != 0 for index in range(num_layers))
        else:
            windows = (self._has_window(),) * num_layers
        if family.windows == "refused" and any(windows):
            window = self._config.get("sliding_window") or MISTRAL_WINDOW
            if window < self._size("max_position_embeddings"):
                raise self._refusal("sliding_window", f"attention over a window of {window} is not supported")
            return (False,) * num_layers
        return windows

    def _has_window(self) -> bool:
        if self._config.get("model_type", "").startswith("qwen"):
            return bool(self._config.get("use_sliding_window")) and bool(self._config.get("sliding_window"))
        return self._config.get("sliding_window", MISTRAL_WINDOW) is not None

    def _metadata(
        self, family: HfFamily, sizes: Mapping[str, int], heads: int, kv_heads: int, windows: tuple[bool, ...]
    ) -> tuple[dict[str, Value], tuple[float, ...]]:
        """(metadata without what depends on the stage, factors of the rotary frequencies)."""
        found: dict[str, Value] = {
            "context_length": self._size("max_position_embeddings"),
            "embedding_length": sizes["hidden"],
            "feed_forward_length": sizes["mlp"],
            "attention.head_count": heads,
            "attention.head_count_kv": kv_heads,
            "attention.key_length": sizes["head_dim"],
            "attention.value_length": sizes["head_dim"],
            "attention.layer_norm_rms_epsilon": self._number("rms_norm_eps", 1e-6),
            "rope.dimension_count": sizes["head_dim"],
        }
        if family.experts:
            found["expert_count"] = sizes["experts"]
            found["expert_used_count"] = self._size("num_experts_per_tok")
            found["expert_feed_forward_length"] = sizes["expert_mlp"]
            self._check_experts(family)
        for key, name in family.scalars:
            found[name] = self._number(key, 1.0)
        if any(windows):
            found["attention.sliding_window"] = self._size("sliding_window")
        freqs = self._rope(family, found, sizes["head_dim"])
        return found, freqs

    def _check_experts(self, family: HfFamily) -> None:
        if self._config.get("mlp_only_layers") or self._config.get("decoder_sparse_step", 1) != 1:
            raise self._refusal("mlp_only_layers", "layers without experts beside layers with experts")
        if family.arch == "qwen3moe" and self._config.get("norm_topk_prob") is not True:
            raise self._refusal("norm_topk_prob", "llama.cpp always normalises the weights of this model's experts")

    def _rope(self, family: HfFamily, found: dict[str, Value], head_dim: int) -> tuple[float, ...]:
        """Add the rotary settings to the metadata; returns the factors of the frequencies, or none."""
        parameters = self._config.get("rope_parameters")
        scaling = parameters if isinstance(parameters, dict) else self._config.get("rope_scaling") or {}
        if not isinstance(scaling, dict):
            raise self._refusal("rope_scaling", "is not an object")
        if family.windows == "layers":
            scaling, local = self._two_ropes(scaling)
            found["rope.freq_base_swa"] = local
        kind = scaling.get("rope_type", scaling.get("type", "default"))
        theta = scaling.get("rope_theta", self._config.get("rope_theta", family.theta))
        if isinstance(theta, bool) or not isinstance(theta, int | float) or not 0 < theta < 1e12:
            raise self._refusal("rope_theta", f"{json.dumps(theta)} is not a usable number")
        found["rope.freq_base"] = float(theta)
        if kind == "default":
            return ()
        if kind == "linear":
            found |= {"rope.scaling.type": "linear", "rope.scaling.factor": self._part(scaling, "factor")}
            return ()
        if kind == "llama3" and family.arch in ("llama", "granite"):
            return self._llama3(scaling, float(theta), head_dim)
        raise self._refusal("rope_scaling", f"{json.dumps(kind)} is not supported by the llamacpp engine")

    def _two_ropes(self, scaling: Mapping[str, Any]) -> tuple[Mapping[str, Any], float]:
        """(settings of layers with full attention, base of those with a window)."""
        full, local = scaling.get("full_attention"), scaling.get("sliding_attention")
        if isinstance(full, dict) and isinstance(local, dict):
            return full, self._part(local, "rope_theta")
        return scaling, self._number("rope_local_base_freq", 10000.0)

    def _part(self, scaling: Mapping[str, Any], key: str) -> float:
        value = scaling.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e9:
            raise self._refusal("rope_scaling", f"{key} is {json.dumps(value)}, not a usable number")
        return float(value)

    def _llama3(self, scaling: Mapping[str, Any], theta: float, head_dim: int) -> tuple[float, ...]:
        """Divisors of the frequencies, as transformers computes them for `rope_type` llama3."""
        factor, old = self._part(scaling, "factor"), self._part(scaling, "original_max_position_embeddings")
        low, high = self._part(scaling, "low_freq_factor"), self._part(scaling, "high_freq_factor")
        factors: list[float] = []
        for index in range(0, head_dim, 2):
            wavelength = 2 * math.pi * theta ** (index / head_dim)
            if wavelength < old / high:
                factors.append(1.0)
            elif wavelength > old / low:
                factors.append(factor)
            else:
                smooth = (old / wavelength - low) / (high - low)
                factors.append(1 / ((1 - smooth) / factor + smooth))
        return tuple(factors)
