"""The provider of the llama.cpp engine, for the node. Reads package metadata, and opens no library."""

from __future__ import annotations

import platform
import struct
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Literal

from exo_mesh.engine.contract import Availability, ModelSurvey, StageEngine
from exo_mesh.engine.floors import too_old, upgrade
from exo_mesh.errors import EngineError, InputError
from exo_mesh_llamacpp.library_file import REMEDY, LibraryFile, chosen_library

_PREFERENCE = 35
"""Above torch on a CPU, whose decode steps take three times as long, and below every engine on a GPU."""

_GPU_PREFERENCE = 50
"""Below torch on a GPU, which runs more models."""


class LlamaCppProvider:
    """Knows the operator's options if they matter here: which library, and which of its devices."""

    name = "llamacpp"
    kind: Literal["stage", "whole-model"] = "stage"

    def __init__(self, options: Mapping[str, str] | None = None) -> None:
        self._options = {name: value for name, value in (options or {}).items() if name in ("library", "device")}

    def configured(self, options: Mapping[str, str]) -> LlamaCppProvider:
        """See Configurable."""
        return LlamaCppProvider(options)

    def availability(self) -> Availability:
        """With option `library` or `device`, or with the library of llama-cpp-python, a process of its own asks the
        library for its devices, once."""
        try:
            found = chosen_library(self._options)
            if found is None:
                return Availability(False, "no llama.cpp library is installed", REMEDY)
            if struct.calcsize("P") != 8:
                return Availability(False, "llama.cpp is supported on 64-bit machines only")
            if not self._options.get("library") and (old := too_old("llamacpp")):
                return Availability(False, old, upgrade("llamacpp"))
            if found.structures is not None:
                from exo_mesh_llamacpp.declared import declared_layout

                declared_layout(found.structures)
            return self._with_gpus(found) if self._options or found.is_asked else self._on_default(found)
        except (EngineError, InputError) as exc:
            return Availability(False, str(exc))

    def _on_default(self, found: LibraryFile) -> Availability:
        """The availability of a library that is not asked for its devices."""
        is_auto = self._options.get("device", "auto").lower() == "auto"
        if is_auto and sys.platform == "darwin" and platform.machine() == "arm64":
            return Availability(True, f"{found.version}, built with Metal", compute="metal", preference=_PREFERENCE)
        return Availability(True, found.version, compute="cpu", preference=_PREFERENCE)

    def _with_gpus(self, found: LibraryFile) -> Availability:
        from exo_mesh_llamacpp.devices import chosen_gpus
        from exo_mesh_llamacpp.gpu.probe import devices_of
        from exo_mesh_llamacpp.options import parse_device

        wanted = parse_device(self._options)
        if wanted == ("cpu",) or not (wanted or found.is_asked):
            return self._on_default(found)
        devices = devices_of(self._options)
        gpus = chosen_gpus(devices, wanted)
        if not gpus:
            there = ", ".join(device.name for device in devices) or "no device"
            return Availability(True, f"{found.version} with {there}", compute="cpu", preference=_PREFERENCE)
        names = ", ".join(f"{gpu.name} ({gpu.description}, {gpu.memory})" for gpu in gpus)
        return Availability(True, f"{found.version} with {names}", compute=gpus[0].compute, preference=_GPU_PREFERENCE)

    def supports(self, architecture: str) -> bool:
        from exo_mesh_llamacpp.families import FAMILIES
        from exo_mesh_llamacpp.gguf_rules import RULES

        return architecture in FAMILIES or architecture in RULES

    def check_options(self, options: Mapping[str, str]) -> None:
        """See ChecksOptions."""
        from exo_mesh_llamacpp.options import parse_options

        parse_options(options)

    def version(self) -> str:
        try:
            found = chosen_library(self._options)
        except EngineError:
            found = None
        return found.version if found else ""

    def create(self) -> StageEngine:
        from exo_mesh_llamacpp.canary import require
        from exo_mesh_llamacpp.loading import load_stage
        from exo_mesh_llamacpp.stage import LlamaCppStage

        return LlamaCppStage(partial(load_stage, check=require))

    def survey(self, model_dir: Path, options: Mapping[str, str]) -> ModelSurvey:
        """See Surveyor; reads config.json and the headers of the weights."""
        from exo_mesh_llamacpp.survey import survey

        return survey(model_dir, options)
