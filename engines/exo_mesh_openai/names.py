"""Names in the mesh for the models of a server."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import PurePosixPath

from exo_mesh.weights.names import MAX_NAME, is_model_name

_GGUF = ".gguf"
_UNSAFE = re.compile(r"[^\w.+/@-]+", re.ASCII)


def mesh_names(served_names: Iterable[str], given: Mapping[str, str]) -> dict[str, str]:
    """By the server's name, a name in the mesh for each model; no two are equal. given: names that an operator
    chose."""
    found: dict[str, str] = {}
    for served in served_names:
        wanted = given.get(served) or safe_name(served)
        name, number = wanted, 2
        while name in found.values():
            name, number = f"{wanted}-{number}", number + 1
        found[served] = name
    return found


def safe_name(served_name: str) -> str:
    """A name of the allowed form that is as like the server's name as can be.

    A path or a GGUF file gives its last part without the suffix. A tag `:8b` becomes `-8b`, because a model name in the
    mesh has no colon.
    """
    is_path = served_name.startswith("/") or "\\" in served_name or served_name.lower().endswith(_GGUF)
    text = PurePosixPath(served_name.replace("\\", "/")).name if is_path else served_name
    text = text[: -len(_GGUF)] if text.lower().endswith(_GGUF) else text
    text = _UNSAFE.sub("-", text).strip("-/@.+_")[:MAX_NAME]
    if is_model_name(text):
        return text
    flat = re.sub(r"[/@]+", "-", text).strip("-.+_")
    return flat if is_model_name(flat) else "model"
