"""Loads the layers of a stage into the library, as a model of their own."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO, cast

import msgspec

from exo_mesh.engine.contract import LoadProgress
from exo_mesh.errors import ModelError
from exo_mesh_llamacpp.container import Placed, lay_out
from exo_mesh_llamacpp.gpu.offload import is_full
from exo_mesh_llamacpp.gpu.planning import GpuPlan
from exo_mesh_llamacpp.layouts import ModelParams
from exo_mesh_llamacpp.library import Library
from exo_mesh_llamacpp.plan import ModelSource, Planned, plain_tensors, stage_tensors
from exo_mesh_llamacpp.stream import LayerStream, can_stream

logger = logging.getLogger(__name__)

_READ = 0
"""LLAMA_LOAD_MODE_NONE: read the file, and do not map it."""


class LoadedModel(msgspec.Struct):
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
    progress: LoadProgress,
    *,
    gpus: GpuPlan | None = None,
    with_embedding: bool = False,
) -> LoadedModel:
    """Write the stage's tensors and load them. progress: of bytes. gpus: None for the CPU alone. with_embedding: for a
    whole model that takes token ids. Raises ModelError with the library's reason."""
    tensors = plain_tensors(source) if with_embedding else stage_tensors(source, *span)
    total = sum(tensor.num_bytes for tensor in tensors)
    head, placed, file_bytes = lay_out(
        source.metadata(*span, scales=with_embedding), [(tensor.name, tensor.kind, tensor.shape) for tensor in tensors]
    )
    parts = list(zip(placed, tensors, strict=True))

    def load(params: ModelParams) -> int | None:
        done = 0
        progress(done, total)

        def made(num_bytes: int) -> None:
            nonlocal done
            done += num_bytes
            progress(done, total)

        if can_stream():
            return _load_stream(library, LayerStream(head, parts, file_bytes, made), params)
        return _load_file(library, head, parts, file_bytes, made, params)

    handle = _load_where_it_fits(library, load, gpus or GpuPlan())
    wide = library.call.llama_model_n_embd_inp(handle)
    if wide != source.hidden_size:
        library.call.llama_model_free(handle)
        raise ModelError(
            f"llama.cpp takes {wide} values per token of this model, not the {source.hidden_size} of a layer"
        )

    return LoadedModel(library, handle, total, span[1] - span[0])


def _load_where_it_fits(library: Library, load: Callable[[ModelParams], int | None], gpus: GpuPlan) -> int:
    """Load with as many layers on the GPUs as the plan says; with the plan's next number if a GPU is full."""
    for index, offload in enumerate(gpus.tries):
        params: ModelParams = library.call.llama_model_default_params()
        params.load_mode = _READ
        kept = gpus.apply(params, offload)
        library.forget_log()
        handle = load(params)
        del kept
        if handle:
            return handle
        why = library.last_error() or "no reason given"
        if index + 1 == len(gpus.tries) or not is_full(why):
            break
        logger.warning(
            "%d layers do not fit on the GPUs (%s); trying %d", offload.layers, why, gpus.tries[index + 1].layers
        )
    raise ModelError(f"llama.cpp cannot load these layers: {why}")


def _load_stream(library: Library, stream: LayerStream, params: ModelParams) -> int | None:
    """Load layers while their bytes are made. None if the library refuses them."""
    try:
        handle: int | None = library.call.llama_model_load_from_file_ptr(stream.pointer, params)
    finally:
        stream.close()
    if stream.error is not None:
        if handle:
            library.call.llama_model_free(handle)
        raise stream.error
    return handle


def _load_file(
    library: Library,
    head: bytes,
    parts: Sequence[tuple[Placed, Planned]],
    file_bytes: int,
    made: Callable[[int], None],
    params: ModelParams,
) -> int | None:
    """Load layers from a temporary file, which is gone afterwards. None if the library refuses them."""
    with tempfile.NamedTemporaryFile(prefix="exo-mesh-layers-", suffix=".gguf", delete=False) as stream:
        try:
            stream.write(head)
            for place, tensor in parts:
                stream.seek(place.start)
                tensor.write(cast(BinaryIO, stream))
                made(place.num_bytes)
            stream.truncate(file_bytes)
            stream.flush()
            handle: int | None = library.call.llama_model_load_from_file(stream.name.encode(), params)
        finally:
            Path(stream.name).unlink(missing_ok=True)
    return handle
