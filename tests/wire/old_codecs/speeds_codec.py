"""Converts the measured speeds of engines to protobuf and back."""

from __future__ import annotations

from collections.abc import Sequence

from exo_mesh.base.printable import printable
from exo_mesh.domain.speed.engine_speed import DIGEST_CHARS, EngineSpeed, ForwardCost, ModelSpeeds
from exo_mesh.wire.proto import control_pb2 as pb

MAX_MODELS, MAX_ENGINES = 32, 8
"""Most models of one peer with speeds, and most engines of one model; the rest is cut off."""

MAX_NAME_CHARS = 64


def speeds_to_proto(speeds: ModelSpeeds) -> list[pb.ModelSpeeds]:
    return [
        pb.ModelSpeeds(
            digest=digest,
            engines=[
                pb.EngineSpeed(
                    engine=engine,
                    one=_cost_to_proto(speed.one),
                    eight=_cost_to_proto(speed.eight),
                    chunk=_cost_to_proto(speed.chunk),
                    chunk_tokens=speed.chunk_tokens,
                )
                for engine, speed in engines[:MAX_ENGINES]
            ],
        )
        for digest, engines in speeds[-MAX_MODELS:]
    ]


def speeds_from_proto(messages: Sequence[pb.ModelSpeeds]) -> ModelSpeeds:
    """Impossible figures are left out: placement computes with them."""
    found = []
    for message in messages[:MAX_MODELS]:
        speeds = (
            (printable(one.engine, MAX_NAME_CHARS), _speed_from_proto(one)) for one in message.engines[:MAX_ENGINES]
        )
        valid = tuple((engine, speed) for engine, speed in speeds if speed.is_valid)
        if valid:
            found.append((printable(message.digest, DIGEST_CHARS), valid))
    return tuple(found)


def _cost_to_proto(cost: ForwardCost) -> pb.ForwardCost:
    return pb.ForwardCost(fixed_s=cost.fixed_s, layer_s=cost.layer_s, head_s=cost.head_s)


def _speed_from_proto(message: pb.EngineSpeed) -> EngineSpeed:
    one, eight, chunk = (
        ForwardCost(cost.fixed_s, cost.layer_s, cost.head_s) for cost in (message.one, message.eight, message.chunk)
    )
    return EngineSpeed(one, eight, chunk, message.chunk_tokens)
