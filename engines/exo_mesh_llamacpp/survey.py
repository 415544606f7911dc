"""Reports cuts and bytes of a model with this engine, from config.json and headers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from exo_mesh.engine.contract import COUNTED_STATES, ModelSurvey
from exo_mesh_llamacpp.library import Library, open_library
from exo_mesh_llamacpp.library_file import chosen_library
from exo_mesh_llamacpp.options import parse_options
from exo_mesh_llamacpp.plan import head_tensors
from exo_mesh_llamacpp.source import open_source
from exo_mesh_llamacpp.types import KV_TYPES


def survey(model_dir: Path, options: Mapping[str, str]) -> ModelSurvey:
    """Survey a model. The bytes of keys and values are for a ring of this engine alone, unless `kv` is set."""
    parsed = parse_options(options)

    def library() -> Library:
        return open_library(chosen_library(options))

    source = open_source(model_dir, parsed, library)
    kind = KV_TYPES[parsed.kv_type(mixed=False)]
    every = sum(tensor.num_bytes for tensor in source.shared(is_first=False))
    return ModelSurvey(
        legal_cuts=source.legal_cuts,
        reason="" if source.legal_cuts else "this model cannot be cut for llama.cpp",
        layer_bytes=tuple(
            sum(tensor.num_bytes for tensor in source.layer(index)) for index in range(source.num_layers)
        ),
        embed_bytes=source.embedding().num_bytes,
        head_bytes=sum(tensor.num_bytes for tensor in head_tensors(source)) + every,
        kv_bytes_per_token=tuple(values * kind.block_bytes // kind.block for values in source.kv_values),
        kv_fixed_bytes=tuple(4 * (1 + COUNTED_STATES) * values for values in source.kv_fixed),
        layer_kinds=source.layer_kinds,
    )
