"""Opens a model on disk as a source of stages."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from exo_mesh.errors import InputError
from exo_mesh.weights.tensors import gguf_file_of
from exo_mesh_llamacpp.gguf_source import GgufModel
from exo_mesh_llamacpp.library import Library
from exo_mesh_llamacpp.options import LlamaCppOptions
from exo_mesh_llamacpp.plan import ModelSource
from exo_mesh_llamacpp.safetensors_source import SafetensorsSource


def open_source(model_dir: Path, options: LlamaCppOptions, get_library: Callable[[], Library]) -> ModelSource:
    """Raises ModelError naming file and key or tensor for a model that this engine cannot compute."""
    first = gguf_file_of(model_dir)
    if first is not None:
        if options.quant:
            raise InputError(f"quant={options.quant}: a GGUF model keeps the types of its file", param="quant")
        return GgufModel(model_dir, first)
    return SafetensorsSource(model_dir, options.quant, get_library)
