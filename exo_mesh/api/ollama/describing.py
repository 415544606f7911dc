"""Describes models as Ollama's clients expect them. Pure."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from typing import Any

from exo_mesh.api.ollama.objects import OllamaDetails, OllamaModel
from exo_mesh.domain.embedding import EMBEDDINGS, GENERATION
from exo_mesh.domain.reports import InstanceReport
from exo_mesh.models.entry import ModelEntry
from exo_mesh.weights.gguf import BLOCK_SIZES

SAFETENSORS, GGUF = "safetensors", "gguf"
_BYTES_OF = {"bf16": 2, "fp16": 2, "f16": 2, "fp32": 4, "f32": 4, "bfloat16": 2, "float16": 2, "float32": 4}
"""Bytes of a weight that is not quantized, by the name of its type."""

_PLAIN = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}

_SIZE_IN_NAME = re.compile(r"(?<![A-Za-z0-9.])(\d+(?:\.\d+)?)([BM])(?![A-Za-z0-9])", re.IGNORECASE)


def listed_model(entry: ModelEntry, modified_at: str) -> OllamaModel:
    """A model of /api/tags. modified_at: when this node started, because the mesh keeps no time for a model."""
    return OllamaModel(
        name=entry.name,
        model=entry.name,
        modified_at=modified_at,
        size=entry.num_bytes,
        digest=digest_of(entry),
        details=details_of(entry),
    )


def running_model(entry: ModelEntry, instance: InstanceReport, expires_at: str) -> OllamaModel:
    """A loaded model of /api/ps. expires_at: when it is unloaded if nobody uses it."""
    size = sum(stage.reserve_bytes for stage in instance.stages) or entry.num_bytes
    return OllamaModel(
        name=entry.name,
        model=entry.name,
        size=size,
        digest=digest_of(entry),
        details=details_of(entry),
        expires_at=expires_at,
        size_vram=size,
        context_length=instance.context_limit or entry.context_length,
    )


def digest_of(entry: ModelEntry) -> str:
    """64 hex digits: the digest by which peers recognise the model, or one of its name if there is none."""
    return entry.digest or digest_of_name(entry.name)


def digest_of_name(name: str) -> str:
    """The digest of a model that has no other."""
    return hashlib.sha256(name.encode("utf-8", "replace")).hexdigest()


def details_of(entry: ModelEntry) -> OllamaDetails:
    """What kind of model it is."""
    family = entry.profile.family if entry.profile is not None else ""
    return OllamaDetails(
        parent_model="",
        format=_format_of(entry),
        family=family,
        families=[family] if family else [],
        parameter_size=_parameter_size(entry),
        quantization_level=_type_of_weights(entry),
    )


def _format_of(entry: ModelEntry) -> str:
    """The format of the weights' files; only GGUF names its types in capital letters, such as Q4_1."""
    if entry.served is not None:
        return ""
    return GGUF if entry.quantization in BLOCK_SIZES else SAFETENSORS


def _type_of_weights(entry: ModelEntry) -> str:
    """The quantisation; of plain weights their type by Ollama's names, such as BF16."""
    return entry.quantization or _PLAIN.get(entry.dtype, "")


def capabilities_of(entry: ModelEntry) -> list[str]:
    """What this API offers for the model."""
    if GENERATION not in entry.tasks:  # clients take "embedding" to mean that a model cannot answer
        return ["embedding"] if EMBEDDINGS in entry.tasks else []
    able = ["completion"]
    if entry.profile is not None and entry.profile.supports_tool_calling:
        able.append("tools")
    if entry.profile is not None and entry.profile.supports_thinking:
        able.append("thinking")
    if entry.profile is not None and entry.profile.supports_image_input:
        able.append("vision")
    return able


def model_info_of(entry: ModelEntry, instances: Sequence[InstanceReport] = ()) -> dict[str, Any]:
    """The facts of a model by GGUF's names. instances: the model's ready instances, as in `/state`; they say how many
    tokens a request may have in this mesh."""
    family = entry.profile.family if entry.profile is not None and entry.profile.family else "model"
    info: dict[str, Any] = {
        "general.architecture": family,
        "general.basename": entry.name,
        f"{family}.context_length": entry.context_length,
        f"{family}.block_count": entry.num_layers,
    }
    if instances:
        info["exo_mesh.context_limit"] = max(instance.context_limit for instance in instances)
    if count := parameter_count(entry):
        info["general.parameter_count"] = count
    return info


def parameter_count(entry: ModelEntry) -> int:
    """The number of weights, from their bytes; 0 if they are quantized."""
    size = _BYTES_OF.get(_type_of_weights(entry).lower(), 0)
    return entry.num_bytes // size if size else 0


def _parameter_size(entry: ModelEntry) -> str:
    """The number of weights for people, such as 7.2B; from the name for quantized models; "" if neither tells."""
    if found := _SIZE_IN_NAME.search(entry.name):
        return found[1] + found[2].upper()
    count = parameter_count(entry)
    for unit, letter in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if count >= unit:
            return f"{count / unit:.1f}{letter}"
    return str(count) if count else ""
