"""Reads a ModelCard from a model directory: config.json, generation_config.json and the safetensors headers."""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from exo_mesh.domain.embedding import find_tasks
from exo_mesh.domain.model import ModelCard
from exo_mesh.domain.model_settings import quantization_of, text_config, token_ids
from exo_mesh.domain.spans import Span, Spans, merged
from exo_mesh.errors import ModelError
from exo_mesh.weights.gguf import BLOCK_SIZES, QUANT_METHOD
from exo_mesh.weights.model_files import (
    ADDED_TOKENS_FILE,
    LENGTH_FILE,
    MAX_JSON_BYTES,
    MAX_TOKENIZER_BYTES,
    MODULES_FILE,
    POOLING_FILE,
    PROMPTS_FILE,
    SCORE_FILE,
    TOOL_USE_FILE,
    exists,
    label,
    named,
    open_model_file,
    place_of,
    read_in_pieces,
    read_json,
    read_json_if_there,
    read_steps,
    shown,
    size_of,
)
from exo_mesh.weights.safetensors import DTYPE_BITS, PART, TensorInfo, TensorTable, on_disk
from exo_mesh.weights.tensors import read_tensor_table

TEXT_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
    "config.json",
    MODULES_FILE,
    POOLING_FILE,
    SCORE_FILE,
    PROMPTS_FILE,
    LENGTH_FILE,
)
"""The files that a peer needs to turn text into ids and back; they are small, and fetched from any peer that has the
model."""

IMAGE_FILES = ("preprocessor_config.json", "processor_config.json")
"""Files that a model needs besides for images. They came later, and are in no digest that peers compare."""

LATER_TEXT_FILES = (TOOL_USE_FILE, ADDED_TOKENS_FILE)
"""Further files for text. An older peer does not take them, and they are in no digest that peers compare."""

LAYER_NAME = re.compile(r"(?:^|\.)(?:layers?|h|blocks|blk)\.([0-9]{1,9})\.")
"""Names of the tensors of layer N in checkpoints: `model.layers.N.`, `encoder.layer.N.`, `transformer.h.N.`,
`blocks.N.`, and `blk.N.` in GGUF files."""

QUANT_METHODS = frozenset({"awq", "bitnet", "compressed-tensors", "fp8", "gguf", "gptq", "modelopt", "mxfp4", "mxfp8"})
"""Values of `quant_method` in config.json that at least one shipped engine can load. MLX's own format has none."""

PACKED, GPTQ_ONLY = ".qweight", ".g_idx"
"""Name endings of packed weights of GPTQ and AWQ, and, for GPTQ alone, of the group of each row."""

FLOAT_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_FLOAT8 = {"F8_E4M3": "fp8", "F8_E5M2": "fp8"}

_EMBEDDING = re.compile(
    r"(^|\.)(embed_tokens|wte|word_embeddings|embeddings|tok_embeddings|embed_in|embedding|token_embd)\."
)
_HEAD = re.compile(r"(^|\.)(lm_head|output|embed_out|head)\.")
_FINAL_NORM = re.compile(
    r"(^|\.)(norm|ln_f|final_layernorm|final_layer_norm|embedding_norm|norm_f|final_norm|output_norm|token_embd_norm)\."
)
_SIDE_MODEL = re.compile(r"(^|\.)(vision_tower|vision_model|visual|vit|audio_tower|multi_modal_projector|mtp)\.")
_TABLE = re.compile(r"\.(engram\.embed|engram_embd|ple_embedding\.ngram_embedding)\.")
"""Tables of n-grams within a layer: of DeepSeek V4.1 in its files and in GGUF files, and of Qwen4-Exp. A token looks up
a few rows, so engines read them from the files (or say in their survey that they hold them)."""

_VISION = re.compile(r"(^|\.)(vision_tower|vision_model|visual|multi_modal_projector)\.")
MAX_LAYERS = 10_000
"""Most layers of a model. The deepest models have some hundreds; each layer costs memory on every peer that knows the
model."""

MAX_FIGURE = 2**31 - 1
"""Largest width, length or token id in config.json: what messages between peers can carry."""

NO_LIMIT = 2**20
"""Context length of a model that has no limit of its own, because it has a state in place of positions."""

MAX_KV_BYTES = 2**48
_MAX_ARCHITECTURE = 100
_ROWS = 4096
_SAMPLED_TENSORS = 32
_SAMPLED_BYTES = 256


def layer_of(tensor_name: str) -> int | None:
    """The decoder layer that a tensor belongs to, or None for embedding, norm, head, and vision or audio towers."""
    if _SIDE_MODEL.search(tensor_name):
        return None
    found = LAYER_NAME.search(tensor_name)
    return int(found.group(1)) if found else None


def is_side_model(tensor_name: str) -> bool:
    """Whether a tensor belongs to a tower for pictures or sound, or to heads that predict several tokens."""
    return _SIDE_MODEL.search(tensor_name) is not None


def is_vision(tensor_name: str) -> bool:
    """Whether a tensor belongs to a vision tower, or to what makes tokens of its output: the first stage may need
    it."""
    return _VISION.search(tensor_name) is not None


def is_vocabulary(tensor_name: str) -> bool:
    """Whether a tensor belongs to the embedding or the head, and so has a row per token id."""
    return _EMBEDDING.search(tensor_name) is not None or _HEAD.search(tensor_name) is not None


def is_head(tensor_name: str) -> bool:
    """Whether a tensor belongs to an output head of its own."""
    return _HEAD.search(tensor_name) is not None and _EMBEDDING.search(tensor_name) is None


def read_card(model_dir: Path, name: str) -> ModelCard:
    """The card of the model in `model_dir`: all that planning needs to know. Raises ModelError in a sentence that names
    the file."""
    file = model_dir / "config.json"
    config = read_json(file)
    if not exists(model_dir / "tokenizer.json"):
        raise ModelError(f"{label(model_dir)} has no tokenizer.json, so {name} cannot be used")
    text = text_config(config)
    check_quantisation(model_dir, config)
    table = read_tensor_table(model_dir)
    _check_packing(model_dir, config, table)
    num_layers = _num_layers(model_dir, text)
    hidden_size = _require_size(model_dir, text, "hidden_size", "n_embd", "d_model", "dim")
    dtype = _activation_dtype(text, table)
    layer_bytes, table_bytes, embed_bytes, head_bytes, tied = _measure(model_dir, table, num_layers)
    return ModelCard(
        name=name,
        architecture=_architecture(model_dir, config),
        num_layers=num_layers,
        hidden_size=hidden_size,
        vocab_size=_require_size(model_dir, text, "vocab_size"),
        context_length=_context_length(model_dir, text),
        layer_bytes=layer_bytes,
        embed_bytes=embed_bytes,
        head_bytes=head_bytes,
        tied=tied,
        kv_bytes_per_token=_kv_bytes(model_dir, text, hidden_size, dtype),
        dtype=dtype,
        eos_ids=_eos_ids(model_dir, config),
        legal_cuts=tuple(range(1, num_layers)),
        digest=_digest(read_json(file, as_written=True), table),
        text_digest=_text_digest(model_dir),
        tasks=find_tasks(config, read_steps(model_dir)),
        quantization=_quantization(config, table, dtype),
        table_bytes=table_bytes,
    )


def _architecture(model_dir: Path, config: Mapping[str, Any]) -> str:
    architecture = config.get("model_type")
    if not isinstance(architecture, str) or not architecture:
        raise ModelError(f"{_config_of(model_dir)} has no model_type")
    if len(architecture) > _MAX_ARCHITECTURE or not architecture.isprintable():
        raise ModelError(f"{_config_of(model_dir)} has no usable model_type: {shown(architecture)}")
    return architecture


def _config_of(model_dir: Path) -> str:
    return named(model_dir / "config.json")


def _find_size(text: Mapping[str, Any], *keys: str) -> int | None:
    """The value of the first of `keys` that holds a positive integer up to MAX_FIGURE."""
    for key in keys:
        value = text.get(key)
        if isinstance(value, int) and not isinstance(value, bool) and 0 < value <= MAX_FIGURE:
            return value
    return None


def _require_size(model_dir: Path, text: Mapping[str, Any], *keys: str) -> int:
    value = _find_size(text, *keys)
    if value is None:
        raise ModelError(f"{_config_of(model_dir)} has no usable {keys[0]}: {shown(text.get(keys[0]))}")
    return value


def _num_layers(model_dir: Path, text: Mapping[str, Any]) -> int:
    num_layers = _require_size(model_dir, text, "num_hidden_layers", "n_layer", "num_layers", "n_layers")
    if num_layers > MAX_LAYERS:
        raise ModelError(f"{_config_of(model_dir)} says {num_layers} layers; at most {MAX_LAYERS} are supported")
    return num_layers


def _context_length(model_dir: Path, text: Mapping[str, Any]) -> int:
    """The most positions of config.json; without any, as for models without attention, the length that the tokenizer's
    settings give."""
    keys = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "n_ctx", "max_sequence_length")
    if (found := _find_size(text, *keys)) is not None:
        return found
    of_tokenizer = read_json_if_there(model_dir / "tokenizer_config.json").get("model_max_length")
    if isinstance(of_tokenizer, int | float) and of_tokenizer > MAX_FIGURE:
        return NO_LIMIT  # transformers writes 10^30 where there is no limit
    return _find_size({"model_max_length": of_tokenizer}, "model_max_length") or _require_size(model_dir, text, *keys)


def quant_method_at(model_dir: Path) -> str:
    """The `quant_method` of a model on this machine, "gguf" for GGUF files; "" if its config.json names or has none."""
    try:
        config = read_json(model_dir / "config.json")
        quantisation = text_config(config).get("quantization_config")
    except ModelError:
        return ""
    if config.get("quantization") or not isinstance(quantisation, dict):
        return ""
    return str(quantisation.get("quant_method") or "")


def check_quantisation(model_dir: Path, config: Mapping[str, Any]) -> None:
    """Raises ModelError if config.json names a quantisation that no shipped engine can load."""
    text = text_config(config)
    quantisation = text.get("quantization_config") or config.get("compression_config")
    if not quantisation or config.get("quantization"):
        return
    method = quantisation.get("quant_method") if isinstance(quantisation, dict) else None
    if not isinstance(method, str) or method not in QUANT_METHODS:
        known = ", ".join(sorted(QUANT_METHODS))
        raise ModelError(
            f"{_config_of(model_dir)}: quantisation {shown(method)} is not supported by any engine; known: {known}"
        )


def _check_packing(model_dir: Path, config: Mapping[str, Any], table: TensorTable) -> None:
    """Raises ModelError if config.json and the tensors disagree on GPTQ or AWQ: an engine would fail while loading."""
    quantisation = text_config(config).get("quantization_config")
    says = quantisation.get("quant_method") if isinstance(quantisation, dict) else None
    packed = next((name for name in table if name.endswith(PACKED)), None)
    if says in ("gptq", "awq") and packed is None:
        raise ModelError(
            f"{_config_of(model_dir)} says that the weights are quantised by {says}, but no tensor is packed that way "
            f"(none is called *{PACKED}); use another repository of the model"
        )
    if packed is None:
        return
    if not quantisation and not config.get("quantization"):
        raise ModelError(
            f"{label(model_dir)}: {packed} is packed by GPTQ or AWQ, but config.json has no quantization_config; use "
            "another repository of the model"
        )
    if says == "awq" and (of_gptq := packed.removesuffix(PACKED) + GPTQ_ONLY) in table:
        raise ModelError(
            f"{_config_of(model_dir)} says that the weights are quantised by awq, but {of_gptq} belongs to GPTQ; use "
            "another repository of the model"
        )


def _kv_bytes(model_dir: Path, text: Mapping[str, Any], hidden_size: int, dtype: str) -> int:
    """Bytes of keys and values of one layer for one token. Compressed (MLA) and windowed caches take less: a safe
    bound."""
    heads = _require_size(model_dir, text, "num_attention_heads", "n_head", "n_heads", "num_heads")
    kv_heads = _find_size(text, "num_key_value_heads", "num_kv_heads", "n_kv_heads") or heads
    head_dim = _find_size(text, "head_dim") or max(1, hidden_size // heads)
    kv_bytes = 2 * kv_heads * head_dim * (4 if dtype == "float32" else 2)
    if kv_bytes > MAX_KV_BYTES:
        raise ModelError(f"{_config_of(model_dir)}: {kv_heads} heads of {head_dim} would take {kv_bytes} bytes a token")
    return kv_bytes


def _quantization(config: Mapping[str, Any], table: TensorTable, dtype: str) -> str:
    """As the config says it. Where the config was made here from a GGUF file, or says nothing: the type of most bytes
    of the layers. "" for plain weights of the dtype that the card has anyway."""
    found = quantization_of(config) or ""
    if found not in ("", QUANT_METHOD):
        return found
    sizes: Counter[str] = Counter()
    for name, info in table.items():
        if layer_of(name) is not None:
            sizes[info.dtype] += info.num_bytes
    most = max(sizes, key=lambda one: sizes[one], default=found)
    if found == QUANT_METHOD:
        return most
    named = FLOAT_DTYPES.get(most) or _FLOAT8.get(most) or most.lower()
    return "" if named == dtype else named


def _activation_dtype(text: Mapping[str, Any], table: TensorTable) -> str:
    """The most common floating dtype of the layers' tensors (norms and scales, where weights are packed). For a GGUF
    file, whose norms are float32 whatever the others are, the dtype that was chosen for its config."""
    if any(info.dtype in BLOCK_SIZES and info.dtype not in DTYPE_BITS for info in table.values()):
        return _declared_dtype(text)
    counts = Counter(FLOAT_DTYPES[info.dtype] for info in table.values() if info.dtype in FLOAT_DTYPES)
    if counts:
        return counts.most_common(1)[0][0]
    return _declared_dtype(text)


def _declared_dtype(text: Mapping[str, Any]) -> str:
    declared = str(text.get("dtype") or text.get("torch_dtype"))
    return declared if declared in FLOAT_DTYPES.values() else "bfloat16"


def _measure(
    model_dir: Path, table: TensorTable, num_layers: int
) -> tuple[tuple[int, ...], tuple[int, ...], int, int, bool]:
    """(bytes per layer, bytes of its tables, embed bytes, head bytes, tied); no tables are (). Raises ModelError if a
    layer has no tensors.

    Tensors that are neither layer, norm nor head count with the embedding. Towers for pictures and sound, and layers
    past num_layers (multi-token prediction), are loaded by no shipped engine and are not counted.
    """
    layers, tables = [0] * num_layers, [0] * num_layers
    embed_bytes = head_bytes = 0
    has_head = False
    for name, info in table.items():
        layer = layer_of(name)
        if layer is not None:
            if layer < num_layers:
                (tables if _TABLE.search(name) else layers)[layer] += info.num_bytes
        elif _SIDE_MODEL.search(name):
            continue
        elif is_head(name):
            head_bytes += info.num_bytes
            has_head = True
        elif _FINAL_NORM.search(name) and not _EMBEDDING.search(name):
            head_bytes += info.num_bytes
        else:
            embed_bytes += info.num_bytes
    empty = [i for i, size in enumerate(layers) if not size]
    if empty:
        found = f"{label(model_dir)} has no tensors of layer {empty[0]}"
        raise ModelError(f"{found}; config.json says {num_layers} layers")
    if not has_head:
        head_bytes += embed_bytes
    return tuple(layers), tuple(tables) if any(tables) else (), embed_bytes, head_bytes, not has_head


def _eos_ids(model_dir: Path, config: Mapping[str, Any]) -> tuple[int, ...]:
    try:
        return token_ids("eos_token_id", read_json_if_there(model_dir / "generation_config.json"), config)
    except ValueError as exc:
        raise ModelError(f"{label(model_dir)}: {exc}") from exc


def _digest(config: Mapping[str, Any], table: TensorTable) -> str:
    """SHA-256 over config as it is written, names, dtypes and shapes, and the first bytes of a few tensors (fine-tunes
    differ there). Does not depend on how the checkpoint is cut into files."""
    names = sorted(table)
    digest = hashlib.sha256(f"[{_compact(config)},[".encode())
    for begin in range(0, len(names), _ROWS):  # in parts: one text of all rows would be large and block for long
        rows = [[name, table[name].dtype, table[name].shape] for name in names[begin : begin + _ROWS]]
        digest.update((("," if begin else "") + _compact(rows)[1:-1]).encode())
    digest.update(b"]]")
    for file, infos in groupby((table[name] for name in _sampled(names)), key=lambda info: info.file):
        for sample in _first_bytes(file, infos):
            digest.update(sample)
    return digest.hexdigest()


def digest_samples(table: TensorTable) -> dict[str, Spans]:
    """The byte ranges of tensors that a card's digest depends on, by the name of the whole file."""
    found: dict[str, list[Span]] = {}
    for name in _sampled(sorted(table)):
        info = table[name]
        span = info.start, info.start + min(_SAMPLED_BYTES, info.num_bytes)
        found.setdefault(info.file.name.removesuffix(PART), []).append(span)
    return {file: merged(spans) for file, spans in found.items()}


def _sampled(names: Sequence[str]) -> Sequence[str]:
    return names[:: max(1, len(names) // _SAMPLED_TENSORS)]


def _compact(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def text_file_limit(name: str) -> int:
    """The most bytes that one of TEXT_FILES may have."""
    return MAX_TOKENIZER_BYTES if name == "tokenizer.json" else MAX_JSON_BYTES


def _text_digest(model_dir: Path) -> str:
    """SHA-256 over the names, lengths and contents of TEXT_FILES."""
    digest = hashlib.sha256()
    for name in TEXT_FILES:
        file = place_of(model_dir, name)
        try:
            num_bytes = size_of(file)
            digest.update(f"{name} {num_bytes}\n".encode())
            for piece in read_in_pieces(file, text_file_limit(name)):
                digest.update(piece)
        except FileNotFoundError:
            continue
    return digest.hexdigest()


def _first_bytes(file: Path, infos: Iterable[TensorInfo]) -> Iterator[bytes]:
    """The first bytes of tensors of a file, which is opened once: to check where it leads takes longer than to read."""
    try:
        with open_model_file(on_disk(file)) as stream:
            for info in infos:
                stream.seek(info.start)
                yield stream.read(min(_SAMPLED_BYTES, info.num_bytes))
    except OSError as exc:
        raise ModelError(f"{named(file)} cannot be read: {exc.strerror or type(exc).__name__}") from exc
