"""How models and their files may be called. Names that strangers give become paths only if they fit."""

from __future__ import annotations

import re

MAX_NAME = 200
"""Characters of the name of a model. Hub ids have at most 96 on each side of the slash."""

PART = r"[A-Za-z0-9][\w.+\-]*"
"""Of the name of a model: its organisation, its own name, a revision, or a tag."""

MODEL_NAME = re.compile(rf"{PART}(?:/{PART})?(?:@{PART})?")
"""`name`, `org/name` or `org/name@revision`: how the directory of a model is called below a directory of models."""

FILE_NAME = re.compile(r"[\w\-][\w.\-]{0,240}")
"""A file of a model, in its directory itself. A hub's files may be in folders as well: see fetcher/listings.py."""

WEIGHT_SUFFIXES = frozenset({"safetensors", "gguf"})
TEXT_SUFFIXES = frozenset({"json", "jinja", "txt", "model", "tiktoken"})
"""Config, and tokenizers in all their forms."""

CODE_SUFFIX = "py"


def is_model_name(name: str) -> bool:
    """Checks whether a directory of fetched models may have this name."""
    return len(name) <= MAX_NAME and MODEL_NAME.fullmatch(name) is not None


def suffix_of(name: str) -> str:
    """Of the name of a file, without the dot; "" if the name is no file's of a model, or has none."""
    return name.rpartition(".")[2] if FILE_NAME.fullmatch(name) and "." in name else ""


def is_text_file(name: str) -> bool:
    """Checks whether a file is config, part of a tokenizer, or the license."""
    is_license = name.startswith("LICENSE") and FILE_NAME.fullmatch(name) is not None
    return is_license or suffix_of(name) in TEXT_SUFFIXES
