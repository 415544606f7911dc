"""Converts running answers for the wire between peers: the viewer, the description of an answer, and its events."""

from __future__ import annotations

import math
from collections.abc import Sequence

from exo_mesh.domain.request import Progress, PromptLogprobs, RequestEvent
from exo_mesh.rings.serving.streams import FoundStream, StreamViewer
from exo_mesh.wire.driver_codec import event_from_proto, event_to_proto, prompt_from_proto, prompt_to_proto
from exo_mesh.wire.message_codec import Codec
from exo_mesh.wire.proto import control_pb2 as pb

MAX_PHASE_CHARS = 32


VIEWER = Codec(StreamViewer, pb.StreamViewer)
FOUND = Codec(FoundStream, pb.StreamInfo)

viewer_to_proto, viewer_from_proto = VIEWER.write, VIEWER.read
found_to_proto = FOUND.write


def found_from_proto(peer_id: str, message: pb.StreamInfo) -> FoundStream:
    return FOUND.read(message, peer_id=peer_id)


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
