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
from exo_mesh_llamacpp.library_file import REMEDY, packaged_library

_PREFERENCE = 35
"""Above torch on a CPU, whose decode steps take three times as long, and below every engine on a GPU."""


class LlamaCppProvider:
    name = "llamacpp"
    kind: Literal["stage", "whole-model"] = "stage"

    def availability(self) -> Availability:
        found = packaged_library()
        if found is None:
            return Availability(False, "no llama.cpp library is installed", REMEDY)
        if struct.calcsize("P") != 8:
            return Availability(False, "llama.cpp is supported on 64-bit machines only")
        if old := too_old("llamacpp"):
            return Availability(False, old, upgrade("llamacpp"))
        if sys.platform == "darwin" and platform.machine() == "arm64":
            return Availability(True, f"{found.version}, built with Metal", compute="metal", preference=_PREFERENCE)
        return Availability(True, found.version, compute="cpu", preference=_PREFERENCE)

    def supports(self, architecture: str) -> bool:
        from exo_mesh_llamacpp.families import FAMILIES
        from exo_mesh_llamacpp.gguf_rules import RULES

        return architecture in FAMILIES or architecture in RULES

    def version(self) -> str:
        found = packaged_library()
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
