"""Maps the tensors of a checkpoint to the parameters of transformers' model.

Names in files are older than names in code. transformers has rules for that, and for experts that are stacked into one
tensor on load; they are used here as `from_pretrained` uses them, on names alone. Two rules of this engine come first:
for the text towers of larger models, and for the names that mlx-lm writes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import msgspec
from torch import nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from exo_mesh.errors import ModelError
from exo_mesh.weights.card import layer_of
from exo_mesh.weights.lines import line_reader
from exo_mesh.weights.packed.tensors import is_spare_bias
from exo_mesh.weights.safetensors import TensorInfo, TensorTable
from exo_mesh_torch.quantised import Quantisation, check_shapes
from exo_mesh_torch.skeleton import TorchCheckpoint
from exo_mesh_torch.sources import Converted, Packed, Part, Plain, TensorSource

_TOWER = re.compile(r"^(?:model\.)?language_model\.(?:model\.)?|^(?:thinker\.)?model\.language_model\.")
_SIDE_MODEL = re.compile(
    r"(^|\.)(vision_tower|vision_model|vision_embed_tokens|visual|vit|audio_tower|audio_model|embed_vision|embed_audio"
    r"|multi_modal_projector|mm_projector|talker|token2wav|code2wav)(\.|$)"
)
_VISION = re.compile(r"(^|\.)(vision_tower|vision_model|visual|multi_modal_projector)(\.|$)")
_DERIVED = re.compile(r"(rotary_emb\.inv_freq|\.attn\.(masked_)?bias|\.attention\.(masked_)?bias|position_ids)$")
"""Buffers that older versions of transformers saved; they follow from the config."""

_STACKED = re.compile(r"\.switch_mlp\.(gate_proj|up_proj|down_proj)\.(weight|bias)$")
_EXPERT_NAMES = (
    {"gate_proj": "experts.{}.gate_proj", "up_proj": "experts.{}.up_proj", "down_proj": "experts.{}.down_proj"},
    {"gate_proj": "experts.{}.w1", "up_proj": "experts.{}.w3", "down_proj": "experts.{}.w2"},
)
"""Names of the tensors of one expert in checkpoints; mlx-lm stacks them under `switch_mlp`."""


class Recipe(msgspec.Struct):
    """The sources that make one parameter, or several at once (`converter`); pattern[i]: the rule that took source
    i."""

    target: str
    converter: WeightConverter | None = None
    sources: list[tuple[TensorSource, str | None]] = msgspec.field(default_factory=list)


class NameMap:
    """Recipes by their (first) target. `unused`: tensors that belong to no parameter of the model."""

    def __init__(self, checkpoint: TorchCheckpoint, model: Any, *, of_vision: bool = False) -> None:
        """of_vision: for the vision tower's tensors only; otherwise for the language model's. Raises ModelError naming
        file and tensor if a quantised tensor is incomplete."""
        self._of_vision = of_vision
        rules = get_model_conversion_mapping(model)
        self._renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
        self._converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
        self._by_pattern = {pattern: rule for rule in self._converters for pattern in rule.source_patterns}
        self._state: dict[str, Any] = model.state_dict()
        self._prefix: str = model.base_model_prefix
        self._tower = _is_tower(checkpoint, model)
        self.recipes: dict[str, Recipe] = {}
        self.unused: list[tuple[str, TensorInfo]] = []
        for source, info in self._sources(checkpoint):
            self._place(source, info)

    def _place(self, source: TensorSource, info: TensorInfo) -> None:
        target, pattern = self._target(source.name)
        if target not in self._state:
            self.unused.append((source.name, info))
            return
        recipe = self.recipes.setdefault(target, Recipe(target))
        if pattern is not None:
            recipe.converter = self._by_pattern[pattern]
        recipe.sources.append((source, pattern))

    def _target(self, name: str) -> tuple[str, str | None]:
        """transformers' name for a tensor, and the pattern of the converter that takes it, if there is one."""
        if self._tower:
            name = _TOWER.sub("lm_head." if ".lm_head." in name else "model.", name, count=1).replace(
                "lm_head.lm_head.", "lm_head."
            )
        target, pattern = rename_source_key(name, self._renamings, self._converters, self._prefix, self._state)
        if target not in self._state and name in self._state:
            return name, None
        return target, pattern

    def _sources(self, checkpoint: TorchCheckpoint) -> Iterator[tuple[TensorSource, TensorInfo]]:
        """Sources in the order in which experts are counted."""
        table = checkpoint.table
        for name in sorted(table, key=_natural):
            if not is_vision(name) if self._of_vision else _SIDE_MODEL.search(name):
                continue
            if checkpoint.quantisation is not None and _is_part_of_packed(name, table):
                continue
            source = _source(checkpoint.quantisation, table, name)
            stacked = _STACKED.search(name)
            if stacked is None:
                yield source, table[name]
            else:
                yield from ((part, table[name]) for part in self._experts(source, stacked))

    def _experts(self, source: Plain | Packed | Converted, stacked: re.Match[str]) -> Iterator[TensorSource]:
        """The experts' tensors one by one, under the first naming that the model has."""
        before = source.name[: stacked.start()]
        for naming in _EXPERT_NAMES:
            template = f"{before}.{naming[stacked[1]]}.{stacked[2]}"
            if self._target(template.format(0))[0] in self._state:
                for index in range(source.shape[0]):
                    yield Part(template.format(index), source, index)
                return
        yield source


def is_vision(name: str) -> bool:
    """Whether a tensor of a checkpoint belongs to its vision tower, or to what follows the tower."""
    return _VISION.search(name) is not None


def refuse_surplus(names: NameMap, table: TensorTable, num_layers: int, tied: bool, ignored: list[str]) -> None:
    """Raises ModelError naming a tensor without a place in the model: the config belongs to another checkpoint. table:
    all tensors."""
    patterns = [re.compile(pattern) for pattern in ignored]
    for name, info in names.unused:
        layer = layer_of(name)
        if layer is not None and layer >= num_layers:
            continue  # multi-token prediction
        if _DERIVED.search(name) or re.search(r"(^|\.)mtp(\.|$)", name) or any(p.search(name) for p in patterns):
            continue
        if (tied and name.endswith("lm_head.weight")) or is_spare_bias(name, table):
            continue
        raise ModelError(f"{info.file}: {name} {list(info.shape)} has no place in the model that config.json describes")


def _source(quantisation: Quantisation | None, table: TensorTable, name: str) -> Plain | Packed | Converted:
    info = table[name]
    reader = line_reader(name, info)
    if reader is not None:
        return Converted(name, reader)
    module = name.removesuffix(".weight")
    scales = table.get(f"{module}.scales")
    if quantisation is None or scales is None or module == name:
        if info.dtype == "U32":
            raise ModelError(f"{info.file}: {name} is packed, but its scales or config.json's quantization are missing")
        return Plain(name, info)
    packing = quantisation.of(module)
    biases = table.get(f"{module}.biases")
    if (biases is None) != (packing.mode != "affine"):
        raise ModelError(f"{info.file}: {module}.biases {'is missing' if biases is None else 'must not be there'}")
    shape = check_shapes(name, info.file, info.shape, scales.shape, packing)
    if info.dtype != "U32" or (biases is not None and biases.shape != scales.shape):
        raise ModelError(
            f"{info.file}: {name} is {info.dtype}{list(info.shape)}, not packed words with scales and biases"
        )
    return Packed(name, shape, info, scales, biases, packing)


def _is_part_of_packed(name: str, table: TensorTable) -> bool:
    module, _, leaf = name.rpartition(".")
    return leaf in ("scales", "biases") and f"{module}.weight" in table and f"{module}.scales" in table


def _is_tower(checkpoint: TorchCheckpoint, model: nn.Module) -> bool:
    """Whether the model is only the text part of what the checkpoint holds."""
    return any(re.match(r"(model\.)?language_model\.", name) for name in checkpoint.table) and not any(
        "language_model." in name for name, _ in model.named_parameters()
    )


def _natural(name: str) -> list[tuple[int, int | str]]:
    return [(0, int(part)) if part.isdigit() else (1, part) for part in name.split(".")]
