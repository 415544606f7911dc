"""The calls about requests, running answers and kept answers: one row each, this node's answers, and those of peers, as
values."""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from functools import partial

from exo_mesh.domain.request import Progress, PromptLogprobs, RequestEvent
from exo_mesh.errors import DeadlineError, TransportError
from exo_mesh.mesh.membership.port import Calls
from exo_mesh.rings.serving.journal import Journal
from exo_mesh.rings.serving.kept_answers import MAX_LINKS, KeptAnswer, KeptAnswers
from exo_mesh.rings.serving.live import LiveStreams
from exo_mesh.rings.serving.streams import FoundStream, StreamViewer
from exo_mesh.wire.call_access import PEER
from exo_mesh.wire.channel_options import MAX_MESSAGE_BYTES
from exo_mesh.wire.driver_codec import event_from_proto, event_to_proto, prompt_from_proto, prompt_to_proto
from exo_mesh.wire.message_codec import Codec
from exo_mesh.wire.peer_call import CALL_S, LOOK_S, AnyAnswer, PeerCall, PeerStream, StreamAnswer, answer
from exo_mesh.wire.proto import control_pb2 as pb

CANCEL_S = 2.0

KEPT_S = 30.0
"""Deadline for reading a kept conversation: it may have 32 MB."""

PART_BYTES = 512 << 10
"""Most bytes of a kept answer in one message between peers."""

MAX_CHAIN_BYTES = 32 << 20
"""Most bytes of one conversation: twice the longest body of a request."""

MAX_PHASE_CHARS = 32

VIEWER = Codec(StreamViewer, pb.StreamViewer)
FOUND = Codec(FoundStream, pb.StreamInfo)


CANCEL = PeerCall("Cancel", pb.CancelRequest, pb.CancelReply, PEER, deadline_s=CANCEL_S)
# The reply has the tools of requests.
FIND_STREAMS = PeerCall(
    "FindStreams", pb.FindStreamsRequest, pb.FindStreamsReply, PEER, deadline_s=LOOK_S, reply_bytes=MAX_MESSAGE_BYTES
)
# No deadline: the request has one at the peer where it entered.
FOLLOW_STREAM = PeerStream("FollowStream", pb.FollowStreamRequest, pb.FollowReply, PEER, deadline_s=None)
READ_KEPT = PeerStream("ReadKept", pb.ReadKeptRequest, pb.KeptPart, PEER, deadline_s=KEPT_S)
DELETE_KEPT = PeerCall("DeleteKept", pb.DeleteKeptRequest, pb.DeleteKeptReply, PEER, deadline_s=CALL_S)


def answers(own_id: str, journal: Journal, live: LiveStreams, kept: KeptAnswers) -> list[AnyAnswer]:
    """This node's answers to these calls."""
    return [
        answer(CANCEL, partial(_cancel, journal)),
        answer(FIND_STREAMS, partial(_find_streams, own_id, live)),
        StreamAnswer(FOLLOW_STREAM, partial(_follow_stream, live)),
        StreamAnswer(READ_KEPT, partial(_read_kept, kept)),
        answer(DELETE_KEPT, partial(_delete_kept, kept)),
    ]


async def _cancel(journal: Journal, request: pb.CancelRequest) -> pb.CancelReply:
    if request.instance_id:
        count = journal.cancel_on(request.instance_id, request.request_id)
        return pb.CancelReply(found=count > 0, count=count)
    key_id = request.key_id if request.HasField("key_id") else None
    return pb.CancelReply(found=journal.cancel(request.request_id, key_id))


async def cancel(calls: Calls, peer_id: str, request_id: str, key_id: str | None = None) -> bool:
    """Cancel a request that entered the mesh at a node. False if the node does not know the request, or if it came with
    an API key other than key_id; None matches any key."""
    return (await calls.call(peer_id, CANCEL, pb.CancelRequest(request_id=request_id, key_id=key_id))).found


async def cancel_on(calls: Calls, peer_id: str, instance_id: str, request_id: str = "") -> int:
    """Cancel the requests that entered at a node and run on an instance, or only the request `request_id`. Returns the
    number of cancelled requests."""
    request = pb.CancelRequest(instance_id=instance_id, request_id=request_id)
    return (await calls.call(peer_id, CANCEL, request)).count


async def _find_streams(own_id: str, live: LiveStreams, request: pb.FindStreamsRequest) -> pb.FindStreamsReply:
    found = live.find(VIEWER.read(request.viewer), request.id, own_id)
    return pb.FindStreamsReply(streams=[FOUND.write(one) for one in found])


async def find_streams(calls: Calls, peer_id: str, viewer: StreamViewer, stream_id: str) -> list[FoundStream]:
    """The streams that run for clients of a node and that the viewer may see."""
    request = pb.FindStreamsRequest(viewer=VIEWER.write(viewer), id=stream_id)
    reply = await calls.call(peer_id, FIND_STREAMS, request)
    return [FOUND.read(message, peer_id=peer_id) for message in reply.streams]


async def _follow_stream(live: LiveStreams, request: pb.FollowStreamRequest) -> AsyncGenerator[pb.FollowReply, None]:
    viewer = VIEWER.read(request.viewer)
    async with aclosing(live.follow(viewer, request.id, request.request_id)) as batches:
        async for batch in batches:
            yield events_to_proto(batch)


async def follow_stream(
    calls: Calls, found: FoundStream, viewer: StreamViewer, request_id: str
) -> AsyncGenerator[RequestEvent, None]:
    """The events of one stream, until it ends."""
    request = pb.FollowStreamRequest(viewer=VIEWER.write(viewer), id=found.id, request_id=request_id)
    async with aclosing(calls.stream(found.peer_id, FOLLOW_STREAM, request)) as messages:
        async for message in messages:
            try:
                events = events_from_proto(message)
            except ValueError as exc:
                raise TransportError(f"a peer sent an invalid event: {exc}") from exc
            for event in events:
                yield event


async def _read_kept(kept: KeptAnswers, request: pb.ReadKeptRequest) -> AsyncGenerator[pb.KeptPart, None]:
    key_id = request.key_id if request.HasField("key_id") else None
    first = kept.read(key_id, request.id)
    only = [] if first is None else [first]
    for found in only if request.only_one else kept.chain(key_id, request.id):
        for start in range(0, max(1, len(found.data)), PART_BYTES):
            part = found.data[start : start + PART_BYTES]
            is_last = start + PART_BYTES >= len(found.data)
            yield pb.KeptPart(
                id=found.id, key_id=found.key_id, previous_id=found.previous_id, data=part, is_last=is_last
            )


async def read_kept(
    calls: Calls, peer_id: str, key_id: str | None, answer_id: str, *, only_one: bool
) -> list[KeptAnswer]:
    """An answer that a node keeps and, unless only_one, those before it in its conversation. Raises TransportError if
    the node sends more than a conversation may have."""
    found: list[KeptAnswer] = []
    data: list[bytes] = []
    num_bytes = 0
    request = pb.ReadKeptRequest(key_id=key_id, id=answer_id, only_one=only_one)
    async with aclosing(calls.stream(peer_id, READ_KEPT, request)) as parts:
        async for part in parts:
            data.append(part.data)
            num_bytes += len(part.data)
            if num_bytes > MAX_CHAIN_BYTES or len(found) > MAX_LINKS:
                raise TransportError(f"the peer {peer_id[:8]} sent more than a conversation may have")
            if part.is_last:
                found.append(KeptAnswer(part.id, part.key_id, part.previous_id, b"".join(data)))
                data = []
    if data:
        raise DeadlineError(f"the peer {peer_id[:8]} sent only a part of a kept answer")
    return found


async def _delete_kept(kept: KeptAnswers, request: pb.DeleteKeptRequest) -> pb.DeleteKeptReply:
    key_id = request.key_id if request.HasField("key_id") else None
    return pb.DeleteKeptReply(found=kept.delete(key_id, request.id))


async def delete_kept(calls: Calls, peer_id: str, key_id: str | None, answer_id: str) -> bool:
    """Delete an answer that a node keeps. False if it has none with this id that the caller may read."""
    return (await calls.call(peer_id, DELETE_KEPT, pb.DeleteKeptRequest(key_id=key_id, id=answer_id))).found


def events_to_proto(events: Sequence[RequestEvent]) -> pb.FollowReply:
    message = pb.FollowReply()
    for event in events:
        if isinstance(event, Progress):
            message.phase, message.done, message.total = event.phase, event.done, event.total
            message.wait_s = event.wait_s
        elif isinstance(event, PromptLogprobs):
            message.prompt.extend(prompt_to_proto(event.entries))
        else:
            message.events.append(event_to_proto(event))
    return message


def events_from_proto(message: pb.FollowReply) -> list[RequestEvent]:
    """Convert a message to events. Raises ValueError for an invalid event."""
    made: list[RequestEvent] = []
    if message.phase:
        wait_s = message.wait_s if math.isfinite(message.wait_s) else 0.0
        made.append(Progress(message.phase[:MAX_PHASE_CHARS], message.done, message.total, wait_s))
    if message.prompt:
        made.append(prompt_from_proto(message.prompt))
    return [*made, *map(event_from_proto, message.events)]
