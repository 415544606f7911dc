"""Who asks, and under what id."""

from __future__ import annotations

from dataclasses import dataclass

from exo_mesh.api.core.idempotency import Idempotency


@dataclass(frozen=True, slots=True)
class TraceContext:
    """Where a traced request is in its trace, as W3C Trace Context has it. span_id: of the request itself.
    parent_span_id and state: the caller's; empty if the trace begins here."""

    trace_id: str = ""
    span_id: str = ""
    parent_span_id: str = ""
    state: str = ""


@dataclass(frozen=True, slots=True)
class Asker:
    """Who asks: the id of the request, whose share of the ring it takes (an API key's id, or an address), its
    place in its trace if it has one, under what the answer is kept if the client gave an idempotency key, the id of its
    API key, whether a model that no peer has may be downloaded for it, and the x-request-id of the reply.
    """

    request_id: str
    client: str
    trace: TraceContext = TraceContext()
    idempotency: Idempotency | None = None
    key_id: str = ""
    may_download: bool = False
    header_id: str = ""
