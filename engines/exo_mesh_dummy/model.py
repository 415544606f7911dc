"""The parts of a model directory that the dummy needs: sizes from config.json, printable tokens from tokenizer.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from exo_mesh.domain.model_settings import text_config
from exo_mesh.errors import ModelError
from exo_mesh.weights.model_files import read_json_if_there, read_tokenizer_text

PSEUDO_VOCAB = 256
PSEUDO_HIDDEN = 128


class DummyModel(msgspec.Struct, frozen=True):
    """The sizes of a model. printable: int32 ids of tokens that are one printable ASCII character each; never empty."""

    vocab_size: int
    hidden_size: int
    printable: np.ndarray


def read_dummy_model(model_dir: Path) -> DummyModel:
    """Read any model directory; without a config.json it is a pseudo-model whose ids are bytes."""
    text = text_config(read_json_if_there(model_dir / "config.json"))
    vocab_size = int(text.get("vocab_size") or PSEUDO_VOCAB)
    hidden_size = int(text.get("hidden_size") or text.get("n_embd") or PSEUDO_HIDDEN)
    vocab = _vocabulary(model_dir / "tokenizer.json")
    by_token = vocab.items() if isinstance(vocab, dict) else ()
    found = [i for token, i in by_token if _is_character(token) and 0 <= i < vocab_size]
    printable = sorted(found) or list(range(min(32, vocab_size - 1), min(127, vocab_size)))
    return DummyModel(vocab_size, hidden_size, np.array(printable, np.int32))


def _vocabulary(file: Path) -> Any:
    if not file.is_file():
        return {}
    try:
        return json.loads(read_tokenizer_text(file)).get("model", {}).get("vocab", {})
    except (ValueError, AttributeError) as exc:
        raise ModelError(f"{file} is not a JSON object of a tokenizer: {exc}") from exc


def _is_character(token: str) -> bool:
    return len(token) == 1 and "!" <= token <= "~"
