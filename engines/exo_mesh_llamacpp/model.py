"""Loads the layers of a stage into the library, as a model of their own."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

from exo_mesh.engine.contract import LoadProgress
from exo_mesh.errors import ModelError
from exo_mesh_llamacpp.container import Placed, lay_out
from exo_mesh_llamacpp.layouts import ModelParams
from exo_mesh_llamacpp.library import Library
from exo_mesh_llamacpp.options import LlamaCppOptions
from exo_mesh_llamacpp.plan import ModelSource, Planned, plain_tensors, stage_tensors
from exo_mesh_llamacpp.stream import LayerStream, can_stream

_READ = 0
"""LLAMA_LOAD_MODE_NONE: read the file, and do not map it."""


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
        source.metadata(*span, scales=with_embedding), [(tensor.name, tensor.kind, tensor.shape) for tensor in tensors]
    )
    progress(0, total)
    done = 0

    def made(num_bytes: int) -> None:
        nonlocal done
        done += num_bytes
        progress(done, total)

    parts = list(zip(placed, tensors, strict=True))
    if can_stream():
        handle = _load_stream(library, LayerStream(head, parts, file_bytes, made), options)
    else:
        handle = _load_file(library, head, parts, file_bytes, made, options)
    wide = library.call.llama_model_n_embd_inp(handle)
    if wide != source.hidden_size:
        library.call.llama_model_free(handle)
        raise ModelError(
            f"llama.cpp takes {wide} values per token of this model, not the {source.hidden_size} of a layer"
        )

    return LoadedModel(library, handle, total, span[1] - span[0])


def _load_stream(library: Library, stream: LayerStream, options: LlamaCppOptions) -> int:
    """Load layers while their bytes are made."""
    try:
        handle = library.call.llama_model_load_from_file_ptr(stream.pointer, _params(library, options))
    finally:
        stream.close()
    if stream.error is not None:
        if handle:
            library.call.llama_model_free(handle)
        raise stream.error
    return _checked(library, handle)


def _load_file(
    library: Library,
    head: bytes,
    parts: Sequence[tuple[Placed, Planned]],
    file_bytes: int,
    made: Callable[[int], None],
    options: LlamaCppOptions,
) -> int:
    """Load layers from a temporary file, which is gone afterwards."""
    with tempfile.NamedTemporaryFile(prefix="exo-mesh-layers-", suffix=".gguf", delete=False) as stream:
        try:
            stream.write(head)
            for place, tensor in parts:
                stream.seek(place.start)
                tensor.write(cast(BinaryIO, stream))
                made(place.num_bytes)
            stream.truncate(file_bytes)
            stream.flush()
            handle = library.call.llama_model_load_from_file(stream.name.encode(), _params(library, options))
        finally:
            Path(stream.name).unlink(missing_ok=True)
    return _checked(library, handle)


def _params(library: Library, options: LlamaCppOptions) -> ModelParams:
    params: ModelParams = library.call.llama_model_default_params()
    params.load_mode = _READ
    params.n_gpu_layers = options.gpu_layers
    library.forget_log()
    return params


def _checked(library: Library, handle: int | None) -> int:
    """The model that the library has loaded. Raises ModelError with its reason if there is none."""
    if not handle:
        raise ModelError(f"llama.cpp cannot load these layers: {library.last_error() or 'no reason given'}")
    return handle
