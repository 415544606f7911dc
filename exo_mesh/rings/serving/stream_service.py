"""Finds and reads the running answers of all peers, each at its entry peer."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import AbstractContextManager, aclosing

from exo_mesh.domain.request import RequestEvent
from exo_mesh.errors import MeshError, TransportError
from exo_mesh.mesh.membership.service import Membership
from exo_mesh.rings.serving.calls import find_streams, follow_stream
from exo_mesh.rings.serving.live import LiveStreams
from exo_mesh.rings.serving.streams import FoundStream, StreamCard, StreamViewer

_log = logging.getLogger(__name__)


class StreamService:
    """The answers that run for clients of any peer."""

    def __init__(self, membership: Membership, live: LiveStreams) -> None:
        self._membership = membership
        self._live = live

    def open(self, card: StreamCard) -> AbstractContextManager[None]:
        """Let a request that enters here be found and read while the context is open."""
        return self._live.open(card)

    async def find(self, viewer: StreamViewer, stream_id: str = "") -> list[FoundStream]:
        """The answers that the viewer may see, at all peers that reply, newest first; with an id only that answer."""
        found = self._live.find(viewer, stream_id, self._membership.own.id)
        if found and stream_id:
            return found
        peers = self._membership.peers
        asked = (find_streams(self._membership.calls, peer.id, viewer, stream_id) for peer in peers)
        answers = await asyncio.gather(*asked, return_exceptions=True)
        for peer, answer in zip(peers, answers, strict=True):
            if isinstance(answer, MeshError):
                _log.debug("peer %s does not list its running answers: %s", peer.info.name, answer)
            elif isinstance(answer, BaseException):
                raise answer
            else:
                found += answer
        return sorted(found, key=lambda one: (-one.created, one.id))

    async def follow(
        self, found: FoundStream, viewer: StreamViewer, request_id: str
    ) -> AsyncGenerator[RequestEvent, None]:
        """The events of one choice from the first on. Raises the error that it ends with, and TransportError if its
        entry peer is lost."""
        if not self._membership.is_alive(found.peer_id):
            raise TransportError(f"the entry peer of {found.id} is gone")
        async with aclosing(follow_stream(self._membership.calls, found, viewer, request_id)) as events:
            async for event in events:
                yield event
