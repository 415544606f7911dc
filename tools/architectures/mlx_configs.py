"""Makes a tiny config for an architecture of the installed mlx-lm, from ModelArgs and a table of exceptions."""

from __future__ import annotations

import importlib
import pkgutil
from dataclasses import MISSING, Field, fields, is_dataclass
from types import ModuleType
from typing import Any

import mlx_lm.models
from exo_mesh_mlx import provider
from mlx_lm.utils import MODEL_REMAPPING

from tools.architectures.mlx_families import DROP, FAMILIES, OUTER, TEXT_MODELS
from tools.architectures.sizes import BY_NAME

_TEXT_CLASSES = ("TextArgs", "TextConfig", "TextModelArgs")
_BY_TYPE: tuple[tuple[str, Any], ...] = (("list", []), ("dict", {}), ("bool", False), ("int", 2), ("float", 1.0))


def architectures() -> list[str]:
    """Returns the `model_type`s with a model file in mlx-lm, without building blocks."""
    modules = [module.name for module in pkgutil.iter_modules(mlx_lm.models.__path__)]
    return sorted(filter(provider.supports, modules), key=str.lower)


def tiny_config(architecture: str) -> dict[str, Any]:
    """Makes a config.json for a model of a few layers, also for a `model_type` that mlx-lm maps to another. Raises what
    importing the module raises, even SystemExit."""
    family = MODEL_REMAPPING.get(architecture, architecture)
    module = importlib.import_module(f"mlx_lm.models.{family}")
    own = FAMILIES.get(family, {})
    config: dict[str, Any] = {"model_type": architecture, "torch_dtype": "float32"}
    if "text_config" not in {field.name for field in _fields(module.ModelArgs)}:
        return _without_dropped(config | _settings(module.ModelArgs) | own)
    args_class, name = _text_args(family, module)
    inner = FAMILIES.get(name, {}) if name != family else {}
    text = _without_dropped({"model_type": name} | _settings(args_class) | inner | own)
    outer = {field.name: BY_NAME[field.name] for field in _fields(module.ModelArgs) if field.name in BY_NAME}
    return config | outer | OUTER.get(family, {}) | {"text_config": text}


def num_layers(config: dict[str, Any]) -> int:
    """Returns the number of layers in a config of tiny_config, by any of its names."""
    text = config.get("text_config", config)
    names = ("num_hidden_layers", "num_layers", "n_layer", "n_layers", "num_transformer_layers")
    return int(next(text[name] for name in names if text.get(name)))


def _text_args(architecture: str, module: ModuleType) -> tuple[type, str]:
    """Returns the class of the settings inside text_config, and the name of their architecture."""
    for name in _TEXT_CLASSES:
        if hasattr(module, name):
            return getattr(module, name), architecture
    inner = TEXT_MODELS[architecture]
    text_module = importlib.import_module(f"mlx_lm.models.{inner}")
    for name in (*_TEXT_CLASSES, "ModelArgs"):
        if hasattr(text_module, name):
            return getattr(text_module, name), inner
    raise LookupError(f"{inner} has no settings")


def _fields(args_class: type) -> tuple[Field[Any], ...]:
    return fields(args_class) if is_dataclass(args_class) else ()


def _settings(args_class: type) -> dict[str, Any]:
    """Returns every setting that has a tiny value, and every required setting."""
    settings: dict[str, Any] = {}
    for field in _fields(args_class):
        if field.name in BY_NAME:
            settings[field.name] = BY_NAME[field.name]
        elif field.default is MISSING and field.default_factory is MISSING and field.name != "model_type":
            settings[field.name] = _by_type(field)
    return settings


def _by_type(field: Field[Any]) -> Any:
    """Returns a value for a required setting with an unknown name."""
    declared = field.type.__name__ if isinstance(field.type, type) else str(field.type)
    if "Optional" in declared:
        return None
    return next((value for name, value in _BY_TYPE if name in declared.lower()), None)


def _without_dropped(config: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if value is not DROP}
