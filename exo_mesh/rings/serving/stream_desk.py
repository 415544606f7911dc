"""Finds and reads the running answers of all peers, each at its entry peer."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import AbstractContextManager, aclosing

from exo_mesh.domain.request import RequestEvent
from exo_mesh.errors import MeshError, TransportError
from exo_mesh.mesh.membership.peers import Peer
from exo_mesh.rings.serving.live import LiveStreams
from exo_mesh.rings.serving.stream_codec import (
    events_from_proto,
    events_to_proto,
    found_from_proto,
    found_to_proto,
    viewer_from_proto,
    viewer_to_proto,
)
from exo_mesh.rings.serving.streams import FoundStream, StreamCard, StreamViewer
from exo_mesh.wire.proto import control_pb2 as pb

_log = logging.getLogger(__name__)


class StreamDesk:
    """Implements StreamService, and answers other peers."""

    def __init__(self, own_id: str, peers: Callable[[], Sequence[Peer]], live: LiveStreams) -> None:
        self._own_id = own_id
        self._peers = peers
        self._live = live

    # calls by users of this node

    def open(self, card: StreamCard) -> AbstractContextManager[None]:
        return self._live.open(card)

    async def find(self, viewer: StreamViewer, stream_id: str = "") -> list[FoundStream]:
        found = self._live.find(viewer, stream_id, self._own_id)
        if found and stream_id:
            return found
        request = pb.FindStreamsRequest(viewer=viewer_to_proto(viewer), id=stream_id)
        peers = self._peers()
        answers = await asyncio.gather(*(peer.client.find_streams(request) for peer in peers), return_exceptions=True)
        for peer, answer in zip(peers, answers, strict=True):
            if isinstance(answer, pb.FindStreamsReply):
                found += [found_from_proto(peer.id, message) for message in answer.streams]
            elif not isinstance(answer, MeshError):
                raise answer
            else:
                _log.debug("peer %s does not list its running answers: %s", peer.info.name, answer)
        return sorted(found, key=lambda one: (-one.created, one.id))

    async def follow(
        self, found: FoundStream, viewer: StreamViewer, request_id: str
    ) -> AsyncGenerator[RequestEvent, None]:
        if found.peer_id == self._own_id:
            async with aclosing(self._live.follow(viewer, found.id, request_id)) as batches:
                async for batch in batches:
                    for event in batch:
                        yield event
            return
        peer = next((peer for peer in self._peers() if peer.id == found.peer_id), None)
        if peer is None:
            raise TransportError(f"the entry peer of {found.id} is gone")
        request = pb.FollowStreamRequest(viewer=viewer_to_proto(viewer), id=found.id, request_id=request_id)
        async with aclosing(peer.client.follow_stream(request)) as messages:
            async for message in messages:
                for event in _events(message):
                    yield event

    def answer_find(self, request: pb.FindStreamsRequest) -> pb.FindStreamsReply:
        found = self._live.find(viewer_from_proto(request.viewer), request.id, self._own_id)
        return pb.FindStreamsReply(streams=[found_to_proto(one) for one in found])

    async def answer_follow(self, request: pb.FollowStreamRequest) -> AsyncIterator[pb.FollowReply]:
        viewer = viewer_from_proto(request.viewer)
        async with aclosing(self._live.follow(viewer, request.id, request.request_id)) as batches:
            async for batch in batches:
                yield events_to_proto(batch)


def _events(message: pb.FollowReply) -> list[RequestEvent]:
    try:
        return events_from_proto(message)
    except ValueError as exc:
        raise TransportError(f"a peer sent an invalid event: {exc}") from exc
