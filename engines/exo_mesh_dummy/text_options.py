"""The options of the dummy text engine, which describe its pretended server."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from exo_mesh.errors import InputError

NAME = "dummy-text"


class TextOptions(msgspec.Struct, frozen=True):
    """Options of the dummy text engine. models: names, joined by "+". delay_ms: before each word. words: of an answer.
    slots: requests at once. continues: whether it goes on after the beginning of an answer. up_file: if set, the server
    is up only while this file exists. stands_for: a JSON object from served names to models of the mesh. context: most
    tokens."""

    models: tuple[str, ...] = ()
    delay_ms: float = 0.0
    words: int = 16
    slots: int = 4
    continues: bool = True
    up_file: str = ""
    stands_for: Mapping[str, str] | None = None
    context: int = 4096


def parse_text_options(options: Mapping[str, str]) -> TextOptions:
    """Parse the options. Raises InputError for an unknown option or a value that does not fit."""
    known: dict[str, Any] = {
        "models": lambda text: tuple(filter(None, text.split("+"))),
        "delay_ms": float,
        "words": int,
        "slots": int,
        "continues": lambda text: text == "true",
        "up_file": str,
        "stands_for": json.loads,
        "context": int,
    }
    values: dict[str, Any] = {}
    for name, text in options.items():
        if name not in known:
            raise InputError(f"{NAME} has no option {json.dumps(name)}; it has {', '.join(known)}", param=name)
        try:
            values[name] = known[name](text)
        except ValueError as exc:
            raise InputError(f"{name}={text} is not a valid value", param=name) from exc
    return TextOptions(**values)


def is_up(options: TextOptions) -> bool:
    """Whether the pretended server is up."""
    return not options.up_file or Path(options.up_file).exists()
