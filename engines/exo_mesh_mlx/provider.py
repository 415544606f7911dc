"""The provider of the MLX engine, for the node. Reads file names and package metadata, and imports no mlx."""

from __future__ import annotations

import platform
import re
import sys
from collections.abc import Mapping
from functools import cache
from importlib import metadata, util
from pathlib import Path
from typing import Any, Literal

from exo_mesh.engine.contract import Availability, ModelSurvey, StageEngine
from exo_mesh.engine.floors import MACOS_FLOOR, OTHER_ENGINES, is_older, mlx_obstacle_here, too_old, upgrade
from exo_mesh_mlx.divisibility import division_obstacle
from exo_mesh_mlx.options import parse_options
from exo_mesh_mlx.quantisation import METHODS

_REMEDY = 'pip install "exo-mesh[mlx]"'
_CPU_BACKEND = "mlx-cpu"
_LINUX_BACKENDS = (_CPU_BACKEND, "mlx-cuda-12", "mlx-cuda-13", "mlx-cuda")
_NVIDIA_DEVICES = ("/dev/nvidiactl", "/dev/nvidia0", "/dev/dxg")
"""Device files that the driver makes if there is a GPU; the last one under WSL."""

# Patterns and not `ast`: a node calls this from threads, and CPython 3.11 counts the depth of what all threads parse in
# one place, so that another thread that parses (to print a traceback, for example) gets a SystemError.
_REMAPPING = re.compile(r"^MODEL_REMAPPING = \{\n(.*?)^\}", re.DOTALL | re.MULTILINE)
_PAIR = re.compile(r"^\s*[\"']([^\"']+)[\"']:\s*[\"']([^\"']+)[\"']", re.MULTILINE)
_SIBLINGS = re.compile(r"^from \.(\w*) import (\([^)]*\)|[^\n]*)", re.MULTILINE)
_IMPORTED_NAME = re.compile(r"(\w+)(?:\s+as\s+(\w+))?")
_MODEL_CLASS = re.compile(r"^class Model\b(?:\((.*?)\))?:(.*?)(?=^\S|\Z)", re.DOTALL | re.MULTILINE)
_SHARD = re.compile(r"^    def shard\(", re.MULTILINE)


class MlxProvider:
    name = "mlx"
    kind: Literal["stage", "whole-model"] = "stage"
    quant_methods = METHODS
    """See NamesQuantisations."""

    def availability(self) -> Availability:
        missing = [package for package in ("mlx", "mlx_lm") if util.find_spec(package) is None]
        if missing and (obstacle := mlx_obstacle_here()):
            return Availability(False, obstacle, OTHER_ENGINES)
        if missing:
            return Availability(False, f"{' and '.join(missing)} not installed", _REMEDY)
        if old := too_old("mlx"):
            return Availability(False, old, upgrade("mlx"))
        if sys.platform == "darwin" and (macos := platform.mac_ver()[0]) and is_older(macos, MACOS_FLOOR):
            reason = f"macOS {macos} is too old, MLX needs {MACOS_FLOOR} or newer"
            return Availability(False, reason, "update macOS")
        if sys.platform == "darwin" and platform.machine() == "arm64":
            return Availability(True, "Apple silicon", compute="metal", preference=100)
        backend = next((name for name in _LINUX_BACKENDS if _version(name)), None)
        if sys.platform == "linux" and backend is None:
            return Availability(False, "mlx is installed without a backend for Linux", 'pip install "mlx[cpu]"')
        if backend is not None and backend != _CPU_BACKEND:
            if any(Path(device).exists() for device in _NVIDIA_DEVICES):
                return Availability(True, backend, compute="cuda", preference=50)
            return Availability(False, f"{backend} is installed, but there is no NVIDIA GPU", 'pip install "mlx[cpu]"')
        # mlx on CPU is far slower than torch (see docs), so any other real engine is preferred
        return Availability(True, backend or platform.machine(), preference=10)

    def supports(self, architecture: str) -> bool:
        """Whether mlx-lm has a model file for this `model_type`, under its own name or the name that mlx-lm maps it
        to."""
        root = _mlx_lm_dir()
        module = _remapping().get(architecture, architecture)
        if root is None or not re.fullmatch(r"[\w\-]+", module):
            return False
        return _defines_a_model(root / "models" / f"{module}.py")

    def group_obstacle(self, config: Mapping[str, Any], size: int) -> str:
        """See Groupable."""
        architecture = str(config.get("model_type"))
        if not self.supports(architecture):
            return f"mlx-lm has no model {architecture}"
        if not _can_shard(_remapping().get(architecture, architecture)):
            return f"mlx-lm {_version('mlx-lm')} has no shard() for {architecture}; it has for {', '.join(groupable())}"
        return division_obstacle(config, size)

    def check_options(self, options: Mapping[str, str]) -> None:
        """See ChecksOptions."""
        parse_options(options)

    def version(self) -> str:
        mlx, mlx_lm = _version("mlx"), _version("mlx-lm")
        return f"mlx {mlx}, mlx-lm {mlx_lm}" if mlx and mlx_lm else ""

    def create(self) -> StageEngine:
        from exo_mesh_mlx.lean_library import import_lean

        import_lean()
        from exo_mesh_mlx.engine import MlxStage

        return MlxStage()

    def survey(self, model_dir: Path, options: Mapping[str, str]) -> ModelSurvey:
        """See Surveyor; uses traces that read headers only."""
        from exo_mesh_mlx.lean_library import import_lean

        import_lean()
        from exo_mesh_mlx.checkpoint import open_checkpoint
        from exo_mesh_mlx.survey import survey

        parse_options(options)
        return survey(open_checkpoint(model_dir))


@cache
def groupable() -> tuple[str, ...]:
    """mlx-lm's models that can be split over the ranks of a tensor group."""
    root = _mlx_lm_dir()
    files = sorted((root / "models").glob("*.py")) if root is not None else []
    return tuple(file.stem for file in files if _defines_a_model(file) and _can_shard(file.stem))


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ""


def _mlx_lm_dir() -> Path | None:
    spec = util.find_spec("mlx_lm")
    return Path(spec.origin).parent if spec is not None and spec.origin else None


@cache
def _defines_a_model(file: Path) -> bool:
    """Whether a file defines a model. Models and shared building blocks are in one folder; only models have
    ModelArgs."""
    return file.is_file() and re.search(r"\bModelArgs\b", file.read_text(encoding="utf-8")) is not None


@cache
def _remapping() -> dict[str, str]:
    """mlx-lm's MODEL_REMAPPING, read from its source because importing mlx_lm takes seconds."""
    root = _mlx_lm_dir()
    if root is None:
        return {}
    table = _REMAPPING.search((root / "utils.py").read_text(encoding="utf-8"))
    return dict(_PAIR.findall(table[1])) if table else {}


@cache
def _can_shard(module: str) -> bool:
    """Whether the class Model of a module of mlx-lm has a `shard`, or inherits one from another module's Model."""
    root = _mlx_lm_dir()
    file = root / "models" / f"{module}.py" if root is not None else None
    if file is None or not re.fullmatch(r"[\w\-]+", module) or not file.is_file():
        return False
    source = file.read_text(encoding="utf-8")
    imported: dict[str, str] = {}
    for origin, names in _SIBLINGS.findall(source):
        # `from .llama import Model as Base`, or `from . import qwen3_5`, whose Model is then qwen3_5.Model
        imported |= {alias or name: origin or name for name, alias in _IMPORTED_NAME.findall(names)}
    model = _MODEL_CLASS.search(source)
    if model is None:
        return "Model" in imported and _can_shard(imported["Model"])
    bases, body = model.groups()
    return _SHARD.search(body) is not None or any(
        _can_shard(imported.get(base.strip().partition(".")[0], "")) for base in bases.split(",")
    )
