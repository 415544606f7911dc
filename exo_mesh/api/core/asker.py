"""The caller of a request, and the request's ids."""

from __future__ import annotations

import msgspec

from exo_mesh.api.core.idempotency import Idempotency
from exo_mesh.api.tracing import TraceContext


class Asker(msgspec.Struct, frozen=True):
    """The caller of a request. request_id: the id of the request. client: an API key's id or an address, whose share of
    the ring the request uses. trace: its place in its trace. idempotency: the key under which the answer is kept, if
    the client gave one. key_id: the id of the caller's API key. may_download: whether a model that no peer has may be
    downloaded for it. header_id: the x-request-id of the reply.
    """

    request_id: str
    client: str
    trace: TraceContext = TraceContext()
    idempotency: Idempotency | None = None
    key_id: str = ""
    may_download: bool = False
    header_id: str = ""
