"""Models that a program beside the node serves whole, such as a RKLLAMA or llama-server, as the node reports them."""

from __future__ import annotations

from typing import Annotated

import msgspec

from exo_mesh.domain.fields import Printable

SERVED_ARCHITECTURE = "served"
"""The architecture in the card of a served model: only its server knows the real one."""

SERVED_DIGEST = "served:"
"""The digest in the card of a served model begins with this word: there are no files to compute one from."""

MAX_SERVED = 64
"""Most served models of one peer; the rest is cut off."""

Name = Annotated[str, Printable(256)]
"""A peer sends it, and has it from a server."""


class ServedModel(msgspec.Struct, frozen=True):
    """One model of a model server.

    name: by which clients ask the mesh for it. engine: the whole-model engine that talks to the server. server: where
    the server listens, "host:port"; prompts and answers go there as text. stands_for: the name of a model in the mesh
    whose text this one can continue, because it is the same model; "" for none. served_name: the server's own name of
    it. context_limit: most tokens of prompt and output; 0 if the server does not say. slots: requests that it computes
    at once; 0 if it does not say.
    """

    name: Name
    engine: Name
    server: Name
    served_name: Name
    stands_for: Name = ""
    context_limit: int = 0
    slots: int = 0


class ServerReport(msgspec.Struct, frozen=True):
    """One look at a model server. server: "host:port". error: why it is not up, for a person; "" if it is."""

    server: str
    is_up: bool
    models: tuple[ServedModel, ...] = ()
    error: str = ""
