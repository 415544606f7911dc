"""Builds a model of transformers without weights, from a checkpoint's config: on the meta device, in the wanted
dtype."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, initialization
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_MAPPING
from transformers.utils import logging as transformers_logging

from exo_mesh.domain.embedding import is_encoder
from exo_mesh.errors import ModelError
from exo_mesh.weights.model_files import read_json
from exo_mesh.weights.packed.tensors import read_packed_table
from exo_mesh.weights.safetensors import TensorTable
from exo_mesh.weights.tensors import read_tensor_table
from exo_mesh_torch.errors import one_line
from exo_mesh_torch.families import TEXT_OF_FAMILIES, VISION_FAMILIES
from exo_mesh_torch.head import with_head
from exo_mesh_torch.quantised import Quantisation, read_quantisation


class TorchCheckpoint(msgspec.Struct, frozen=True):
    """A checkpoint whose config and headers have been checked. quantisation: in MLX's format, or None."""

    model_dir: Path
    table: TensorTable
    quantisation: Quantisation | None
    model_type: str = ""
    has_vision: bool = False
    """Whether config.json describes a vision tower."""

    @property
    def config_file(self) -> Path:
        return self.model_dir / "config.json"


def open_checkpoint(model_dir: Path) -> TorchCheckpoint:
    """Check a checkpoint. Raises ModelError naming file and key or tensor if it is unreadable, of unknown quantisation,
    or needs code of its own."""
    config = read_json(model_dir / "config.json")
    _refuse_foreign_code(model_dir / "config.json", config)
    quantisation = read_quantisation(model_dir / "config.json", config)
    return TorchCheckpoint(
        model_dir,
        read_packed_table(model_dir / "config.json", config, read_tensor_table(model_dir)),
        quantisation,
        str(config.get("model_type")),
        isinstance(config.get("vision_config"), dict),
    )


def _refuse_foreign_code(file: Path, config: dict[str, Any]) -> None:
    """Raises ModelError for an architecture that transformers does not have. Code in a checkpoint is never run."""
    architecture = config.get("model_type")
    if architecture in (*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *VISION_FAMILIES, *TEXT_OF_FAMILIES) or is_encoder(config):
        return
    if config.get("auto_map"):
        raise ModelError(
            f"{file}: auto_map asks to run code from the checkpoint for {json.dumps(architecture)}; that is refused"
        )
    raise ModelError(f"{file}: model_type {json.dumps(architecture)} is not supported by the installed transformers")


def library_config(checkpoint: TorchCheckpoint) -> Any:
    """transformers' config of the whole checkpoint, from the settings as `read_json` has read them: transformers
    itself refuses a file with a byte-order mark. May raise anything."""
    settings = read_json(checkpoint.config_file)
    with TemporaryDirectory(prefix="exo-mesh-") as directory:
        Path(directory, checkpoint.config_file.name).write_text(json.dumps(settings))
        return AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)


def read_config(checkpoint: TorchCheckpoint) -> Any:
    """transformers' config of the language model in the checkpoint. Raises ModelError."""
    transformers_logging.set_verbosity_error()
    try:
        config = library_config(checkpoint).get_text_config(decoder=True)
        if checkpoint.model_type in VISION_FAMILIES | TEXT_OF_FAMILIES:
            # only the whole model's config says it, or nothing does
            config.tie_word_embeddings = not any(name.endswith("lm_head.weight") for name in checkpoint.table)
        if getattr(config, "quantization_config", None) is not None:
            del config.quantization_config  # weights are dequantised on load, so transformers must not see this
        return config
    except Exception as exc:  # transformers checks configs, and may raise anything
        raise ModelError(f"{checkpoint.config_file}: {one_line(exc)}") from exc


def build_skeleton(checkpoint: TorchCheckpoint, config: Any, dtype: torch.dtype) -> nn.Module:
    """The whole language model on the meta device. Raises ModelError."""
    return make_skeleton(checkpoint, dtype, lambda: _language_model(config, dtype))


def make_skeleton(checkpoint: TorchCheckpoint, dtype: torch.dtype, make: Callable[[], Any]) -> nn.Module:
    """A model on the meta device; those parameters in float32 that transformers keeps in float32. Raises ModelError."""
    try:
        with initialization.no_init_weights(), torch.device("meta"):
            model: Any = make()
    except Exception as exc:  # model classes may raise anything
        raise ModelError(f"{checkpoint.config_file}: {one_line(exc)}") from exc
    model.tie_weights()
    model.eval()
    for module in model.modules():
        if hasattr(module, "warn_if_padding_and_no_attention_mask"):
            # it reads values, which waits for a GPU each time
            module.warn_if_padding_and_no_attention_mask = _no_warning
    plan = model._get_dtype_plan(dtype)
    if plan:
        pattern = re.compile("|".join(name.replace("*", ".*") for name in plan))
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if pattern.search(name) and tensor.is_floating_point():
                tensor.data = tensor.data.float()
    return model


def _language_model(config: Any, dtype: torch.dtype) -> Any:
    """The language model of a config; text layers for which transformers has no such class get a head here."""
    if config.model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES or type(config) not in MODEL_MAPPING:
        return AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
    return with_head(MODEL_MAPPING[type(config)])._from_config(config, dtype=dtype)


def num_layers(config: Any) -> int:
    """The number of layers. Raises ModelError for a config that counts its layers in another way."""
    count = getattr(config, "num_hidden_layers", None)
    if not isinstance(count, int):
        raise ModelError(f"the torch engine cannot run {config.model_type}: its config has no num_hidden_layers")
    return count


def _no_warning(*_args: Any, **_kwargs: Any) -> None:
    """Do nothing: the rows of this engine have a mask whenever they are padded."""
