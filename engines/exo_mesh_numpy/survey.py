"""Reports the bytes of a model with this engine, from config.json and the headers of its weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from exo_mesh.engine.contract import ModelSurvey
from exo_mesh_numpy.checkpoint import NumpyCheckpoint
from exo_mesh_numpy.model_config import ModelConfig, read_model_config
from exo_mesh_numpy.options import parse_options
from exo_mesh_numpy.weights import check_tensors, layer_bytes


def open_model(model_dir: Path) -> tuple[ModelConfig, NumpyCheckpoint]:
    """Config and checkpoint, checked against each other. Raises ModelError naming file and key or tensor."""
    config = read_model_config(model_dir)
    checkpoint = NumpyCheckpoint(model_dir)
    check_tensors(checkpoint, config)
    return config, checkpoint


def survey(model_dir: Path, options: Mapping[str, str]) -> ModelSurvey:
    """Survey a model: any layer may begin a stage. Bytes are for float32, whatever the files have."""
    parse_options(options)
    config, _ = open_model(model_dir)
    table = 4 * config.vocab_size * config.hidden_size
    return ModelSurvey(
        legal_cuts=tuple(range(1, config.num_layers)),
        layer_bytes=(layer_bytes(config),) * config.num_layers,
        embed_bytes=table,
        head_bytes=table + 4 * config.hidden_size,
        kv_bytes_per_token=(config.kv_bytes_per_token,) * config.num_layers,
        kv_fixed_bytes=(0,) * config.num_layers,
        layer_kinds=tuple("with rope" if has_rope else "without rope" for has_rope in config.rope_layers),
    )
