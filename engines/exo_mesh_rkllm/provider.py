"""The provider of the RKLLM engine, for the node."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from exo_mesh.domain.whole.served import SERVED_ARCHITECTURE, ServerReport
from exo_mesh.engine.contract import Availability
from exo_mesh.engine.whole import WholeModelEngine

REMEDY = "run the node on an RK3588 or RK3576 board with RKLLAMA, or name a server with --rkllm-server-host"


class RkllmProvider:
    """Finds the models of a RKLLAMA server, and makes engines for them.

    Elsewhere than on a board it counts as available once `look` was given options that name a server.
    """

    name = "rkllm"
    kind: Literal["stage", "whole-model"] = "whole-model"

    def __init__(self) -> None:
        self._names_a_server = False

    def availability(self) -> Availability:
        from exo_mesh_rkllm.board import describe_board
        from exo_mesh_rkllm.options import names_a_server

        # never chosen by "auto", which chooses an engine for layers; it cannot be a stage of a ring
        found = describe_board()
        if not found and (self._names_a_server or names_a_server({})):
            found = "a server is named"
        if not found:
            return Availability(False, "no RK3588 or RK3576, and no RKLLM runtime", REMEDY, "npu", -1, ())
        return Availability(True, found, compute="npu", preference=-1, dtypes=())

    def supports(self, architecture: str) -> bool:
        return architecture == SERVED_ARCHITECTURE

    def version(self) -> str:
        """The server has the runtime; this engine speaks its HTTP interfaces."""
        return "RKLLAMA over HTTP"

    def create(self) -> WholeModelEngine:
        from exo_mesh_rkllm.engine import RkllmEngine

        return RkllmEngine()

    def check_options(self, options: Mapping[str, str]) -> None:
        """See ChecksOptions."""
        from exo_mesh_rkllm.options import parse_options

        parse_options(options)

    async def look(self, options: Mapping[str, str]) -> Sequence[ServerReport]:
        """See ModelServer."""
        from exo_mesh_rkllm.board import describe_board

        if not options and not describe_board():  # most nodes: nothing more of this engine is imported
            self._names_a_server = False
            return ()
        from exo_mesh_rkllm.look import look
        from exo_mesh_rkllm.options import names_a_server

        self._names_a_server = names_a_server(options)
        return await look(options)
