"""The provider of the dummy engine, for the node."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from exo_mesh.engine.contract import Availability, StageEngine


class DummyProvider:
    name = "dummy"
    kind: Literal["stage", "whole-model"] = "stage"

    def availability(self) -> Availability:
        # never chosen by "auto": generated text is no substitute for a missing library
        return Availability(True, "computes nothing", preference=-1, dtypes=())

    def supports(self, architecture: str) -> bool:
        return True

    def group_obstacle(self, config: Mapping[str, Any], size: int) -> str:
        """Always "": nothing is split, every rank generates the same text."""
        return ""

    def check_options(self, options: Mapping[str, str]) -> None:
        """See ChecksOptions."""
        from exo_mesh_dummy.options import parse_options

        parse_options(options)

    def version(self) -> str:
        return "1"

    def create(self) -> StageEngine:
        from exo_mesh_dummy.engine import DummyStage

        return DummyStage()
