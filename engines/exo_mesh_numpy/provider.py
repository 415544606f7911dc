"""The provider of the NumPy engine, for the node."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Literal

from exo_mesh.engine.contract import Availability, ModelSurvey, StageEngine
from exo_mesh.weights.gguf import QUANT_METHOD
from exo_mesh.weights.packed.settings import METHODS


class NumpyProvider:
    name = "numpy"
    kind: Literal["stage", "whole-model"] = "stage"
    quant_methods = (*METHODS, QUANT_METHOD)
    """See NamesQuantisations."""

    def availability(self) -> Availability:
        # below every engine with a library of its own, above the dummy engine
        return Availability(True, "NumPy comes with exo-mesh", compute="cpu", preference=1)

    def supports(self, architecture: str) -> bool:
        from exo_mesh_numpy.families import FAMILIES

        return architecture in FAMILIES

    def check_options(self, options: Mapping[str, str]) -> None:
        """See ChecksOptions."""
        from exo_mesh_numpy.options import parse_options

        parse_options(options)

    def version(self) -> str:
        # without NumPy itself: a node asks this at its start, and only runners compute
        return f"numpy {version('numpy')}"

    def create(self) -> StageEngine:
        from exo_mesh_numpy.engine import NumpyStage

        return NumpyStage()

    def survey(self, model_dir: Path, options: Mapping[str, str]) -> ModelSurvey:
        """See Surveyor; reads config.json and the headers of the weights."""
        from exo_mesh_numpy.survey import survey

        return survey(model_dir, options)
