"""What a node may ask about the engine. A heavy library would be imported in `create` only, never here."""

from __future__ import annotations

from importlib.metadata import version
from typing import Literal

from exo_mesh.engine.contract import Availability, StageEngine

ARCHITECTURE = "example_bigram"


class ExampleProvider:
    name = "example"
    kind: Literal["stage", "whole-model"] = "stage"

    def availability(self) -> Availability:
        # a negative preference: `--engine auto` never takes it, only `--engine example` does
        return Availability(True, "numpy is always there", compute="cpu", preference=-1)

    def supports(self, architecture: str) -> bool:
        return architecture == ARCHITECTURE

    def version(self) -> str:
        return f"numpy {version('numpy')}"

    def create(self) -> StageEngine:
        from exo_mesh_engine_example.engine import BigramStage

        return BigramStage()
