"""Writes a random model of an architecture as a GGUF file, with as few optional tensors as the library accepts."""

from __future__ import annotations

import re
from pathlib import Path

from exo_mesh_llamacpp.canary_models import write_random
from exo_mesh_llamacpp.library import Library

from tools.llamacpp_architectures.shapes import Asked, ShapesError

FILE = "model.gguf"
MAX_LOADS = 40
"""Times that the library may name a tensor that is missing."""

_OPTIONAL = re.compile(r"\.(scale|input_scale)$|^rope_f|\.rope_f|nextn|(?<!ssm_conv1d)\.bias$|_sinks|^cls\b|^mtp")
_ABSENT = re.compile(r"(?:tensor '([^']+)' not found|missing tensor '([^']+)')")


def write_model(library: Library, asked: Asked, directory: Path) -> dict[str, tuple[int, ...]]:
    """Write the model; returns the shapes of its tensors. Raises ShapesError with the library's reason."""
    chosen = {name: shape for name, shape in asked.shapes.items() if not _OPTIONAL.search(name)}
    file = directory / FILE
    for _ in range(MAX_LOADS):
        write_random(file, asked.metadata, chosen)
        library.forget_log()
        handle = library.call.llama_model_load_from_file(str(file).encode(), library.call.llama_model_default_params())
        if handle:
            library.call.llama_model_free(handle)
            return chosen
        reason = library.last_error()
        absent = _ABSENT.search(reason)
        name = (absent[1] or absent[2]) if absent else ""
        if not name or name in chosen or name not in asked.shapes:
            raise ShapesError(reason or "no reason given")
        suffix = re.sub(r"^blk\.\d+\.", "", name)
        chosen |= {other: shape for other, shape in asked.shapes.items() if re.sub(r"^blk\.\d+\.", "", other) == suffix}
    raise ShapesError(f"more than {MAX_LOADS} tensors are missing")
