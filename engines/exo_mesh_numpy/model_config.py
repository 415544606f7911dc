"""Reads the model's settings from config.json. Anything that this engine cannot compute exactly is refused."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from exo_mesh.errors import ModelError
from exo_mesh.weights.model_files import read_json
from exo_mesh_numpy.families import FAMILIES, Family, Presence
from exo_mesh_numpy.rope import RopeSettings, read_rope

MAX_SIZE = 2**31
"""Limit of all sizes in a config; a larger one is a mistake that should not become an allocation."""

MISTRAL_WINDOW = 4096
"""The default of transformers for a Mistral config without `sliding_window`; null means that there is none."""


class ModelConfig(msgspec.Struct, frozen=True):
    """Sizes and switches of a model. tied: None if the config has no value, and the tensors decide. rope_layers[i]:
    whether layer i rotates queries and keys by their position."""

    file: Path
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    eps: float
    tied: bool | None
    bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    rope: RopeSettings
    rope_layers: tuple[bool, ...]

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of keys and values of one layer for one position, in float32."""
        return 2 * self.num_kv_heads * self.head_dim * 4


def read_model_config(model_dir: Path) -> ModelConfig:
    """Read the config of a model. Raises ModelError naming config.json and the key."""
    return _Reader(model_dir / "config.json").read()


class _Reader:
    """Reads one config.json; every error names the file and the key."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._config: Mapping[str, Any] = read_json(file)

    def read(self) -> ModelConfig:
        family = self._family()
        num_layers, hidden_size = self._size("num_hidden_layers"), self._size("hidden_size")
        num_heads = self._size("num_attention_heads")
        num_kv_heads = self._size("num_key_value_heads", num_heads)
        head_dim = self._size("head_dim", hidden_size // num_heads)
        if num_heads % num_kv_heads:
            raise self._refusal(
                "num_key_value_heads", f"{num_heads} query heads are not a multiple of {num_kv_heads} key heads"
            )
        if head_dim % 2:
            raise self._refusal("head_dim", f"{head_dim} is odd")
        self._check_activation()
        self._check_window(family)
        return ModelConfig(
            file=self._file,
            num_layers=num_layers,
            hidden_size=hidden_size,
            intermediate_size=self._size("intermediate_size"),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            vocab_size=self._size("vocab_size"),
            eps=self._positive("rms_norm_eps"),
            tied=self._flag("tie_word_embeddings"),
            bias=self._present(family.bias, "attention_bias"),
            output_bias=self._present(family.output_bias, "attention_bias"),
            mlp_bias=self._present(family.mlp_bias, "mlp_bias"),
            qk_norm=family.qk_norm,
            rope=read_rope(self._file, self._config, head_dim, family.theta),
            rope_layers=self._rope_layers(family, num_layers),
        )

    def _refusal(self, key: str, why: str) -> ModelError:
        return ModelError(f"{self._file}: {key}: {why}")

    def _family(self) -> Family:
        model_type = self._config.get("model_type")
        if not isinstance(model_type, str) or model_type not in FAMILIES:
            known = ", ".join(FAMILIES)
            raise self._refusal(
                "model_type", f"{json.dumps(model_type)} is not supported by the numpy engine; it runs {known}"
            )
        return FAMILIES[model_type]

    def _size(self, key: str, default: int | None = None) -> int:
        value = self._config.get(key)
        value = default if value is None else value
        if type(value) is not int or not 0 < value < MAX_SIZE:
            raise self._refusal(key, f"{json.dumps(value)} is not a usable size")
        return value

    def _positive(self, key: str) -> float:
        value = self._config.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1:
            raise self._refusal(key, f"{json.dumps(value)} is not a number between 0 and 1")
        return float(value)

    def _flag(self, key: str) -> bool | None:
        value = self._config.get(key)
        if value is not None and not isinstance(value, bool):
            raise self._refusal(key, f"{json.dumps(value)} is neither true nor false")
        return value

    def _present(self, presence: Presence, key: str) -> bool:
        return bool(self._flag(key)) if presence == "as configured" else presence == "always"

    def _check_activation(self) -> None:
        name = self._config.get("hidden_act", "silu")
        if name not in ("silu", "swish"):
            raise self._refusal(
                "hidden_act", f"{json.dumps(name)} is not supported by the numpy engine; it supports silu"
            )

    def _check_window(self, family: Family) -> None:
        """Raises ModelError for attention over a window, unless the window is as wide as the longest context."""
        window = self._window(family)
        longest = self._config.get("max_position_embeddings")
        if window is not None and not (isinstance(longest, int) and window >= longest):
            raise self._refusal("sliding_window", f"the numpy engine has no attention over a window of {window}")
        kinds = self._config.get("layer_types")
        if family.window != "all layers" and isinstance(kinds, list) and set(kinds) - {"full_attention"}:
            odd = next(kind for kind in kinds if kind != "full_attention")
            if odd != "sliding_attention" or window is None:
                raise self._refusal("layer_types", f"{json.dumps(odd)} is not supported by the numpy engine")

    def _window(self, family: Family) -> int | None:
        """The attention window of some layer of the model, if there is one."""
        if family.window == "none":
            return None
        if family.window == "all layers":
            found = self._config.get("sliding_window", MISTRAL_WINDOW)
        else:
            kinds = self._config.get("layer_types")
            windowed = "sliding_attention" in kinds if isinstance(kinds, list) else True
            found = self._config.get("sliding_window") if windowed and self._flag("use_sliding_window") else None
        return None if found is None else self._size("sliding_window", MISTRAL_WINDOW)

    def _rope_layers(self, family: Family, num_layers: int) -> tuple[bool, ...]:
        if not family.skips_rope:
            return (True,) * num_layers
        flags = self._config.get("no_rope_layers")
        if flags is None:
            interval = self._size("no_rope_layer_interval", 4)
            return tuple((layer + 1) % interval != 0 for layer in range(num_layers))
        if not isinstance(flags, list) or len(flags) != num_layers or set(flags) - {0, 1}:
            raise self._refusal("no_rope_layers", f"{json.dumps(flags)} is not a list of {num_layers} zeros and ones")
        return tuple(bool(flag) for flag in flags)
