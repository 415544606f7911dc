"""Finds out whether a RKLLAMA server is up, and which models it has."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable, Mapping, Sequence

from exo_mesh.domain.whole.served import ServedModel, ServerReport
from exo_mesh.errors import EngineError, StageLostError
from exo_mesh.weights.names import is_model_name
from exo_mesh_rkllm.board import describe_board
from exo_mesh_rkllm.modelfile import ModelfileFacts, read_models
from exo_mesh_rkllm.options import RkllmOptions, names_a_server, parse_options
from exo_mesh_rkllm.server import RkllamaServer, new_session

LOOK_S = 2.0
"""Deadline of one look: a server that takes longer counts as down."""

SLOTS = 1
"""RKLLAMA computes one request at a time for a model, and a board has one NPU."""

_UNUSABLE = re.compile(r"[^\w.+\-]+", re.ASCII)


async def look(options: Mapping[str, str]) -> Sequence[ServerReport]:
    """A report of the server that the options name, or of the server that this board should have; () elsewhere."""
    parsed = parse_options(options)
    if not names_a_server(options) and not describe_board():
        return ()
    try:
        async with asyncio.timeout(LOOK_S), new_session() as session:
            _, listed = await RkllamaServer(session, parsed.server).probe()
            local = await asyncio.to_thread(read_models, parsed.models_dir)
    except (EngineError, StageLostError) as exc:
        return (ServerReport(parsed.server, False, error=f"{exc}; start it with `rkllama_server`"),)
    except TimeoutError:
        return (ServerReport(parsed.server, False, error=f"RKLLAMA did not answer within {LOOK_S:g} s"),)
    return (ServerReport(parsed.server, True, served_models(local if listed is None else listed, local, parsed)),)


def served_models(
    names: Iterable[str], local: Mapping[str, ModelfileFacts], options: RkllmOptions
) -> tuple[ServedModel, ...]:
    """The models of a server, in the order of their names in the mesh. local: what Modelfiles on this machine say of
    them. Of two models that get the same name, only the first counts."""
    found: dict[str, ServedModel] = {}
    for served in names:
        facts = local.get(served, ModelfileFacts())
        name = options.names.get(served) or mesh_name(served)
        keys = (name, served, facts.tokenizer)
        same = next((options.stands_for[key] for key in keys if key in options.stands_for), "")
        model = ServedModel(name, "rkllm", options.server, served, same, facts.context_limit, SLOTS)
        if name:
            found.setdefault(name, model)
    return tuple(found[name] for name in sorted(found))


def mesh_name(served: str) -> str:
    """The name of a model in the mesh, from its directory at the server: what no name may have becomes "-". "" if
    nothing usable remains."""
    name = _UNUSABLE.sub("-", served).strip("-.+_")
    return name if is_model_name(name) else ""
