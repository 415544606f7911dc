"""Makes the config.json of transformers from the metadata of a GGUF file. Values that are not there are not guessed."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping
from typing import Any

from exo_mesh.errors import ModelError
from exo_mesh.weights.gguf import QUANT_METHOD, GgufArray, GgufHeader
from exo_mesh.weights.gguf_families import ROPE_FACTORS, GgufFamily
from exo_mesh.weights.gguf_table import gguf_family
from exo_mesh.weights.model_files import shown
from exo_mesh.weights.safetensors import TensorInfo, TensorTable

MAX_FACTORS = 4_096
"""Most frequencies of a rotary embedding, which are half of the width of a head."""

ReadTensor = Callable[[TensorInfo], bytes]
"""Reads all bytes of a tensor. Raises ModelError."""

_SIZES = {
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "max_position_embeddings": "context_length",
}
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""The settings of all known models with Llama 3's scaling, besides the factor."""

_PARTLY_ROTATED = frozenset({"phi3"})
"""The model types that may rotate only a part of each head."""

_NEAR = 1e-5
_END_TEXTS = frozenset(
    {
        "<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>",
        "<EOT>", "_<EOT>", "<|EOT|>", "<｜end▁of▁sentence｜>", "<end_of_utterance>",
    }
)  # fmt: skip
"""Texts of control tokens that end a turn. llama.cpp ends an answer at them, too, whatever eos_token_id is."""

_CONTROL = 3
"""The type of control tokens in tokenizer.ggml.token_type."""


def make_config(header: GgufHeader, table: TensorTable, read_tensor: ReadTensor) -> dict[str, Any]:
    """The config of the model. header: of the first file; table: all tensors by their names in the files.

    For a family that only llama.cpp runs, the config has no more than planning needs, and the name of the architecture
    in GGUF files as model_type. Raises ModelError for a value that is missing or cannot be used.
    """
    maker = _Maker(header, table, read_tensor, gguf_family(header))
    return maker.config() if maker.is_known else maker.outline()


class _Maker:
    """Reads the keys of one architecture."""

    def __init__(
        self, header: GgufHeader, table: TensorTable, read_tensor: ReadTensor, family: GgufFamily | None
    ) -> None:
        self._header, self._table, self._read = header, table, read_tensor
        self.is_known = family is not None
        self._model_type = header.architecture if family is None else family.model_type

    def outline(self) -> dict[str, Any]:
        """Sizes and special tokens. Of sizes that differ by layer the largest counts."""
        heads, kv_heads = self._largest("attention.head_count"), self._largest("attention.head_count_kv")
        hidden = self._size("embedding_length")
        config: dict[str, Any] = {
            "model_type": self._model_type,
            "hidden_size": hidden,
            "num_hidden_layers": self._size("block_count") - (self._largest("nextn_predict_layers") or 0),
            "num_attention_heads": heads or 1,
            "num_key_value_heads": kv_heads or heads or 1,
            "head_dim": self._size("attention.key_length", max(1, hidden // (heads or 1))),
            "max_position_embeddings": self._size("context_length"),
            "vocab_size": self._vocab_size(),
            "tie_word_embeddings": "output.weight" not in self._table,
            "quantization_config": {"quant_method": QUANT_METHOD},
        }
        return config | self._dtype() | self._special_ids()

    def _largest(self, key: str) -> int:
        """The value of a key, or the largest of its array; 0 if there is none."""
        value = self._header.metadata.get(self._key(key), 0)
        values = value.numbers() if isinstance(value, GgufArray) and value.length <= MAX_FACTORS else (value,)
        whole = [one for one in values if isinstance(one, int) and not isinstance(one, bool) and 0 <= one < 2**31]
        if len(whole) != len(values):
            raise ModelError(f"{self._key(key)} must be a size, or a list of sizes")
        return max(whole, default=0)

    def config(self) -> dict[str, Any]:
        config: dict[str, Any] = {"model_type": self._model_type}
        config |= {name: self._size(key) for name, key in _SIZES.items()}
        config["num_key_value_heads"] = self._size("attention.head_count_kv", config["num_attention_heads"])
        config["head_dim"] = self._head_dim(config)
        config["rms_norm_eps"] = self._number("attention.layer_norm_rms_epsilon")
        config["vocab_size"] = self._vocab_size()
        config["tie_word_embeddings"] = "output.weight" not in self._table
        config["hidden_act"] = "silu"
        config |= self._dtype()
        config |= self._special_ids()
        config |= self._rope(config)
        config |= _OF_FAMILY.get(self._model_type, _dense)(self, config)
        config["quantization_config"] = {"quant_method": QUANT_METHOD}
        return config

    def _key(self, key: str) -> str:
        return f"{self._header.architecture}.{key}"

    def _size(self, key: str, default: int | None = None) -> int:
        value = self._header.metadata.get(self._key(key), default)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 2**31:
            raise ModelError(f"{self._key(key)} is {shown(value)}, not a usable size")
        return value

    def _number(self, key: str, default: float | None = None) -> float:
        value = self._header.number(self._key(key), default)
        if value is None or not 0 < value < math.inf:
            raise ModelError(f"{self._key(key)} is {shown(value)}, not a positive number")
        return _shortest(value)

    def _has(self, name: str) -> bool:
        return name in self._table

    def _head_dim(self, config: Mapping[str, Any]) -> int:
        """Width of a head. llama.cpp takes the other sizes from it as well, so both lengths must be equal."""
        default = config["hidden_size"] // config["num_attention_heads"]
        keys, values = self._size("attention.key_length", default), self._size("attention.value_length", default)
        if keys != values:
            raise ModelError(f"{self._key('attention.key_length')} is {keys}, but the length of values is {values}")
        if (rotated := self.rotated(keys)) != keys and self._model_type not in _PARTLY_ROTATED:
            raise ModelError(f"{self._key('rope.dimension_count')} is {rotated} of {keys}, which is not supported")
        return keys

    def rotated(self, head_dim: int) -> int:
        """How many values of a head are rotated by their position."""
        return self._size("rope.dimension_count", head_dim)

    def _vocab_size(self) -> int:
        embedding = self._table.get("token_embd.weight")
        if embedding is None or len(embedding.shape) != 2:
            raise ModelError("it has no usable token_embd.weight")
        return embedding.shape[0]

    def _dtype(self) -> dict[str, Any]:
        """The dtype of activations: the weights' dtype; bfloat16 if they are quantised."""
        found = {info.dtype for info in self._table.values() if len(info.shape) > 1}
        names = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
        return {"torch_dtype": names[found.pop()] if len(found) == 1 and found <= names.keys() else "bfloat16"}

    def _special_ids(self) -> dict[str, Any]:
        """Ids that begin and end a text. All ids that end a turn are end ids."""
        ids: dict[str, Any] = {}
        ends = {self._header.integer(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot", "eom")}
        known = sorted({*self._turn_ends(), *(end for end in ends if end is not None)})
        if any(not 0 <= one < 2**31 for one in known):
            raise ModelError(f"its ids of tokens that end a text are {shown(known)}")
        ids["eos_token_id"] = (known[0] if len(known) == 1 else known) if known else None
        for name, key in (("bos_token_id", "bos"), ("pad_token_id", "padding")):  # null: the library has defaults
            token_id = self._header.integer(f"tokenizer.ggml.{key}_token_id")
            ids[name] = token_id if token_id is not None and 0 <= token_id < self._vocab_size() else None
        return ids

    def _turn_ends(self) -> set[int]:
        tokens, types = self._header.array("tokenizer.ggml.tokens"), self._header.array("tokenizer.ggml.token_type")
        if tokens is None or types is None or types.is_text:
            return set()
        kinds = types.numbers()
        return {
            token_id
            for token_id, text in enumerate(tokens.texts())
            if text in _END_TEXTS and token_id < len(kinds) and kinds[token_id] == _CONTROL
        }

    def _rope(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """The base of the rotary embedding, and its scaling for long texts."""
        theta = self._number("rope.freq_base", 10000.0)
        rope: dict[str, Any] = {"rope_theta": theta}
        scaling = self._rope_factors(config, theta) or self._rope_scaling(config)
        return {**rope, "rope_scaling": scaling} if scaling else rope

    def _rope_scaling(self, config: Mapping[str, Any]) -> dict[str, Any]:
        kind = self._header.text(self._key("rope.scaling.type"))
        factor = self._header.number(self._key("rope.scaling.factor")) or 0.0
        if not kind and not factor and self._header.metadata.get(self._key("rope.scale_linear")):
            kind, factor = "linear", self._number("rope.scale_linear")
        if kind in ("", "none") or factor in (0.0, 1.0):
            return {}
        if kind not in ("linear", "yarn"):
            raise ModelError(f"{self._key('rope.scaling.type')} is {shown(kind)}, which is not supported")
        scaling: dict[str, Any] = {"rope_type": kind, "factor": factor}
        if kind == "yarn":
            original = config["max_position_embeddings"]
            scaling["original_max_position_embeddings"] = self._size("rope.scaling.original_context_length", original)
            for name, key in (("beta_fast", "yarn_beta_fast"), ("beta_slow", "yarn_beta_slow")):
                if self._key(f"rope.scaling.{key}") in self._header.metadata:
                    scaling[name] = self._number(f"rope.scaling.{key}")
        return scaling

    def _rope_factors(self, config: Mapping[str, Any], theta: float) -> dict[str, Any]:
        """Scaling by a divisor for each frequency: of Llama 3, or one set for short and one for long texts."""
        short = self._factors(ROPE_FACTORS[2], config)
        long = self._factors(ROPE_FACTORS[1], config) or self._factors(ROPE_FACTORS[0], config)
        if long is None:
            return {}
        if short is None and (found := _as_llama3(long, theta)) is not None:
            return found
        original = self._size("rope.scaling.original_context_length", config["max_position_embeddings"])
        default = 1.0
        if short is not None and config["max_position_embeddings"] > original:  # the formula of Phi 3
            default = math.sqrt(1 + math.log(config["max_position_embeddings"] / original) / math.log(original))
        return {
            "rope_type": "longrope",
            "long_factor": list(long),
            "short_factor": list(short or long),
            "attention_factor": self._number("rope.scaling.attn_factor", default),
            "original_max_position_embeddings": original,
        }

    def _factors(self, name: str, config: Mapping[str, Any]) -> tuple[float, ...] | None:
        info = self._table.get(name)
        if info is None:
            return None
        count, wanted = math.prod(info.shape), self.rotated(config["head_dim"]) // 2
        if info.dtype != "F32" or count != wanted or count > MAX_FACTORS:
            raise ModelError(f"{name} is {info.dtype}{list(info.shape)}, not F32[{wanted}]")
        raw = self._read(info)
        if len(raw) != 4 * count:
            raise ModelError(f"{name} is cut short")
        values = struct.unpack(f"<{count}f", raw)
        if not all(0 < value < math.inf for value in values):
            raise ModelError(f"{name} has values that are not positive")
        return tuple(_shortest(value) for value in values)

    def biases(self) -> dict[str, Any]:
        """Whether the projections of attention and MLP have biases."""
        names = {"attention_bias": "blk.0.attn_q.bias", "mlp_bias": "blk.0.ffn_down.bias"}
        return {setting: self._has(name) for setting, name in names.items()}

    def feed_forward(self) -> dict[str, Any]:
        return {"intermediate_size": self._size("feed_forward_length")}

    def experts(self, count: str) -> dict[str, Any]:
        return {count: self._size("expert_count"), "num_experts_per_tok": self._size("expert_used_count")}

    def moe_size(self) -> int:
        return self._size("expert_feed_forward_length")

    def shared_size(self) -> int:
        return self._size("expert_shared_feed_forward_length")

    def windows(self) -> dict[str, Any]:
        return {"sliding_window": self._size("attention.sliding_window")}

    def has_window(self) -> bool:
        return self._key("attention.sliding_window") in self._header.metadata

    def positive(self, key: str, default: float | None = None) -> float:
        return self._number(key, default)

    def has(self, key: str) -> bool:
        return self._key(key) in self._header.metadata


def _shortest(value: float) -> float:
    """The shortest decimal that is the same float32: the file has 1e-05 as a float32."""
    for digits in range(1, 10):
        short = float(f"{value:.{digits}g}")
        if struct.pack("<f", short) == struct.pack("<f", value):
            return short
    return value


def _as_llama3(factors: tuple[float, ...], theta: float) -> dict[str, Any] | None:
    """Llama 3's settings if they give these divisors; None if they do not."""
    factor = _shortest(round(max(factors), 3))
    low, high = _LLAMA3["low_freq_factor"], _LLAMA3["high_freq_factor"]
    original = _LLAMA3["original_max_position_embeddings"]
    for index, given in enumerate(factors):
        wavelength = 2 * math.pi * theta ** (index / len(factors))
        smooth = min(1.0, max(0.0, (original / wavelength - low) / (high - low)))
        if abs(1 / ((1 - smooth) / factor + smooth) - given) > _NEAR * given:
            return None
    return {"rope_type": "llama3", "factor": factor, **_LLAMA3}


def _dense(maker: _Maker, config: Mapping[str, Any]) -> dict[str, Any]:
    return maker.feed_forward() | maker.biases()


def _qwen2(maker: _Maker, config: Mapping[str, Any]) -> dict[str, Any]:
    return {**maker.feed_forward(), "use_sliding_window": False}


def _mixtral(maker: _Maker, config: Mapping[str, Any]) -> dict[str, Any]:
    window = maker.windows() if maker.has_window() else {"sliding_window": None}
    return {**maker.feed_forward(), **maker.experts("num_local_experts"), **window}


def _qwen3_moe(maker: _Maker, config: Mapping[str, Any]) -> dict[str, Any]:
    size = maker.moe_size()
    return {
        **maker.experts("num_experts"),
        "moe_intermediate_size": size,
        "intermediate_size": size,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "attention_bias": maker.biases()["attention_bias"],
        "use_sliding_window": False,
    }


def _qwen2_moe(maker: _Maker, config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **_qwen3_moe(maker, config),
        "shared_expert_intermediate_size": maker.shared_size(),
        "norm_topk_prob": False,
        "qkv_bias": maker.biases()["attention_bias"],
    }


def _gemma(maker: _Maker, config: Mapping[str, Any]) -> dict[str, Any]:
    tanh = "gelu_pytorch_tanh"
    return {**_dense(maker, config), "hidden_act": tanh, "hidden_activation": tanh, "attention_bias": False}


def _gemma2(maker: _Maker, config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **_gemma(maker, config),
        **maker.windows(),
        "attn_logit_softcapping": maker.positive("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": maker.positive("final_logit_softcapping", 30.0),
        "query_pre_attn_scalar": _query_scalar(config, 46),
    }


def _gemma3(maker: _Maker, config: Mapping[str, Any]) -> dict[str, Any]:
    """Every sixth layer sees all positions. rope_theta and the scaling belong to these layers."""
    caps = {"final_logit_softcapping": maker.positive("final_logit_softcapping")} if maker.has(
        "final_logit_softcapping") else {}  # fmt: skip
    return {
        **_gemma(maker, config),
        **maker.windows(),
        **caps,
        "sliding_window_pattern": 6,
        "layer_types": [
            "sliding_attention" if (layer + 1) % 6 else "full_attention" for layer in range(config["num_hidden_layers"])
        ],
        "rope_local_base_freq": maker.positive("rope.freq_base_swa", 10000.0),
        "query_pre_attn_scalar": _query_scalar(config, 62),
    }


def _query_scalar(config: Mapping[str, Any], largest: int) -> int:
    """What queries are scaled by: the width of a head; in the largest model, known by its layers, what a head has of
    the hidden state."""
    wide: int = config["head_dim"]
    shared: int = config["hidden_size"] // config["num_attention_heads"]
    return shared if config["num_hidden_layers"] == largest else wide


def _phi3(maker: _Maker, config: Mapping[str, Any]) -> dict[str, Any]:
    window = maker.windows() if maker.has_window() else {"sliding_window": None}
    scaling = config.get("rope_scaling") or {}
    original = scaling.get("original_max_position_embeddings", config["max_position_embeddings"])
    part = maker.rotated(config["head_dim"]) / config["head_dim"]
    return {
        **maker.feed_forward(),
        **window,
        "original_max_position_embeddings": original,
        "partial_rotary_factor": part,
    }


def _granite(maker: _Maker, config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **_dense(maker, config),
        "embedding_multiplier": maker.positive("embedding_scale", 1.0),
        "residual_multiplier": maker.positive("residual_scale", 1.0),
        "attention_multiplier": maker.positive("attention.scale", config["head_dim"] ** -0.5),
        "logits_scaling": maker.positive("logit_scale", 1.0),
    }


_OF_FAMILY: Mapping[str, Callable[[_Maker, Mapping[str, Any]], dict[str, Any]]] = {
    "qwen2": _qwen2,
    "mixtral": _mixtral,
    "qwen2_moe": _qwen2_moe,
    "qwen3_moe": _qwen3_moe,
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
    "phi3": _phi3,
    "granite": _granite,
}
