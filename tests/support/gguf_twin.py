"""Writes a checkpoint of transformers as a GGUF file, in the way of llama.cpp's converter. Needs the package `gguf`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from exo_mesh.weights.safetensors import TensorInfo, read_tensor_table

INTERLEAVED = ("llama", "mistral", "mixtral", "smollm3", "granite")
"""The model types whose queries and keys the converter reorders."""

PLUS_ONE = ("gemma", "gemma2", "gemma3_text")
ARCHITECTURES = {
    "mixtral": "llama", "mistral": "llama", "qwen2_moe": "qwen2moe", "qwen3_moe": "qwen3moe", "gemma3_text": "gemma3",
}  # fmt: skip
"""{model_type: general.architecture} where they differ."""


def write_gguf_twin(
    model_dir: Path,
    file: Path,
    quantisation: str = "F32",
    *,
    shards: int = 1,
    extra: Mapping[str, Any] | None = None,
) -> Path:
    """Write the weights, config and tokenizer of a directory. quantisation: of all matrices whose width allows it.

    extra: further entries of the metadata, by key without the architecture; their values are integers, floats or texts.
    Returns the file, or the first shard.
    """
    import gguf

    config = json.loads((model_dir / "config.json").read_text())
    model_type = config["model_type"]
    architecture = ARCHITECTURES.get(model_type, model_type)
    tensors = _named(model_dir, config, architecture)
    if shards > 1:
        file = file.with_name(f"{file.name.removesuffix('.gguf')}-00001-of-{shards:05d}.gguf")
    parts = _cut(tensors, shards)
    for number, names in enumerate(parts):
        path = Path(str(file).replace("-00001-of-", f"-{number + 1:05d}-of-"))
        writer = gguf.GGUFWriter(str(path), architecture)
        if number == 0:
            _write_config(writer, config, extra or {})
            _write_tokenizer(writer, model_dir, config)
        if shards > 1:
            writer.add_uint16("split.no", number)
            writer.add_uint16("split.count", shards)
            writer.add_int32("split.tensors.count", len(tensors))
        for name in names:
            _add(writer, name, tensors[name], quantisation)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return file


def read_floats(info: TensorInfo) -> np.ndarray:
    """A tensor of a safetensors file as float32."""
    with info.file.open("rb") as stream:
        stream.seek(info.start)
        raw = stream.read(info.num_bytes)
    if info.dtype == "BF16":
        return (np.frombuffer(raw, "<u2").astype("<u4") << 16).view("<f4").reshape(info.shape)
    return np.frombuffer(raw, {"F32": "<f4", "F16": "<f2"}[info.dtype]).astype(np.float32).reshape(info.shape)


def _cut(tensors: Mapping[str, np.ndarray], shards: int) -> list[list[str]]:
    names = list(tensors)
    size = -(-len(names) // shards)
    return [names[begin : begin + size] for begin in range(0, len(names), size)]


def _named(model_dir: Path, config: Mapping[str, Any], architecture: str) -> dict[str, np.ndarray]:
    """The tensors under the names of llama.cpp, changed as its converter changes them."""
    import gguf

    kinds = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(kinds[architecture], config["num_hidden_layers"])
    heads, kv_heads = config["num_attention_heads"], config.get("num_key_value_heads", config["num_attention_heads"])
    experts: dict[str, dict[int, np.ndarray]] = {}
    tensors: dict[str, np.ndarray] = {}
    for name, info in read_tensor_table(model_dir).items():
        values = read_floats(info)
        if ".experts." in name:
            before, _, after = name.partition(".experts.")
            number, _, rest = after.partition(".")
            experts.setdefault(f"{before}.experts.{rest}", {})[int(number)] = values
            continue
        found = {"q_proj": heads, "k_proj": kv_heads}.get(name.split(".")[-2])
        if config["model_type"] in INTERLEAVED and found:
            values = values.reshape(found, 2, -1, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)
        if config["model_type"] in PLUS_ONE and name.endswith("norm.weight"):
            values = values + np.float32(1)
        if name.endswith("shared_expert_gate.weight"):
            values = values.reshape(-1)
        mapped = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert mapped is not None, name
        tensors[mapped] = values
    for name, parts in experts.items():
        mapped = names.get_name(name, try_suffixes=(".weight",))
        assert mapped is not None, name
        tensors[mapped] = np.stack([parts[number] for number in sorted(parts)])
    tied = config.get("tie_word_embeddings")
    return {name: values for name, values in tensors.items() if not (tied and name == "output.weight")}


def _add(writer: Any, name: str, values: np.ndarray, quantisation: str) -> None:
    import gguf

    kind = gguf.GGMLQuantizationType[quantisation]
    elements, _ = gguf.GGML_QUANT_SIZES[kind]
    if values.ndim == 1 or quantisation == "F32" or values.shape[-1] % elements or "ffn_gate_inp" in name:
        writer.add_tensor(name, np.ascontiguousarray(values, np.float32))
    elif quantisation == "F16":
        writer.add_tensor(name, values.astype(np.float16))
    else:
        writer.add_tensor(name, gguf.quantize(np.ascontiguousarray(values, np.float32), kind), raw_dtype=kind)


def _write_config(writer: Any, config: Mapping[str, Any], extra: Mapping[str, Any]) -> None:
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config.get("num_key_value_heads", heads))
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    rope = config.get("rope_parameters") or {}
    rope = rope.get("full_attention", rope)
    writer.add_rope_freq_base(config.get("rope_theta") or rope.get("rope_theta") or 10000.0)
    experts = config.get("num_local_experts") or config.get("num_experts")
    if experts:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config["num_experts_per_tok"])
    if config.get("moe_intermediate_size"):
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    if config.get("shared_expert_intermediate_size"):
        writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])
    if config.get("sliding_window"):
        writer.add_sliding_window(config["sliding_window"])
    if config.get("final_logit_softcapping"):
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    if config.get("attn_logit_softcapping"):
        writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
    for key, value in extra.items():
        add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}[type(value)]
        add(f"{writer.arch}.{key}", value)


def _write_tokenizer(writer: Any, model_dir: Path, config: Mapping[str, Any]) -> None:
    """The tokenizer of a directory, which must be byte-level BPE with GPT-2's words; tokens without a meaning if it has
    none."""
    import gguf

    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    if not (model_dir / "tokenizer.json").exists():
        writer.add_token_list([f"t{token_id}" for token_id in range(config["vocab_size"])])
        writer.add_token_merges(["a b"])
        return
    given = json.loads((model_dir / "tokenizer.json").read_text())
    settings = json.loads((model_dir / "tokenizer_config.json").read_text())
    special = {one["content"] for one in given["added_tokens"] if one["special"]}
    added = {one["content"] for one in given["added_tokens"]}
    by_id = {token_id: token for token, token_id in given["model"]["vocab"].items()}
    by_id |= {one["id"]: one["content"] for one in given["added_tokens"]}
    tokens = [by_id.get(token_id, f"[PAD{token_id}]") for token_id in range(config["vocab_size"])]
    kinds = gguf.TokenType
    types = [
        kinds.UNUSED
        if token_id not in by_id
        else kinds.CONTROL
        if token in special
        else kinds.USER_DEFINED
        if token in added
        else kinds.NORMAL
        for token_id, token in enumerate(tokens)
    ]
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in given["model"]["merges"]]
    writer.add_token_list(tokens)
    writer.add_token_types([int(kind) for kind in types])
    writer.add_token_merges(merges or ["a b"])
    for name, add in (("eos_token", writer.add_eos_token_id), ("bos_token", writer.add_bos_token_id)):
        token = settings.get(name)
        token = token.get("content") if isinstance(token, dict) else token
        found = [token_id for token_id, text in by_id.items() if text == token]
        if found:
            add(found[0])
    writer.add_add_bos_token(False)
    if settings.get("chat_template"):
        writer.add_chat_template(settings["chat_template"])
