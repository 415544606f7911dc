"""A connection to the driver of a ring that stays open between requests and retries nothing, for benchmarks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TypeAlias

import grpc.aio

from exo_mesh.domain.plan import Plan
from exo_mesh.domain.request import GenerateRequest, TokenEvent
from exo_mesh.errors import TransportError, error_from_code
from exo_mesh.security.credentials import CredentialSource
from exo_mesh.wire.calls import GENERATE
from exo_mesh.wire.channels import method_of, open_channel
from exo_mesh.wire.driver_codec import event_from_proto, request_to_proto

CONNECT_S = 10.0

Ask: TypeAlias = Callable[[GenerateRequest, float], AsyncGenerator[list[TokenEvent], None]]
"""Sends a request with a deadline in seconds, and yields the tokens of each message. Raises the error of the driver,
and TransportError if the stream breaks."""


@asynccontextmanager
async def open_driver(endpoint: str, plan: Plan, credentials: CredentialSource | None = None) -> AsyncIterator[Ask]:
    """Connect to "host:port". Raises TimeoutError after CONNECT_S."""
    async with open_channel(endpoint, credentials) as channel:
        generate = method_of(channel, GENERATE)
        async with asyncio.timeout(CONNECT_S):
            await channel.channel_ready()

        async def ask(request: GenerateRequest, deadline_s: float) -> AsyncGenerator[list[TokenEvent], None]:
            try:
                async for message in generate(request_to_proto(plan, request), timeout=deadline_s):
                    if message.error_code:
                        raise error_from_code(message.error_code, message.error_message)
                    yield [event_from_proto(event) for event in message.events]
            except grpc.aio.AioRpcError as exc:
                raise TransportError(f"the driver's stream broke: {exc.details()}") from exc

        yield ask
