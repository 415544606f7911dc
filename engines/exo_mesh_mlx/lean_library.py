"""Imports mlx-lm without the libraries of tokenizers and downloads, which a runner never uses.

`import mlx_lm.utils` brings in transformers, and torch where it is installed: 2.3 s and 220 MB in each runner. All
names of mlx-lm keep working, because what is left out is imported at its first use.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

LIBRARY = "mlx_lm"
TOKENIZERS, DOWNLOADS = f"{LIBRARY}.tokenizer_utils", "huggingface_hub"


def import_lean() -> None:
    """Import `mlx_lm.utils`. Does nothing if mlx-lm has been imported."""
    spec = None if LIBRARY in sys.modules else find_spec(LIBRARY)
    if spec is None or spec.loader is None:
        return
    package = sys.modules[LIBRARY] = _Package(spec)
    stand_ins = {name: _StandIn(name) for name in (TOKENIZERS, DOWNLOADS) if name not in sys.modules}
    sys.modules.update(stand_ins)
    try:
        importlib.import_module(f"{LIBRARY}.utils")
    finally:
        for name, stand_in in stand_ins.items():
            if sys.modules.get(name) is stand_in:
                del sys.modules[name]
        vars(package).pop(TOKENIZERS.rpartition(".")[2], None)


class _Package(ModuleType):
    """mlx-lm's package, whose own module runs when one of its names is first used; its submodules need none."""

    def __init__(self, spec: ModuleSpec) -> None:
        super().__init__(spec.name)
        self.__spec__ = spec
        self.__file__ = spec.origin
        self.__path__ = list(spec.submodule_search_locations or ())
        self.__loader__ = spec.loader
        self.__package__ = spec.name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__version__":
            raise AttributeError(name)
        self.__class__ = ModuleType  # type: ignore[assignment]  # whatever its module lacks is an AttributeError now
        assert self.__spec__ is not None and self.__spec__.loader is not None
        self.__spec__.loader.exec_module(self)
        return getattr(self, name)


class _StandIn(ModuleType):
    """A module while mlx-lm's `utils` takes names from it. A function imports the real module at its first call; a
    class is only named in annotations."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {}) if name[0].isupper() else _late(self.__name__, name)


def _late(module: str, name: str) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        return getattr(importlib.import_module(module), name)(*args, **kwargs)

    return call
