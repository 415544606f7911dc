"""The allowed names of models and their files. Names from strangers become paths only if they match."""

from __future__ import annotations

import re
import unicodedata

MAX_NAME = 200
"""Most characters of the name of a model. Hub ids have at most 96 on each side of the slash."""

PART = r"[A-Za-z0-9][\w.+\-]*"
"""One part of a model's name: its organisation, its own name, a revision, or a tag."""

MODEL_NAME = re.compile(rf"{PART}(?:/{PART})?(?:@{PART})?")
"""`name`, `org/name` or `org/name@revision`: the directory of a model below a directory of models."""

_UNUSABLE = re.compile(r"[^\w.+@]+")
_UNUSABLE_IN_FILES = re.compile(r"[^\w.]+")

FILE_NAME = re.compile(r"[\w\-][\w.\-]{0,240}")
"""A file of a model, directly in its directory. Files of a hub may be in folders too: models/fetcher/listings.py."""

WEIGHT_SUFFIXES = frozenset({"safetensors", "gguf"})
TEXT_SUFFIXES = frozenset({"json", "jinja", "txt", "model", "tiktoken"})
"""Config, and tokenizers in all their forms."""

CODE_SUFFIX = "py"


def is_model_name(name: str) -> bool:
    """Whether a directory of fetched models may have this name."""
    return len(name) <= MAX_NAME and MODEL_NAME.fullmatch(name) is not None


def usable_name(name: str) -> str:
    """The name in the mesh of a model whose files lie under `name`, which people and browsers choose.

    `My models/Tiny (1)` is `My-models/Tiny-1`: a hyphen stands for what no name of a model may have. Unchanged if the
    name may be used as it is, or has control characters, which nobody types. The result may not match MODEL_NAME.
    """
    if MODEL_NAME.fullmatch(name) or not name.isprintable():
        return name
    parts = (_UNUSABLE.sub("-", part).strip("-") for part in unicodedata.normalize("NFC", name).split("/"))
    return "/".join(unicodedata.normalize("NFKD", part[:1])[:1] + part[1:] for part in parts)


def usable_file_name(name: str) -> str:
    """The name that peers use for a file of a model, which people and browsers chose: see `usable_name`."""
    if FILE_NAME.fullmatch(name):
        return name
    return _UNUSABLE_IN_FILES.sub("-", unicodedata.normalize("NFC", name)).lstrip("-.")


def suffix_of(name: str) -> str:
    """The suffix of a file name, without the dot; "" if it has none, or if no file of a model may have this name."""
    return name.rpartition(".")[2] if FILE_NAME.fullmatch(name) and "." in name else ""


def is_text_file(name: str) -> bool:
    """Whether a file is config, part of a tokenizer, or the license."""
    is_license = name.startswith("LICENSE") and FILE_NAME.fullmatch(name) is not None
    return is_license or suffix_of(name) in TEXT_SUFFIXES
