"""The provider of this engine, for the node."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal

from exo_mesh.domain.whole.served import SERVED_ARCHITECTURE, ServerReport
from exo_mesh.engine.contract import Availability, Compute
from exo_mesh.engine.whole import WholeModelEngine

if TYPE_CHECKING:
    from exo_mesh_openai.look import Onlooker


class OpenAiProvider:
    """Finds the models of the servers that the options name, and makes engines for them.

    It counts as available once `look` has been given options that name a server or a program. The modules that know
    HTTP are imported by the first `look` or `create`.
    """

    name = "openai"
    kind: Literal["whole-model"] = "whole-model"

    def __init__(self) -> None:
        self._onlooker: Onlooker | None = None
        self._is_used = False
        self._compute: Compute = "cpu"

    def availability(self) -> Availability:
        # never chosen by "auto": text leaves the mesh at a model server, so an operator must have named it
        if not self._is_used:
            remedy = "name model servers in the option servers, or a llama-server in the option binary"
            return Availability(False, "no model server is named", remedy, preference=-1, dtypes=())
        return Availability(True, "model servers are named", compute=self._compute, preference=-1, dtypes=())

    def supports(self, architecture: str) -> bool:
        return architecture == SERVED_ARCHITECTURE

    def version(self) -> str:
        return "1"

    def check_options(self, options: Mapping[str, str]) -> None:
        """See ChecksOptions."""
        from exo_mesh_openai.options import read_options

        read_options(options)

    async def look(self, options: Mapping[str, str]) -> Sequence[ServerReport]:
        """One report for each server of the options, and one for the llama-server that this engine starts itself, if
        the options name its program. () without either. Raises InputError for bad options."""
        if not options:  # most nodes: nothing of this engine is imported
            self._is_used = False
            return ()
        from exo_mesh_openai.look import Onlooker
        from exo_mesh_openai.options import read_options

        self._onlooker = self._onlooker or Onlooker()
        parsed = read_options(options)
        self._is_used = bool(parsed.servers) or parsed.own is not None
        self._compute = parsed.own.flags.compute if parsed.own is not None else "cpu"
        return await self._onlooker.look(parsed)

    def create(self) -> WholeModelEngine:
        from exo_mesh_openai.engine import OpenAiEngine

        return OpenAiEngine()
