"""Runs a whole GGUF file as llama.cpp itself does: all layers as they are in the file, and token ids in.

Tests and benchmarks compare stages with it; nodes do not use it.
"""

from __future__ import annotations

from pathlib import Path

from exo_mesh.engine.contract import LoadRequest
from exo_mesh.errors import ModelError
from exo_mesh_llamacpp.context import LlamaContext, StageShape
from exo_mesh_llamacpp.devices import chosen_gpus
from exo_mesh_llamacpp.gpu.offload import Offload
from exo_mesh_llamacpp.gpu.planning import GpuPlan, plan_gpus
from exo_mesh_llamacpp.library import Library, open_library
from exo_mesh_llamacpp.library_file import chosen_library
from exo_mesh_llamacpp.loading import LoadedStage
from exo_mesh_llamacpp.model import LoadedModel, load_layers
from exo_mesh_llamacpp.options import MAX_GPU_LAYERS, LlamaCppOptions, parse_options
from exo_mesh_llamacpp.plan import ModelSource
from exo_mesh_llamacpp.pools import FIRST_CELLS, Pools
from exo_mesh_llamacpp.token_input import TokenContext, TokenIds


def load_whole(path: Path, request: LoadRequest, stops: tuple[int, ...] = ()) -> LoadedStage:
    """Load a file as one stage. stops: see StageShape. Raises ModelError with the library's reason."""
    file = chosen_library(request.options)
    library = open_library(file)
    options = parse_options(request.options).with_default_device(file is None or file.is_asked)
    call = library.call
    library.forget_log()
    params = call.llama_model_default_params()
    devices = library.devices()
    gpus = GpuPlan(chosen_gpus(devices, options.device), has_gpu=any(device.is_gpu for device in devices))
    kept = gpus.apply(params, Offload(MAX_GPU_LAYERS if options.gpu_layers is None else options.gpu_layers))
    handle = call.llama_model_load_from_file(str(path).encode(), params)
    del kept
    if not handle:
        raise ModelError(f"{path}: {library.last_error() or 'llama.cpp does not load it'}")
    model = LoadedModel(library, handle, call.llama_model_size(handle), request.shard.num_layers)
    hidden, vocab = call.llama_model_n_embd(handle), call.llama_vocab_n_tokens(call.llama_model_get_vocab(handle))
    has_states = call.llama_model_is_hybrid(handle) or call.llama_model_is_recurrent(handle)
    window = call.llama_model_n_swa(handle)
    one_stream = options.unified or has_states or window > 0
    kv = options.kv_type(mixed=False)
    shape = StageShape(
        hidden,
        vocab,
        call.llama_model_n_head(handle),
        kv,
        options.flash,
        one_stream,
        options.num_threads,
        stops,
        windowed=window > 0 and not has_states,
    )
    tokens = TokenIds(hidden)
    return LoadedStage(
        shard=request.shard,
        hidden_size=hidden,
        vocab_size=vocab,
        recurrent=has_states,
        window=window if window < request.context_limit else 0,
        model=model,
        embedding=tokens,
        pools=Pools(lambda slots, cells: TokenContext(model, shape, slots, cells, tokens), request.context_limit),
        output_dtype="float32",
        cell_bytes=0,
        fixed_bytes=0,
        identity={"file": str(path)},
    )


class PlainModel:
    """All layers of a source in the library as one model that takes token ids, for loops that compare speeds."""

    def __init__(self, library: Library, source: ModelSource, options: LlamaCppOptions) -> None:
        """Raises ModelError."""
        kv, span = options.kv_type(mixed=False), (0, source.num_layers)
        gpus = plan_gpus(library, options, source, span, FIRST_CELLS, kv)
        self._model = load_layers(library, source, span, lambda done, total: None, gpus=gpus, with_embedding=True)
        one_stream = options.unified or source.windowed or source.recurrent
        self._shape = StageShape(
            source.hidden_size, source.vocab_size, source.num_heads, kv, options.flash, one_stream, options.num_threads
        )
        self._ids = TokenIds(source.hidden_size)
        self.tokens = self._ids.ids

    def context(self, slots: int, cells: int) -> LlamaContext:
        """A context that computes the ids in `tokens`."""
        return TokenContext(self._model, self._shape, slots, cells, self._ids)
