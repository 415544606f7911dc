"""Surveys a model before a weight is read: cuts, bytes and kinds of layers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from exo_mesh.domain.embedding import is_encoder
from exo_mesh.engine.contract import COUNTED_STATES, ModelSurvey
from exo_mesh.errors import ModelError
from exo_mesh.weights.model_files import read_json
from exo_mesh_torch.devices import choose_device, choose_dtype
from exo_mesh_torch.disk_tables import tables_on_disk
from exo_mesh_torch.dry_run import broken_cuts
from exo_mesh_torch.encoder_model import OpenEncoder, open_encoder
from exo_mesh_torch.kv import SLACK, KvLayer, is_recurrent
from exo_mesh_torch.loading import shared_names
from exo_mesh_torch.model import OpenModel, open_model
from exo_mesh_torch.names import NameMap
from exo_mesh_torch.options import check_options
from exo_mesh_torch.small_weights import small_bytes, wants_small_weights
from exo_mesh_torch.vision import VisionTower

LONGEST_CONTEXT = 2**31
"""An upper bound of all windows: the survey does not know how long sequences will be."""


def survey(model_dir: Path, options: Mapping[str, str]) -> ModelSurvey:
    """See Surveyor: device and dtype are chosen as for a stage."""
    check_options(options)
    device = choose_device(options)
    if is_encoder(read_json(model_dir / "config.json")):
        return _encoder_survey(open_encoder(model_dir, lambda own: choose_dtype(options, own, device)))
    opened = open_model(model_dir, LONGEST_CONTEXT, lambda own: choose_dtype(options, own, device))
    trace = opened.trace
    broken = broken_cuts(opened.model, trace, opened.caches)
    cuts = tuple(cut for cut in trace.legal_cuts if cut not in broken)
    tower_bytes = _tower_bytes(opened)
    small = _held(opened, options, is_small=wants_small_weights(options, device))
    layers = [layer_bytes(opened, i, small) for i in range(trace.num_layers)]
    everywhere = _bytes_of(opened, trace.everywhere, small)
    kv = [_kv_bytes(opened, i) for i in range(trace.num_layers)]
    return ModelSurvey(
        legal_cuts=cuts,
        reason=trace.reason if cuts else trace.reason or next(iter(broken.values()), ""),
        layer_bytes=tuple(layers),
        embed_bytes=_bytes_of(opened, trace.first, small) + everywhere + tower_bytes,
        head_bytes=_bytes_of(opened, trace.last, small) + everywhere,
        kv_bytes_per_token=tuple(per_token for per_token, _ in kv),
        kv_fixed_bytes=tuple(fixed for _, fixed in kv),
        layer_kinds=_kinds(opened),
    )


def _encoder_survey(opened: OpenEncoder) -> ModelSurvey:
    trace = opened.trace
    layers = tuple(layer_bytes(opened, i) for i in range(trace.num_layers))
    kinds = _kinds_of_encoder(opened)
    return ModelSurvey(
        legal_cuts=trace.legal_cuts,
        layer_bytes=layers,
        embed_bytes=_bytes_of(opened, trace.first),
        head_bytes=_bytes_of(opened, trace.last),
        kv_bytes_per_token=(0,) * trace.num_layers,
        kv_fixed_bytes=(0,) * trace.num_layers,
        layer_kinds=kinds,
    )


def _kinds_of_encoder(opened: OpenEncoder) -> tuple[str, ...]:
    """Names that are equal for layers of equal shapes and attention."""
    types = getattr(opened.config, "layer_types", None) or ["encoder"] * opened.trace.num_layers
    state = opened.model.state_dict()
    names = []
    for index, kind in enumerate(types):
        prefix = f"{opened.trace.prefix}.{index}."
        shapes = sorted((name[len(prefix) :], tuple(t.shape)) for name, t in state.items() if name.startswith(prefix))
        names.append((kind, tuple(shapes)))
    return tuple(f"{kind}-{names.index((kind, shapes))}" for kind, shapes in names)


def _held(opened: OpenModel, options: Mapping[str, str], *, is_small: bool) -> dict[str, int]:
    """Bytes in memory of the parameters that are kept as codes, if is_small, and of tables that stay in the files."""
    names = NameMap(opened.checkpoint, opened.model)
    small = small_bytes(names, opened.model, shared_names(opened.model)) if is_small else {}
    return small | dict.fromkeys(tables_on_disk(names, opened.model, opened.trace.prefix, options), 0)


def layer_bytes(opened: OpenModel | OpenEncoder, index: int, small: Mapping[str, int] = MappingProxyType({})) -> int:
    """Bytes of one layer's parameters and saved buffers as they will be held: those in `small` as codes, the others
    dequantised, in the stage's dtype."""
    state = opened.model.state_dict()
    prefix = f"{opened.trace.prefix}.{index}."
    mine = {name: _num_bytes(tensor) for name, tensor in state.items() if name.startswith(prefix)}
    return sum(small.get(name, size) for name, size in mine.items())


def _tower_bytes(opened: OpenModel) -> int:
    """Bytes of the vision tower, which the first stage loads; 0 if it has none that can be loaded."""
    try:
        tower = VisionTower.open(opened.checkpoint, opened.trace.hidden_dtype)
    except ModelError:
        return 0
    return 0 if tower is None else tower.num_bytes


def _bytes_of(
    opened: OpenModel | OpenEncoder, names: frozenset[str], small: Mapping[str, int] = MappingProxyType({})
) -> int:
    return sum(small.get(name) or _num_bytes(opened.model.get_parameter(name)) for name in names)


def _num_bytes(tensor: torch.Tensor) -> int:
    return int(tensor.numel() * tensor.element_size())


def _kv_bytes(opened: OpenModel, index: int) -> tuple[int, int]:
    """(per position, per sequence) of one layer. A window counts per sequence, with what it holds for
    drafts."""
    layer: Any = opened.trace.caches.layers[opened.trace.layers[index].like]
    fixed = sum(_num_bytes(tensor) for tensor in layer.recurrent_tensors()) if is_recurrent(layer) else 0
    fixed *= 1 + COUNTED_STATES
    if not isinstance(layer, KvLayer):
        tensors = list(layer.tensors()) if not is_recurrent(layer) else []
        return sum(_num_bytes(tensor) // max(1, tensor.shape[-2]) for tensor in tensors if tensor.ndim >= 2), fixed
    per_token = sum(_num_bytes(buffer) // buffer.shape[2] for buffer in layer.tensors() if buffer.ndim == 4)
    if isinstance(layer, KvLayer) and is_recurrent(layer):
        per_token = sum(_num_bytes(t) // t.shape[1] for t in KvLayer.state(layer).values())
    if layer.window is None:
        return per_token, fixed
    return 0, fixed + per_token * (layer.window + SLACK)


def _kinds(opened: OpenModel) -> tuple[str, ...]:
    """Names that are equal for layers of equal classes, shapes and caches."""
    return tuple(f"{'+'.join(opened.kinds(use.like)) or 'none'}-{use.like}" for use in opened.trace.layers)
