"""The provider of the dummy text engine, for the node: the models of its pretended server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from exo_mesh.domain.whole.served import SERVED_ARCHITECTURE, ServedModel, ServerReport
from exo_mesh.engine.contract import Availability
from exo_mesh.engine.whole import WholeModelEngine
from exo_mesh_dummy.text_options import NAME, is_up, parse_text_options

SERVER = "nowhere:0"


class DummyTextProvider:
    """The provider of the dummy text engine. It serves the models that its option `models` names."""

    name = NAME
    kind: Literal["whole-model"] = "whole-model"

    def availability(self) -> Availability:
        return Availability(True, "computes nothing", preference=-1, dtypes=())

    def supports(self, architecture: str) -> bool:
        return architecture == SERVED_ARCHITECTURE

    def version(self) -> str:
        return "1"

    def create(self) -> WholeModelEngine:
        from exo_mesh_dummy.text import DummyText

        return DummyText()

    async def look(self, options: Mapping[str, str]) -> Sequence[ServerReport]:
        """See ModelServer.look."""
        parsed = parse_text_options(options)
        if not parsed.models:
            return ()
        if not is_up(parsed):
            return (ServerReport(SERVER, False, error=f"{parsed.up_file} does not exist"),)
        stands_for = parsed.stands_for or {}
        models = tuple(
            ServedModel(name, NAME, SERVER, name, stands_for.get(name, ""), parsed.context, parsed.slots)
            for name in parsed.models
        )
        return (ServerReport(SERVER, True, models),)
