"""Telemetry readings on their way between peers: kept as they came, shortened to fit a datagram, and completed again.

A reading is passed on without being decoded, so that a peer with a newer version gets all of it.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from exo_mesh.domain.device import MAX_HOPS, Telemetry
from exo_mesh.domain.view import Unread
from exo_mesh.wire.control_codec import telemetry_from_proto, telemetry_to_proto
from exo_mesh.wire.message_codec import by_hand
from exo_mesh.wire.proto import control_pb2 as pb

_FIELD_BYTES = 4
"""Most bytes of the field number and the length of a hop."""


class Reading(msgspec.Struct, frozen=True):
    """A telemetry reading as it came, or this node's own. sequence, keys_digest: see Telemetry. keeps_hops: it lists
    only some hops; for the other peers, the hops of the reading before it still count."""

    peer_id: str
    sequence: int
    keys_digest: int
    content: Telemetry | Unread[Telemetry]
    keeps_hops: bool = False

    @staticmethod
    def of(telemetry: Telemetry) -> Reading:
        """A reading of this node, encoded once for all peers that get it."""
        return reading_from_proto(telemetry_to_proto(telemetry))

    @property
    def value(self) -> Telemetry:
        return self.content.value if isinstance(self.content, Unread) else self.content

    @property
    def num_bytes(self) -> int:
        """The length of the reading as it is sent."""
        return len(self.content.data) if isinstance(self.content, Unread) else reading_to_proto(self).ByteSize()


class ShortReadings:
    """The short readings for one peer. Each reading lists the hops after the last reading's, so that the peer learns
    all of them."""

    def __init__(self) -> None:
        self._next_hop = 0
        self._last: Reading | None = None

    def next(self, reading: Reading, max_bytes: int) -> Reading:
        """The reading with as many hops as fit. A reading that fits is returned as it is; so is one without room for a
        single hop, because the peer would never learn its hops."""
        if reading.num_bytes <= max_bytes:
            return reading
        if self._last is not None and self._last.sequence == reading.sequence:
            return self._last  # a peer ignores what else comes with the same sequence number
        short = reading_to_proto(reading)
        hops = list(short.hops)
        del short.hops[:]
        short.keeps_hops = True
        room = max_bytes - short.ByteSize()
        for place in range(self._next_hop, self._next_hop + len(hops)):
            hop = hops[place % len(hops)]
            room -= hop.ByteSize() + _FIELD_BYTES
            if room < 0:
                break
            short.hops.append(hop)
        if not short.hops:
            return reading
        self._last, self._next_hop = reading_from_proto(short), (self._next_hop + len(short.hops)) % len(hops)
        return self._last


def completed(short: Reading, held: Reading | None, is_alive: Callable[[str], bool]) -> Reading:
    """A short reading with the hops to living peers that it leaves out, from the reading held before."""
    whole = reading_to_proto(short)
    whole.ClearField("keeps_hops")
    listed = {hop.peer_id for hop in whole.hops}
    if held is not None:
        whole.hops.extend(
            hop for hop in reading_to_proto(held).hops if hop.peer_id not in listed and is_alive(hop.peer_id)
        )
    del whole.hops[MAX_HOPS:]
    return reading_from_proto(whole)


def reading_to_proto(reading: Reading) -> pb.Telemetry:
    content = reading.content
    return pb.Telemetry.FromString(content.data) if isinstance(content, Unread) else telemetry_to_proto(content)


def reading_from_proto(message: pb.Telemetry) -> Reading:
    content = Unread(message.SerializeToString(), _telemetry)
    return Reading(message.peer_id, message.sequence, message.keys_digest, content, message.keeps_hops)


def _telemetry(data: bytes) -> Telemetry:
    return telemetry_from_proto(pb.Telemetry.FromString(data))


by_hand(Reading, reading_from_proto, reading_to_proto, *pb.Telemetry.DESCRIPTOR.fields_by_name)
