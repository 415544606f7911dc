"""Tiny random models, one of each architecture that runs from GGUF files.

`tiny_models.json` has their metadata and shapes; `python -m tools.architectures.canaries` writes it. A name
`blk.*.NAME` stands for this tensor in every layer.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from exo_mesh_llamacpp.container import Value, lay_out
from exo_mesh_llamacpp.types import F32

MODELS = Path(__file__).with_name("tiny_models.json")

Shapes = Mapping[str, tuple[int, ...]]
"""Of tensors by name, the length of a row first."""

_EVERY = "blk.*."


@cache
def _models() -> Any:
    return json.loads(MODELS.read_text(encoding="utf-8"))


def known() -> frozenset[str]:
    """The architectures that have a model."""
    return frozenset(_models())


def write_tiny(arch: str, file: Path) -> None:
    """Write the model of an architecture of `known`."""
    found = _models()[arch]
    metadata: dict[str, Value] = found["metadata"]
    layers = int(found["metadata"][f"{arch}.block_count"])
    shapes: dict[str, tuple[int, ...]] = {}
    for name, shape in found["tensors"].items():
        names = [name.replace(_EVERY, f"blk.{index}.", 1) for index in range(layers if name.startswith(_EVERY) else 1)]
        shapes |= dict.fromkeys(names, tuple(shape))
    write_random(file, metadata, shapes)


def packed(arch: str, metadata: Mapping[str, Value], shapes: Shapes) -> dict[str, Any]:
    """A model as `tiny_models.json` has it."""
    layers = metadata[f"{arch}.block_count"]
    assert isinstance(layers, int), "a count"
    every: dict[str, set[tuple[int, ...]]] = {}
    for name, shape in shapes.items():
        if name.startswith("blk."):
            every.setdefault(name.split(".", 2)[2], set()).add(shape)
    tensors: dict[str, list[int]] = {}
    for name, shape in shapes.items():
        last = name.split(".", 2)[2] if name.startswith("blk.") else ""
        if last and len(every[last]) == 1 and all(f"blk.{index}.{last}" in shapes for index in range(layers)):
            tensors[_EVERY + last] = list(shape)
        else:
            tensors[name] = list(shape)
    return {"metadata": dict(metadata), "tensors": tensors}


def write_random(file: Path, metadata: Mapping[str, Value], shapes: Shapes) -> None:
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
