"""Loads one stage of a checkpoint: opens everything lazily, and reads only what the stage's layers need.

mlx-lm builds the model and maps the checkpoint's names and quantisation onto it, as it does for a whole model; arrays
stay unread until they are evaluated. So ghosts cost nothing, and a layer that uses a neighbour's weight gets it.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Mapping
from importlib import metadata
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model

from exo_mesh.engine.contract import LoadProgress
from exo_mesh.errors import ModelError
from exo_mesh_mlx import packets
from exo_mesh_mlx.body import lacks_prefix, with_prefix
from exo_mesh_mlx.caches import SequenceCache, plan_caches
from exo_mesh_mlx.checkpoint import MlxCheckpoint, as_library_reads
from exo_mesh_mlx.ghost import MlxGhostStage
from exo_mesh_mlx.model_config import model_classes
from exo_mesh_mlx.trace import MlxTrace, trace_model
from exo_mesh_mlx.virtual import VirtualTensors

_USED = re.compile(r'"p(\d+)" ->')
"""A parameter that is used, in the text of MLX's graph."""


def build_model(checkpoint: MlxCheckpoint) -> nn.Module:
    """Build the whole model with every parameter a lazy array from a file; reads headers only.

    If files are absent, parameters of their layers are stand-ins. Raises ModelError naming file and tensor if a
    parameter is missing, surplus or of another shape, and naming config.json and the key if that is at fault.
    """
    return _build(checkpoint, VirtualTensors(checkpoint))


def build_stage(checkpoint: MlxCheckpoint, trace: MlxTrace | None, start: int, stop: int) -> nn.Module:
    """Build the model for a stage. Raises ModelError if a file is absent that layers `[start, stop)` or the ends
    need."""
    checkpoint.require_layers(start, stop)
    virtual = VirtualTensors(checkpoint)
    model = _build(checkpoint, virtual)
    if not checkpoint.absent or trace is None:
        return model
    standing_in = virtual.zeros | virtual.missing(dict(tree_flatten(model.parameters())))
    wanted = sorted(reached(graph_of_stage(model, trace, start, stop), standing_in))
    if wanted:
        absent = sorted({str(file) for file in checkpoint.absent.values()})
        raise ModelError(
            f"layers {start} to {stop - 1} need {wanted[0]}, which is in none of the files here; "
            f"{len(absent)} files of the index are missing: {', '.join(absent[:4])}{', …' if absent[4:] else ''}"
        )
    return model


def trace_checkpoint(checkpoint: MlxCheckpoint) -> MlxTrace:
    """Trace how the model uses its layers. Works on a model of its own, which is freed when this returns."""
    model = build_model(checkpoint)
    try:
        return trace_model(model, make_prompt_cache(model))
    except ModelError as exc:
        raise ModelError(f"{checkpoint.model_dir} cannot be split: {exc}") from exc
    except Exception as exc:  # model code of mlx-lm may raise anything
        raise ModelError(
            f"{checkpoint.model_dir} cannot be split: its forward pass raises {type(exc).__name__}: {exc}"
        ) from exc


def read_layers(model: nn.Module, start: int, stop: int, progress: LoadProgress, *, by_tensor: bool = False) -> None:
    """Evaluate the parameters of layers `[start, stop)`, one layer at a time; progress is in bytes.

    by_tensor: one tensor at a time, if only a share of each is kept. Raises ModelError if a file cannot be read.
    """
    parameters = [[array for _, array in tree_flatten(layer.parameters())] for layer in model.layers[start:stop]]
    total = sum(array.nbytes for layer in parameters for array in layer)
    done = 0
    progress(0, total)
    for index, layer in enumerate(parameters, start):
        try:
            for arrays in [[array] for array in layer] if by_tensor else [layer]:
                mx.eval(arrays)
        except RuntimeError as exc:
            raise ModelError(f"layer {index} cannot be read: {exc}") from exc
        done += sum(array.nbytes for array in layer)
        progress(done, total)
    mx.clear_cache()


def _build(checkpoint: MlxCheckpoint, virtual: VirtualTensors) -> nn.Module:
    _check_architecture(checkpoint)

    def classes(config: dict[str, Any]) -> tuple[type, type]:
        model_class, args_class = model_classes(config)
        if lacks_prefix(checkpoint.table):
            model_class = with_prefix(model_class)
        return (virtual.completing(model_class) if checkpoint.absent else model_class), args_class

    try:
        with as_library_reads(checkpoint) as directory:
            model, _ = load_model(directory, lazy=True, strict=not checkpoint.absent, get_model_classes=classes)
    except (Exception, SystemExit) as exc:  # mlx-lm and the model files raise anything for a model that does not fit
        raise ModelError(_explain(checkpoint, exc)) from exc
    return model


def _check_architecture(checkpoint: MlxCheckpoint) -> None:
    """Raises ModelError unless mlx-lm has code for this model. Code from a checkpoint is not run."""
    if checkpoint.config.get("model_file") is not None:
        raise ModelError(
            f"{checkpoint.config_file}: model_file names code {json.dumps(checkpoint.config['model_file'])}; "
            "code from a checkpoint is not run"
        )
    try:
        model_classes(dict(checkpoint.config))
    except (Exception, SystemExit) as exc:  # a module of mlx-lm may lack a library, and then exits
        name = checkpoint.config.get("model_type")
        reason = ": its model file needs a library that is not installed"
        raise ModelError(
            f"{checkpoint.config_file}: model_type {json.dumps(name)} is not supported by mlx-lm "
            + metadata.version("mlx-lm")
            + (reason if isinstance(exc, SystemExit) else "")
        ) from exc


def _explain(checkpoint: MlxCheckpoint, exc: BaseException) -> str:
    """One sentence that names the tensor or setting and the file, from an exception of mlx or mlx-lm."""
    text = " ".join(str(exc).split()) or type(exc).__name__
    text = text if len(text) <= 400 else text[:400] + "…"
    dotted = [name for name in re.findall(r"[\w\-]+(?:\.[\w\-]+)+", text) if "__" not in name]
    named = [name for name in dotted if name in checkpoint.table]
    if named:
        return f"{checkpoint.table[named[0]].file}: {text}"
    if isinstance(exc, TypeError | KeyError | AttributeError) and not dotted:
        return f"{checkpoint.config_file}: {type(exc).__name__}: {text}"
    return f"{checkpoint.weights_file}: {text}"


def reached(results: list[mx.array], parameters: Mapping[str, mx.array]) -> set[str]:
    """Names of the parameters from which some unevaluated result is computed. Computes nothing."""
    labels = {f"p{i}": array for i, array in enumerate(parameters.values())}
    graph = io.StringIO()
    mx.export_to_dot(graph, *results, **labels)
    used = {int(number) for number in _USED.findall(graph.getvalue())}
    return {name for i, name in enumerate(parameters) if i in used}


def graph_of_stage(model: nn.Module, trace: MlxTrace, start: int, stop: int) -> list[mx.array]:
    """All results that a stage would evaluate in one forward of one token, lazily. The model is not hooked
    afterwards."""
    stage = MlxGhostStage(model, trace, start, stop)
    full = make_prompt_cache(model)
    cache = SequenceCache(full, plan_caches(trace, full, start, stop))
    try:
        result = stage.forward(mx.zeros((1, 1), mx.int32), cache.full, packets.zeros(stage.inputs), 1)
    finally:
        stage.close()
    cache.advance(1)
    return [*([result] if isinstance(result, mx.array) else result.values()), *cache.arrays()]
