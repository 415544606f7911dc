"""Converts readings of power, temperature and load to protobuf and back, with limits on what a peer sends."""

from __future__ import annotations

import math

from exo_mesh.domain.power.readings import VALUES, AcceleratorReading, DeviceValues, HardwareReading
from exo_mesh.wire.proto import control_pb2 as pb

MAX_ACCELERATORS = 32
MAX_SOURCE = 64
_MAX_ID, _MAX_NAME = 16, 128

_WHOLE = frozenset(name for name in VALUES if name.endswith("_bytes"))


def hardware_to_proto(reading: HardwareReading) -> pb.HardwareReading:
    """The reading as a message, without the parts, which only the node itself needs."""
    return pb.HardwareReading(
        machine=_values_to_proto(reading.machine),
        accelerators=[
            pb.AcceleratorReading(
                id=one.id, kind=one.kind, vendor=one.vendor, name=one.name, values=_values_to_proto(one.values)
            )
            for one in reading.accelerators[:MAX_ACCELERATORS]
        ],
        machine_digest=reading.machine_digest,
    )


def hardware_from_proto(message: pb.HardwareReading) -> HardwareReading:
    """The reading in a message. Texts are truncated; figures that are negative or not finite count as unknown."""
    return HardwareReading(
        _values_from_proto(message.machine),
        tuple(
            AcceleratorReading(
                one.id[:_MAX_ID], one.kind[:_MAX_ID], one.vendor[:_MAX_ID], one.name[:_MAX_NAME],
                _values_from_proto(one.values),
            )
            for one in message.accelerators[:MAX_ACCELERATORS]
        ),
        message.machine_digest,
    )  # fmt: skip


def _values_to_proto(values: DeviceValues) -> pb.DeviceValues:
    bits: dict[str, int] = {}
    message = pb.DeviceValues()
    for number, name in enumerate(VALUES, start=1):
        value = getattr(values, name)
        if value is None:
            continue
        setattr(message, name, value)
        if source := values.sources.get(name):
            bits[source] = bits.get(source, 0) | 1 << number
    message.sources.extend(pb.ValueSource(source=source, values=mask) for source, mask in bits.items())
    return message


def _values_from_proto(message: pb.DeviceValues) -> DeviceValues:
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
