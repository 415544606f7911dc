"""Shortens a telemetry reading by some of its hops, and completes a short one with the hops known before. Pure."""

from __future__ import annotations

from collections.abc import Callable

from exo_mesh.domain.device import MAX_HOPS
from exo_mesh.wire.proto import control_pb2 as pb

_FIELD_BYTES = 4
"""Most bytes of the field number and the length of a hop."""


class ShortReadings:
    """The short readings for one peer. Each reading lists the hops after the last reading's, so that the peer learns
    all of them."""

    def __init__(self) -> None:
        self._next_hop = 0
        self._last: pb.Telemetry | None = None

    def next(self, reading: pb.Telemetry, max_bytes: int) -> pb.Telemetry:
        """The reading with as many hops as fit. A reading that fits is returned as it is; so is one without room for a
        single hop, because the peer would never learn its hops."""
        if reading.ByteSize() <= max_bytes or not reading.hops:
            return reading
        if self._last is not None and self._last.sequence == reading.sequence:
            return self._last  # a peer ignores what else comes with the same sequence number
        short = pb.Telemetry()
        short.CopyFrom(reading)
        del short.hops[:]
        short.keeps_hops = True
        room, num_hops = max_bytes - short.ByteSize(), len(reading.hops)
        for place in range(self._next_hop, self._next_hop + num_hops):
            hop = reading.hops[place % num_hops]
            room -= hop.ByteSize() + _FIELD_BYTES
            if room < 0:
                break
            short.hops.append(hop)
        if not short.hops:
            return reading
        self._last, self._next_hop = short, (self._next_hop + len(short.hops)) % num_hops
        return short


def completed(short: pb.Telemetry, held: pb.Telemetry | None, is_alive: Callable[[str], bool]) -> pb.Telemetry:
    """A short reading with the hops to living peers that it leaves out, from the reading held before."""
    whole = pb.Telemetry()
    whole.CopyFrom(short)
    whole.ClearField("keeps_hops")
    listed = {hop.peer_id for hop in short.hops}
    if held is not None:
        whole.hops.extend(hop for hop in held.hops if hop.peer_id not in listed and is_alive(hop.peer_id))
    del whole.hops[MAX_HOPS:]
    return whole
