"""Makes the text files of a model directory from the header of its GGUF files: config and tokenizer."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from exo_mesh.errors import ModelError
from exo_mesh.weights.gguf import GgufHeader
from exo_mesh.weights.gguf_config import make_config
from exo_mesh.weights.gguf_families import ROPE_FACTORS
from exo_mesh.weights.gguf_table import checkpoint_table, file_table, find_first_file, read_headers
from exo_mesh.weights.gguf_tokenizer import make_tokenizer, make_tokenizer_config
from exo_mesh.weights.model_files import (
    CONFIG,
    MAX_JSON_BYTES,
    MAX_TOKENIZER_BYTES,
    TOKENIZER,
    label,
    named,
    open_model_file,
)
from exo_mesh.weights.safetensors import TensorInfo, TensorTable, on_disk

TOKENIZER_CONFIG = "tokenizer_config.json"
MADE_FILES = (CONFIG, TOKENIZER, TOKENIZER_CONFIG)
"""The files that are made, in the order in which they are written."""


def texts_of_gguf(headers: Sequence[GgufHeader], *, has_tokenizer: bool = False) -> dict[str, bytes]:
    """The content of each of MADE_FILES by its name. has_tokenizer: there is a tokenizer.json that is used instead.

    Reads some bytes of the files for the frequencies of the rotary embedding. Raises ModelError if the model is not
    supported.
    """
    first, table = headers[0], file_table(headers)
    checkpoint_table(first, table)  # refuses tensors that would be left out
    made: dict[str, Mapping[str, Any]] = {CONFIG: make_config(first, table, _read_tensor)}
    if not has_tokenizer:
        made[TOKENIZER] = make_tokenizer(first)
    made[TOKENIZER_CONFIG] = make_tokenizer_config(first)
    texts = {name: json.dumps(content, ensure_ascii=False, indent=None).encode() for name, content in made.items()}
    for name, text in texts.items():
        most = MAX_TOKENIZER_BYTES if name == TOKENIZER else MAX_JSON_BYTES
        if len(text) > most:
            raise ModelError(f"the {name} that its metadata gives has {len(text)} bytes, more than {most}")
    return texts


def make_texts(model_dir: Path) -> dict[str, bytes]:
    """As texts_of_gguf, of the files in a directory. Raises ModelError naming the model."""
    first = find_first_file(model_dir)
    if first is None:
        raise ModelError(f"{label(model_dir)} has no GGUF file of a model")
    headers = read_headers(model_dir, first)
    try:
        return texts_of_gguf(headers, has_tokenizer=(model_dir / TOKENIZER).exists())
    except ModelError as exc:
        text = str(exc)
        raise exc if text.startswith(f"{label(model_dir)}") else ModelError(f"{label(model_dir)}: {text}") from exc


def config_tensors(table: TensorTable) -> list[TensorInfo]:
    """The tensors that the config is made from, by their names in the files."""
    return [table[name] for name in ROPE_FACTORS if name in table]


def _read_tensor(info: TensorInfo) -> bytes:
    try:
        with open_model_file(on_disk(info.file)) as stream:
            stream.seek(info.start)
            return stream.read(info.num_bytes)
    except OSError as exc:
        raise ModelError(f"{named(info.file)} cannot be read: {exc.strerror or type(exc).__name__}") from exc
