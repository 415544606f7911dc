"""The events of one answer, as they come from a model server."""

from __future__ import annotations

import asyncio

import aiohttp

from exo_mesh.errors import StageLostError
from exo_mesh_openai.client import ServerClient
from exo_mesh_openai.sse import EventReader, StreamEvent


class ReplyStream:
    """Reads the events of a reply. deadline_at: of the next part, in the loop's time; `allow` moves it.

    Only a part of the answer should move it, because a server can send comments for ever.
    """

    def __init__(
        self, client: ServerClient, response: aiohttp.ClientResponse, deadline_at: float, allowed_s: float
    ) -> None:
        self._client = client
        self._response = response
        self._reader = EventReader()
        self._deadline_at = deadline_at
        self._allowed_s = allowed_s

    def allow(self, seconds: float) -> None:
        """Sets how long from now the next part of the answer may take."""
        self._allowed_s = seconds
        self._deadline_at = asyncio.get_running_loop().time() + seconds

    async def read(self) -> list[StreamEvent] | None:
        """The events that have come next, perhaps none yet; None at the end of the reply. Raises StageLostError if the
        connection breaks or the deadline passes, and EngineError for what are no events."""
        try:
            async with asyncio.timeout_at(self._deadline_at):
                part = await self._response.content.readany()
        except TimeoutError as exc:
            raise stalled(self._client, self._allowed_s) from exc
        except aiohttp.ClientError as exc:
            raise self._client.lost(exc) from exc
        return self._reader.feed(part) if part else None

    def close(self) -> None:
        """Hangs up, which stops a server that has not finished."""
        self._response.close()


def stalled(client: ServerClient, within_s: float) -> StageLostError:
    """The error for a server that sends nothing more: the request can go on elsewhere."""
    return StageLostError(f"the model server {client.address.where} sent nothing for {within_s:g} s")
