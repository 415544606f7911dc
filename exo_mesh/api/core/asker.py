"""Who asks, and under what id."""

from __future__ import annotations

from dataclasses import dataclass

from exo_mesh.api.core.idempotency import Idempotency


@dataclass(frozen=True, slots=True)
class Asker:
    """Who asks: the id of the request, whose share of the ring it takes (an API key's id, or an address), the id of its
    trace if it has one, under what the answer is kept if the client gave an idempotency key, the id of its API key,
    whether a model that no peer has may be downloaded for it, and the x-request-id of the reply.
    """

    request_id: str
    client: str
    trace_id: str = ""
    idempotency: Idempotency | None = None
    key_id: str = ""
    may_download: bool = False
    header_id: str = ""
