"""Counts connections to a closed mesh that did not prove knowledge of its secret.

gRPC ends a connection whose TLS handshake fails without any report, so that this node's operator would never learn that
a peer has another secret. But gRPC requests the certificate for each new connection, and an admitted client makes a
call at once: a connection without a first call within PATIENCE_S was refused.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import grpc.aio

from exo_mesh.base.wakeups import next_wakeup

PATIENCE_S = 5.0
LOOK_EVERY_S = 1.0
REPORT_EVERY_S = 60.0
MAX_KNOCKS = 4096
MAX_INSIDE = 1024
"""Limits for a flood of connections: the oldest are dropped, and the count is then too low."""

_log = logging.getLogger(__name__)


class HandshakeCounter(grpc.aio.ServerInterceptor):
    """`knock` may be called from any thread; all other methods belong to the event loop."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._knocks: deque[float] = deque(maxlen=MAX_KNOCKS)
        self._inside: OrderedDict[str, None] = OrderedDict()
        self._due = float("-inf")
        self._unreported = 0
        self.refused = 0

    def knock(self) -> None:
        """Record a new connection."""
        self._knocks.append(self._now())

    def entered(self, peer: str) -> None:
        """Record a call of a client, given by gRPC's name for the peer."""
        if peer in self._inside:
            return
        self._inside[peer] = None
        if len(self._inside) > MAX_INSIDE:
            self._inside.popitem(last=False)
        if self._knocks:
            self._knocks.popleft()

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: Any) -> Any:
        """gRPC's hook at the start of every call: records the caller."""
        handler = await continuation(handler_call_details)
        if handler is None or handler.request_streaming:
            return handler
        codecs = (handler.request_deserializer, handler.response_serializer)

        async def one(request: Any, context: Any) -> Any:
            self.entered(context.peer())
            return await handler.unary_unary(request, context)

        async def several(request: Any, context: Any) -> None:
            self.entered(context.peer())
            await handler.unary_stream(request, context)  # a coroutine that writes; see gate.py

        if handler.response_streaming:
            return grpc.unary_stream_rpc_method_handler(several, *codecs)
        return grpc.unary_unary_rpc_method_handler(one, *codecs)

    def report(self) -> str:
        """Count the connections that were refused since the last call. Returns the line to log, or "" if none is
        due."""
        now = self._now()
        while self._knocks and self._knocks[0] < now - PATIENCE_S:
            self._knocks.popleft()
            self._unreported += 1
            self.refused += 1
        if not self._unreported or now < self._due:
            return ""
        line = (
            f"refused {self._unreported} connection{'s' * (self._unreported > 1)} to the control port: "
            "they did not prove that they know this mesh's secret"
        )
        self._due, self._unreported = now + REPORT_EVERY_S, 0
        return line

    async def watch(self) -> None:
        """Log the reports until cancelled."""
        while True:
            await next_wakeup(LOOK_EVERY_S)
            if line := self.report():
                _log.warning("%s", line)
