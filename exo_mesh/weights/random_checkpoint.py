"""Writes random checkpoints in Hugging Face layout, with NumPy alone and without holding more than one tensor.

Weights are random and wide, so logits are flat: a mistake anywhere changes the greedy token. Tiny ones are for tests of
engines, larger ones for measuring them: an engine takes as long with random weights as with any others.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from exo_mesh.errors import InputError

_CLASSES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
_ST_DTYPES = {"float32": ("F32", 4), "bfloat16": ("BF16", 2), "float16": ("F16", 2)}


@dataclass(frozen=True)
class TinyModel:
    """The shape of a random model. vocab counts byte-level tokens (256) and a few specials; the last id ends a
    sequence."""

    arch: str = "llama"
    layers: int = 6
    hidden: int = 64
    heads: int = 4
    kv_heads: int = 2
    intermediate: int = 128
    vocab: int = 300
    context: int = 512
    tied: bool = False
    dtype: str = "float32"
    shards: int = 1
    seed: int = 0

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads


MIN_PARAMETERS, MAX_PARAMETERS = 5_000_000, 100_000_000_000


def model_of_size(parameters: int, dtype: str = "bfloat16") -> TinyModel:
    """A Llama of about this many parameters, in the proportions of known models. Raises InputError beyond the
    bounds."""
    if not MIN_PARAMETERS <= parameters <= MAX_PARAMETERS:
        raise InputError(f"{parameters} parameters is not between {MIN_PARAMETERS} and {MAX_PARAMETERS}")
    if dtype not in _ST_DTYPES:
        raise InputError(f'no dtype "{dtype}"; supported: {", ".join(_ST_DTYPES)}')
    hidden = 256 * max(1, round(math.sqrt(parameters / 230) / 256))
    vocab = min(32000, parameters // 1024)
    per_layer = 11.5 * hidden**2  # 2.5 hidden^2 for attention with a quarter of key heads, 9 for the rest
    layers = max(2, round((parameters - 2 * vocab * hidden) / per_layer))
    heads = hidden // 64
    return TinyModel("llama", layers, hidden, heads, heads // 4, 3 * hidden, vocab, 4096, dtype=dtype)


def tensor_shapes(model: TinyModel) -> dict[str, tuple[int, ...]]:
    """{tensor name: shape} in file order."""
    hidden, kv_width = model.hidden, model.kv_heads * model.head_dim
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (model.vocab, hidden)}
    for layer in range(model.layers):
        prefix = f"model.layers.{layer}."
        widths = {"q_proj": hidden, "k_proj": kv_width, "v_proj": kv_width}
        for name, width in widths.items():
            shapes[f"{prefix}self_attn.{name}.weight"] = (width, hidden)
            if model.arch == "qwen2":
                shapes[f"{prefix}self_attn.{name}.bias"] = (width,)
        shapes[f"{prefix}self_attn.o_proj.weight"] = (hidden, hidden)
        if model.arch == "qwen3":
            shapes[f"{prefix}self_attn.q_norm.weight"] = shapes[f"{prefix}self_attn.k_norm.weight"] = (model.head_dim,)
        shapes[f"{prefix}mlp.gate_proj.weight"] = shapes[f"{prefix}mlp.up_proj.weight"] = (model.intermediate, hidden)
        shapes[f"{prefix}mlp.down_proj.weight"] = (hidden, model.intermediate)
        shapes[f"{prefix}input_layernorm.weight"] = shapes[f"{prefix}post_attention_layernorm.weight"] = (hidden,)
    shapes["model.norm.weight"] = (hidden,)
    if not model.tied:
        shapes["lm_head.weight"] = (model.vocab, hidden)
    return shapes


def config_json(model: TinyModel) -> dict[str, Any]:
    return {
        "architectures": [_CLASSES[model.arch]],
        "model_type": model.arch,
        "hidden_size": model.hidden,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_dim,
        "intermediate_size": model.intermediate,
        "max_position_embeddings": model.context,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": model.tied,
        "torch_dtype": model.dtype,
        "vocab_size": model.vocab,
        "eos_token_id": model.vocab - 1,
        "hidden_act": "silu",
    }


def tokenizer_json(model: TinyModel) -> dict[str, Any]:
    """A byte-level tokenizer without merges: one token per byte, then unused ids, the last one being `<|end|>`."""
    vocab = {character: i for i, character in enumerate(byte_alphabet())}
    vocab |= {f"<|unused{i}|>": i for i in range(256, model.vocab - 1)}
    vocab["<|end|>"] = model.vocab - 1
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    end = {"id": model.vocab - 1, "content": "<|end|>", **flags, "special": True}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [end],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": vocab, "merges": []},
    }


def write_checkpoint(directory: Path, model: TinyModel, *, repeat: bool = False) -> Path:
    """Write config, tokenizer and weights; returns `directory`. repeat: weights repeat themselves, which is faster."""
    directory.mkdir(parents=True, exist_ok=True)
    write_json(directory / "config.json", config_json(model))
    write_json(directory / "tokenizer.json", tokenizer_json(model))
    template = "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}assistant:"
    write_json(directory / "tokenizer_config.json", {"eos_token": "<|end|>", "chat_template": template})
    shapes = tensor_shapes(model)
    rng = np.random.default_rng(model.seed)
    block = rng.standard_normal(2**16 if repeat else 0, dtype=np.float32) * model.hidden**-0.5

    def values(name: str) -> np.ndarray:
        return np.resize(block, shapes[name]) if repeat else _random(rng, name, shapes[name])

    if model.shards == 1:
        write_safetensors(directory / "model.safetensors", shapes, model.dtype, values)
        return directory
    names = list(shapes)
    weight_map: dict[str, str] = {}
    for shard, part in enumerate(np.array_split(np.arange(len(names)), model.shards), 1):
        file_name = f"model-{shard:05}-of-{model.shards:05}.safetensors"
        held = [names[i] for i in part]
        write_safetensors(directory / file_name, {name: shapes[name] for name in held}, model.dtype, values)
        weight_map |= dict.fromkeys(held, file_name)
    write_json(directory / "model.safetensors.index.json", {"metadata": {}, "weight_map": weight_map})
    return directory


def write_safetensors(
    file: Path, shapes: Mapping[str, tuple[int, ...]], dtype: str, values: Callable[[str], np.ndarray]
) -> None:
    """Write tensors one by one as `values(name)` (float32) makes them."""
    st_dtype, item_bytes = _ST_DTYPES[dtype]
    header, offset = {}, 0
    for name, shape in shapes.items():
        num_bytes = int(np.prod(shape)) * item_bytes
        header[name] = {"dtype": st_dtype, "shape": list(shape), "data_offsets": [offset, offset + num_bytes]}
        offset += num_bytes
    raw = json.dumps(header).encode()
    with file.open("wb") as stream:
        stream.write(struct.pack("<Q", len(raw)) + raw)
        for name in shapes:
            stream.write(_cast(values(name), dtype).tobytes())


def write_json(file: Path, value: Any) -> None:
    file.write_text(json.dumps(value))


def _random(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> np.ndarray:
    values = rng.standard_normal(shape, dtype=np.float32)
    if "norm" in name:
        return 1 + 0.1 * values
    return values * (0.1 if len(shape) == 1 else shape[-1] ** -0.5)


def _cast(values: np.ndarray, dtype: str) -> np.ndarray:
    if dtype == "bfloat16":
        bits = values.view(np.uint32)
        return ((bits + 0x8000) >> 16).astype(np.uint16)
    return values.astype(dtype)


def byte_alphabet() -> list[str]:
    """The printable stand-ins that byte-level tokenizers use for bytes 0..255 (GPT-2's table)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    return [table[byte] for byte in range(256)]
