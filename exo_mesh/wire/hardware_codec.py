"""Converts the values of a device to protobuf and back: which of them come from a source is a number of bits."""

from __future__ import annotations

import math
from typing import Any

from exo_mesh.domain.power import VALUES, DeviceValues
from exo_mesh.wire.message_codec import by_hand
from exo_mesh.wire.proto import control_pb2 as pb

MAX_SOURCE = 64

_WHOLE = frozenset(name for name in VALUES if name.endswith("_bytes"))


def _values_to_proto(values: DeviceValues) -> dict[str, Any]:
    bits: dict[str, int] = {}
    known: dict[str, Any] = {}
    for number, name in enumerate(VALUES, start=1):
        value = getattr(values, name)
        if value is None:
            continue
        known[name] = value
        if source := values.sources.get(name):
            bits[source] = bits.get(source, 0) | 1 << number
    return {**known, "sources": [{"source": source, "values": mask} for source, mask in bits.items()]}


def _values_from_proto(message: pb.DeviceValues) -> DeviceValues:
    """Texts are cut; figures that are negative or not finite count as unknown."""
    known: dict[str, float] = {}
    sources: dict[str, str] = {}
    for number, name in enumerate(VALUES, start=1):
        if not message.HasField(name):
            continue
        value = getattr(message, name)
        if not (math.isfinite(value) and value >= 0):
            continue
        known[name] = int(value) if name in _WHOLE else value
        for entry in message.sources[: len(VALUES)]:
            if entry.values >> number & 1:
                sources[name] = entry.source[:MAX_SOURCE]
                break
    return DeviceValues(**known, sources=sources)  # type: ignore[arg-type]


by_hand(DeviceValues, _values_from_proto, _values_to_proto, *VALUES, "sources")
