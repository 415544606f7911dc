"""Makes the parts of a stage from a request: layers in the library, the embedding, and the place of sequences."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from exo_mesh.domain.shard import Shard
from exo_mesh.engine.contract import LEAST_SHARED, LoadProgress, LoadRequest
from exo_mesh.engine.free_cores import FreeCores
from exo_mesh.errors import EngineError, InputError
from exo_mesh_llamacpp.context import LlamaContext, StageShape
from exo_mesh_llamacpp.devices import BackendDevice
from exo_mesh_llamacpp.embedding import HeldEmbedding
from exo_mesh_llamacpp.gpu.planning import plan_gpus
from exo_mesh_llamacpp.library import Library, open_library
from exo_mesh_llamacpp.library_file import chosen_library
from exo_mesh_llamacpp.model import LoadedModel, load_layers
from exo_mesh_llamacpp.options import LlamaCppOptions, parse_options
from exo_mesh_llamacpp.plan import Embedding, ModelSource
from exo_mesh_llamacpp.pools import MAX_SLOTS, MAX_SLOTS_OF_WINDOWS, Pools, Sharing
from exo_mesh_llamacpp.shared.groups import SLOTS
from exo_mesh_llamacpp.source import open_source
from exo_mesh_llamacpp.token_input import TokenContext, TokenIds
from exo_mesh_llamacpp.types import KV_TYPES
from exo_mesh_llamacpp.wire import ACTIVATION_DTYPES

logger = logging.getLogger(__name__)

OpenSource = Callable[[Path, LlamaCppOptions, Callable[[], Library]], ModelSource]


_MakeAny = Callable[[int, int, bool], LlamaContext]
"""Makes a context of (slots, cells, whether the slots share the cells)."""

Check = Callable[[Library, ModelSource, Mapping[str, str], Sequence[BackendDevice]], None]
"""Raises EngineError if a library, or one of the GPUs, cannot be used for a model with some options."""

IDLE_SHARE, IDLE_BYTES = 16, 48 * 2**20
"""Contexts without sequences are kept as long as they take less than a sixteenth of the weights, or 48 MiB."""

FOREIGN_PER_WIDTH = 1
"""Cells of others that a sequence may attend to, for each value of a hidden state. The matrices of a layer take as long
as 4 to 8 such cells for each value (measured with Llamas of 20 M and 200 M), so a step becomes at most a fifth
longer."""


class LoadedStage(msgspec.Struct, frozen=True):
    """The parts of a loaded stage. cell_bytes: of the keys and values of a position; fixed_bytes: of a sequence of any
    length. window: of the layers that have one; 0 if no sequence may become longer. identity: what a saved sequence
    must have been made with. on_gpu: whether it uses one."""

    shard: Shard
    hidden_size: int
    vocab_size: int
    recurrent: bool
    window: int
    model: LoadedModel
    embedding: Embedding | None
    pools: Pools
    output_dtype: str
    cell_bytes: int
    fixed_bytes: int
    identity: dict[str, str]
    on_gpu: bool = False

    @property
    def windowed(self) -> bool:
        """Whether a sequence may become longer than the window of some layer."""
        return self.window > 0


def load_stage(
    request: LoadRequest,
    progress: LoadProgress,
    open_model: OpenSource = open_source,
    check: Check = lambda library, source, options, gpus: None,
) -> LoadedStage:
    """Load the layers of a stage. check: called before. Raises ModelError, EngineError and InputError as
    StageEngine.load does."""
    options = parse_options(request.options)
    dtype = _checked_dtype(request.activation_dtype or "float32")
    if request.rank is not None:
        raise EngineError("the llamacpp engine cannot be a rank of a tensor group")
    file = chosen_library(request.options)
    library = open_library(file)
    options = options.with_default_device(file is None or file.is_asked)
    source = open_model(request.model_dir, options, lambda: library)
    shard = request.shard
    _require_cuts(request, source)
    kv = options.kv_type(mixed=bool(request.activation_dtype))
    span = (shard.start, shard.stop)
    gpus = plan_gpus(library, options, source, span, request.context_limit, kv)
    check(library, source, request.options, gpus.gpus)
    if gpus.gpus:
        logger.info("%s: %s", shard, gpus)
    is_whole = shard.is_first and shard.is_last
    model = load_layers(library, source, span, progress, gpus=gpus, with_embedding=is_whole)
    shape = _shape_of(source, shard, options, kv)
    own = slice(shard.start, shard.stop)
    cell_bytes = sum(source.kv_values[own]) * KV_TYPES[kv].block_bytes // KV_TYPES[kv].block
    make, embedding = _input_of(library, source, shard, model, shape)
    window = library.call.llama_model_n_swa(model.handle)
    identity = {
        "build": library.build, "kv": kv, "flash": str(options.flash), "quant": options.quant, "layers": str(shard),
    }  # fmt: skip
    return LoadedStage(
        shard=shard,
        hidden_size=source.hidden_size,
        vocab_size=source.vocab_size,
        recurrent=source.recurrent,
        window=window if window < request.context_limit else 0,
        model=model,
        embedding=embedding,
        pools=Pools(
            lambda slots, cells: make(slots, cells, False),
            request.context_limit,
            max(model.num_bytes // IDLE_SHARE, IDLE_BYTES) // max(1, cell_bytes),
            _sharing(source, options, make, on_gpu=bool(gpus.gpus)),
            MAX_SLOTS_OF_WINDOWS if shape.windowed else MAX_SLOTS,
        ),
        output_dtype=dtype,
        cell_bytes=cell_bytes,
        fixed_bytes=4 * sum(source.kv_fixed[own]),
        identity=identity,
        on_gpu=bool(gpus.gpus),
    )


def _shape_of(source: ModelSource, shard: Shard, options: LlamaCppOptions, kv: str) -> StageShape:
    """What a context of the stage needs to know of it. kv: the type of its keys and values."""
    return StageShape(
        hidden=source.hidden_size,
        head=source.vocab_size if shard.is_last else 0,
        num_heads=source.num_heads,
        kv=kv,
        flash=options.flash,
        unified=options.unified or source.windowed or source.recurrent,  # states of other caches are of one stream only
        threads=options.num_threads,
        cores=None if options.threads else FreeCores.within_quota(options.num_threads),
        windowed=source.windowed and not source.recurrent,
    )


def _checked_dtype(dtype: str) -> str:
    """The dtype of activations. Raises InputError for a dtype that the engine cannot pass on."""
    if dtype not in ACTIVATION_DTYPES:
        known = ", ".join(ACTIVATION_DTYPES)
        raise InputError(
            f"the llamacpp engine cannot pass on {json.dumps(dtype)}; it can pass on {known}", param="activation_dtype"
        )
    return dtype


def _require_cuts(request: LoadRequest, source: ModelSource) -> None:
    """Raises EngineError if the model has other layers, or cannot be cut at an end of the stage."""
    shard = request.shard
    if source.num_layers != shard.num_layers:
        raise EngineError(f"{shard} does not fit: {request.model_dir} has {source.num_layers} layers")
    for cut in (shard.start, shard.stop):
        if cut not in (0, source.num_layers, *source.legal_cuts):
            # the library would compute something else, or abort
            raise EngineError(f"{shard}: no stage of this model may begin at layer {cut}")


def _sharing(source: ModelSource, options: LlamaCppOptions, make: _MakeAny, *, on_gpu: bool) -> Sharing | None:
    """How sequences share cells; None if they do not. The state of windows and recurrent layers is not of cells alone.
    On a GPU, masked cells may cost another part of a pass than on the CPU."""
    wanted = options.share == "on" or (options.share == "auto" and not on_gpu)
    if not wanted or source.windowed or source.recurrent:
        return None
    return Sharing(lambda cells: make(SLOTS, cells, True), FOREIGN_PER_WIDTH * source.hidden_size, LEAST_SHARED)


def _input_of(
    library: Library, source: ModelSource, shard: Shard, model: LoadedModel, shape: StageShape
) -> tuple[_MakeAny, Embedding | None]:
    """How contexts of a stage are made, and its embedding: a stage of all layers takes token ids, the first of several
    looks up rows itself."""
    if shard.is_first and shard.is_last:
        tokens = TokenIds(source.hidden_size)
        return lambda slots, cells, shared: TokenContext(model, shape, slots, cells, tokens, shared=shared), tokens
    embedding = HeldEmbedding(source.embedding(), library, source.embedding_scale) if shard.is_first else None
    return lambda slots, cells, shared: LlamaContext(model, shape, slots, cells, shared=shared), embedding
