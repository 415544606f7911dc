"""Converts served models to protobuf and back."""

from __future__ import annotations

from exo_mesh.base.printable import printable
from exo_mesh.domain.whole.served import ServedModel
from exo_mesh.wire.proto import plan_pb2 as pb

MAX_NAME_CHARS = 256
MAX_SERVED = 64
"""Most served models of one peer; the rest is cut off."""


def served_to_proto(model: ServedModel) -> pb.ServedModel:
    return pb.ServedModel(
        name=model.name,
        engine=model.engine,
        server=model.server,
        served_name=model.served_name,
        stands_for=model.stands_for,
        context_limit=model.context_limit,
        slots=model.slots,
    )


def served_from_proto(message: pb.ServedModel) -> ServedModel:
    """Names are cut to MAX_NAME_CHARS and made printable: a peer sends them, and it has them from a server."""
    return ServedModel(
        name=printable(message.name, MAX_NAME_CHARS),
        engine=printable(message.engine, MAX_NAME_CHARS),
        server=printable(message.server, MAX_NAME_CHARS),
        served_name=printable(message.served_name, MAX_NAME_CHARS),
        stands_for=printable(message.stands_for, MAX_NAME_CHARS),
        context_limit=message.context_limit,
        slots=message.slots,
    )
