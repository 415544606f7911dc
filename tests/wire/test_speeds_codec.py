"""Measured speeds on the wire: they arrive as they were, bounded and plausible."""

from __future__ import annotations

from msgspec.structs import replace

from exo_mesh.domain.device import PeerInfo
from exo_mesh.domain.engine_speed import MAX_ENGINES, MAX_MODELS, EngineSpeed, ForwardCost, ModelSpeeds
from exo_mesh.wire.control_codec import peer_from_proto, peer_to_proto
from exo_mesh.wire.proto import control_pb2 as pb

COST = ForwardCost(0.0001, 0.1 / 3, 0.0025)
SPEED = EngineSpeed(COST, replace(COST, head_s=0.0), COST, 128)


def speeds_to_proto(speeds: ModelSpeeds) -> list[pb.ModelSpeeds]:
    return list(peer_to_proto(PeerInfo("p", 1, "n", "1", 5, "default", (), engine_speeds=speeds)).engine_speeds)


def speeds_from_proto(messages: list[pb.ModelSpeeds]) -> ModelSpeeds:
    return peer_from_proto(pb.PeerInfo(id="p", engine_speeds=messages)).engine_speeds


def test_speeds_arrive_with_all_their_digits() -> None:
    speeds: ModelSpeeds = (("d" * 32, (("numpy", SPEED), ("torch", SPEED))), ("e" * 32, (("mlx", SPEED),)))
    assert speeds_from_proto(speeds_to_proto(speeds)) == speeds


def test_one_peer_cannot_fill_the_memory_of_others() -> None:
    engines = tuple((f"engine{index}", SPEED) for index in range(3 * MAX_ENGINES))
    message = speeds_to_proto(tuple((f"{index:032}", engines) for index in range(MAX_MODELS)))
    flood = [message[index % MAX_MODELS] for index in range(5 * MAX_MODELS)]
    there = speeds_from_proto(flood)
    assert len(there) == MAX_MODELS and all(len(engines) == MAX_ENGINES for _, engines in there)
    assert sum(one.ByteSize() for one in message) < 64 * 1024, "a record stays small"


def test_impossible_figures_of_a_peer_are_left_out() -> None:
    wrong = (replace(SPEED, one=replace(COST, layer_s=bad)) for bad in (0.0, -1.0, float("inf"), float("nan")))
    message = speeds_to_proto((("d" * 32, tuple((str(index), one) for index, one in enumerate(wrong))),))
    assert speeds_from_proto(message) == ()
