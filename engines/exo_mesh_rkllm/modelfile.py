"""Reads RKLLAMA's directory of models: `NAME/FILE.rkllm` with a Modelfile beside it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import msgspec

from exo_mesh_rkllm.options import MOST_MODELS

MODELFILE = "Modelfile"
SUFFIX = ".rkllm"
MAX_BYTES = 16_384
"""Most bytes of a Modelfile that are read."""

MAX_CONTEXT = 1_048_576

_SETTING = re.compile(
    r"""^[ \t]*(?:export[ \t]+)?(?P<key>[A-Z][A-Z0-9_]*)[ \t]*(?:=[ \t]*|[ \t])"""
    r"""(?:"(?P<double>[^"]*)"|'(?P<single>[^']*)'|(?P<plain>[^\n#]*))""",
    re.MULTILINE,
)


class ModelfileFacts(msgspec.Struct, frozen=True):
    """What a Modelfile says. file: of the weights. tokenizer: the hub repository with the tokenizer and the chat
    template. context_limit: tokens of prompt and output; 0 if it is not set."""

    file: str = ""
    tokenizer: str = ""
    context_limit: int = 0


def parse_modelfile(text: str) -> ModelfileFacts:
    """Parse a Modelfile: lines `KEY=value` or `KEY value`, the value in quotes or bare; a quoted one may have several
    lines. Other lines are ignored. If a key is repeated, the last one counts."""
    values: dict[str, str] = {}
    for found in _SETTING.finditer(text):
        value = found["double"] if found["double"] is not None else found["single"]
        values[found["key"]] = found["plain"].strip("\"' \t\r") if value is None else value.strip()
    context = values.get("NUM_CTX", "")
    limit = int(context[:9]) if context.isascii() and context.isdecimal() else 0
    return ModelfileFacts(
        file=values.get("FROM", ""),
        tokenizer=values.get("HUGGINGFACE_PATH", ""),
        context_limit=limit if limit <= MAX_CONTEXT else 0,
    )


def read_models(folder: Path) -> Mapping[str, ModelfileFacts]:
    """The models in a directory, by name, in the order of their names. Blocking. Those without weights are left out;
    an unreadable directory or Modelfile counts as empty."""
    try:
        places = sorted(place for place in folder.expanduser().iterdir() if place.is_dir())[:MOST_MODELS]
    except OSError:
        return {}
    return {place.name: _facts(place) for place in places if _has_weights(place)}


def _has_weights(place: Path) -> bool:
    try:
        return any(file.suffix == SUFFIX for file in place.iterdir())
    except OSError:
        return False


def _facts(place: Path) -> ModelfileFacts:
    file = place / MODELFILE
    try:
        if not file.is_file():
            return ModelfileFacts()
        with file.open("rb") as stream:
            return parse_modelfile(stream.read(MAX_BYTES).decode("utf-8-sig", errors="replace"))
    except OSError:
        return ModelfileFacts()
