"""Writes a random model of an architecture as a GGUF file, with as few optional tensors as the library accepts."""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from exo_mesh_llamacpp.container import Value, lay_out
from exo_mesh_llamacpp.library import Library
from exo_mesh_llamacpp.types import F32

from tools.llamacpp_architectures.shapes import Asked, ShapesError

FILE = "model.gguf"
MAX_LOADS = 40
"""Times that the library may name a tensor that is missing."""

_OPTIONAL = re.compile(r"\.(scale|input_scale)$|^rope_f|\.rope_f|nextn|(?<!ssm_conv1d)\.bias$|_sinks|^cls\b|^mtp")
_ABSENT = re.compile(r"(?:tensor '([^']+)' not found|missing tensor '([^']+)')")


def write_model(library: Library, asked: Asked, directory: Path) -> dict[str, Value]:
    """Write the model; returns its metadata. Raises ShapesError with the library's reason if it does not load."""
    chosen = {name: shape for name, shape in asked.shapes.items() if not _OPTIONAL.search(name)}
    file = directory / FILE
    for _ in range(MAX_LOADS):
        write_gguf(file, asked.metadata, chosen)
        library.forget_log()
        handle = library.call.llama_model_load_from_file(str(file).encode(), library.call.llama_model_default_params())
        if handle:
            library.call.llama_model_free(handle)
            return asked.metadata
        reason = library.last_error()
        absent = _ABSENT.search(reason)
        name = (absent[1] or absent[2]) if absent else ""
        if not name or name in chosen or name not in asked.shapes:
            raise ShapesError(reason or "no reason given")
        suffix = re.sub(r"^blk\.\d+\.", "", name)
        chosen |= {other: shape for other, shape in asked.shapes.items() if re.sub(r"^blk\.\d+\.", "", other) == suffix}
    raise ShapesError(f"more than {MAX_LOADS} tensors are missing")


def write_gguf(file: Path, metadata: Mapping[str, Value], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Write a file of float32 tensors. The values of a tensor follow from its name."""
    head, placed, size = lay_out(metadata, [(name, F32, shape) for name, shape in shapes.items()])
    with file.open("wb") as stream:
        stream.write(head)
        for place in placed:
            stream.seek(place.start)
            stream.write(_values(place.name, place.shape).tobytes())
        stream.truncate(size)


def _values(name: str, shape: tuple[int, ...]) -> np.ndarray:
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    noise = rng.standard_normal(tuple(reversed(shape)), np.float32)
    if name.startswith("rope_freqs"):
        return (1 + np.abs(noise)).astype(np.float32)
    if name.endswith("ssm_a"):
        return (-0.5 - np.abs(noise)).astype(np.float32)
    if ("norm" in name and name.endswith(".weight")) or name.endswith("ssm_d"):
        return (1 + 0.1 * noise).astype(np.float32)
    return (noise * (0.1 if len(shape) == 1 else shape[0] ** -0.5)).astype(np.float32)
