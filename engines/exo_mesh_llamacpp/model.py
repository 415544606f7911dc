"""Loads the layers of a stage into the library, from a file in memory that exists only while it loads."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from exo_mesh.engine.contract import LoadProgress
from exo_mesh.errors import ModelError
from exo_mesh_llamacpp.container import ALIGNMENT, lay_out
from exo_mesh_llamacpp.library import Library
from exo_mesh_llamacpp.options import LlamaCppOptions
from exo_mesh_llamacpp.plan import ModelSource, plain_tensors, stage_tensors
from exo_mesh_llamacpp.types import BF16, F16, F32

_READ, _MAP = 0, 1
"""LLAMA_LOAD_MODE: read the file, or map it."""


@dataclass(slots=True)
class LoadedModel:
    """Layers in the library. num_bytes: of their tensors."""

    library: Library
    handle: int
    num_bytes: int
    num_layers: int

    def free(self) -> None:
        self.library.call.llama_model_free(self.handle)


def stage_bytes(source: ModelSource, start: int, stop: int) -> int:
    """Bytes of the tensors of a stage."""
    return sum(tensor.num_bytes for tensor in stage_tensors(source, start, stop))


def load_layers(
    library: Library,
    source: ModelSource,
    span: tuple[int, int],
    options: LlamaCppOptions,
    progress: LoadProgress,
    *,
    with_embedding: bool = False,
) -> LoadedModel:
    """Write the stage's tensors and load them. progress: of bytes. with_embedding: for a whole model that takes token
    ids. Raises ModelError with the library's reason."""
    tensors = plain_tensors(source) if with_embedding else stage_tensors(source, *span)
    total = sum(tensor.num_bytes for tensor in tensors)
    head, placed, file_bytes = lay_out(
        source.metadata(*span), [(tensor.name, tensor.kind, tensor.shape) for tensor in tensors]
    )
    progress(0, total)
    done = 0
    with _scratch_file() as (stream, path):
        stream.write(head)
        for tensor, place in zip(tensors, placed, strict=True):
            stream.seek(place.start)
            tensor.write(stream)
            written = stream.tell() - place.start
            assert written == place.num_bytes, f"{tensor.name}: {written} bytes instead of {place.num_bytes}"
            done += place.num_bytes
            progress(done, total)
        stream.truncate(-(-file_bytes // ALIGNMENT) * ALIGNMENT)
        stream.flush()
        # types that the library packs anew for its kernels would be held twice if the file stayed mapped
        plain = all(tensor.kind.name in (F32.name, F16.name, BF16.name) for tensor in tensors)
        handle = _load(library, path, _MAP if plain else _READ, options)
    wide = library.call.llama_model_n_embd_inp(handle)
    if wide != source.hidden_size:
        library.call.llama_model_free(handle)
        raise ModelError(
            f"llama.cpp takes {wide} values per token of this model, not the {source.hidden_size} of a layer"
        )

    return LoadedModel(library, handle, total, span[1] - span[0])


def _load(library: Library, path: str, load_mode: int, options: LlamaCppOptions) -> int:
    params = library.call.llama_model_default_params()
    params.load_mode = load_mode
    params.n_gpu_layers = options.gpu_layers
    library.forget_log()
    handle = library.call.llama_model_load_from_file(path.encode(), params)
    if not handle:
        raise ModelError(f"llama.cpp cannot load these layers: {library.last_error() or 'no reason given'}")
    return int(handle)


@contextmanager
def _scratch_file() -> Iterator[tuple[BinaryIO, str]]:
    """An empty file and the path under which the library can open it; gone afterwards, unless it is mapped."""
    if sys.platform == "linux":
        descriptor = os.memfd_create("exo-mesh-layers", os.MFD_CLOEXEC)
        with os.fdopen(descriptor, "w+b", buffering=0) as stream:
            yield stream, f"/proc/self/fd/{descriptor}"
        return
    with tempfile.NamedTemporaryFile(prefix="exo-mesh-layers-", suffix=".gguf", delete=False) as named:
        try:
            yield named, named.name
        finally:
            Path(named.name).unlink(missing_ok=True)
