"""Looks at the servers that the options name, for the node."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from msgspec.structs import replace

from exo_mesh.domain.whole.served import ServedModel, ServerReport
from exo_mesh.errors import MeshError
from exo_mesh_openai.client import Deadlines, ServerClient
from exo_mesh_openai.gguf_files import find_gguf_models, program_defect
from exo_mesh_openai.names import mesh_names
from exo_mesh_openai.options import OpenAiOptions, OwnServer, ServerAddress
from exo_mesh_openai.probing import FoundModel, ShownModels, find_server

ENGINE = "openai"

LOOK_S = 2.0
"""Longest look at one server, with all its probes."""

OWN_SERVER = "127.0.0.1:0"
"""ServedModel.server of models for which this engine starts a llama-server when they are loaded: it has no port
before."""


class Onlooker:
    """Looks at servers again and again, and remembers what does not change."""

    def __init__(self, look_s: float = LOOK_S) -> None:
        self._look_s = look_s
        self._shown = ShownModels()

    async def look(self, options: OpenAiOptions) -> Sequence[ServerReport]:
        """One report for each server, all of them asked at once, and one for the llama-server to be started."""
        reports = await asyncio.gather(*(self._look_at(server, options) for server in options.servers))
        own = options.own
        # directories are read in a thread: their disk may be slow
        return [*reports, await asyncio.to_thread(report_own, options, own)] if own is not None else reports

    async def _look_at(self, server: ServerAddress, options: OpenAiOptions) -> ServerReport:
        client = ServerClient(server, options.key, Deadlines(probe_s=self._look_s))
        try:
            async with asyncio.timeout(self._look_s):
                found = await find_server(client, self._shown)
        except TimeoutError:
            return ServerReport(server.where, False, error=f"does not answer within {self._look_s:g} s")
        except MeshError as exc:
            return ServerReport(server.where, False, error=str(exc))
        finally:
            await client.close()
        return ServerReport(server.where, True, served_models(server.where, found.models, options))


def report_own(options: OpenAiOptions, own: OwnServer) -> ServerReport:
    """The models in GGUF files that a llama-server can be started for; a report with an error if there is no program.
    Reads directories only."""
    defect = program_defect(own.binary)
    if defect:
        return ServerReport(OWN_SERVER, False, error=defect)
    try:
        files = find_gguf_models(own.models)
    except MeshError as exc:
        return ServerReport(OWN_SERVER, False, error=str(exc))
    models = tuple(FoundModel(name, own.flags.context, own.flags.slots) for name in files)
    return ServerReport(OWN_SERVER, True, served_models(OWN_SERVER, models, options))


def served_models(where: str, models: Sequence[FoundModel], options: OpenAiOptions) -> tuple[ServedModel, ...]:
    """The models of one server as the mesh knows them."""
    names = mesh_names([model.served_name for model in models], options.names)
    plain = ServedModel("", ENGINE, where, "")
    return tuple(
        replace(
            plain,
            name=names[model.served_name],
            served_name=model.served_name,
            stands_for=options.stands_for.get(model.served_name)
            or options.stands_for.get(names[model.served_name], ""),
            context_limit=model.context_limit,
            slots=model.slots,
        )
        for model in models
    )
