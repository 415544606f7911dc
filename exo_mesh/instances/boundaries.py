"""What a stage hands on must be what the next one takes: checked once both are loaded, before a request runs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

from exo_mesh.domain.agreement import TensorShape, boundary_defect
from exo_mesh.domain.plan import Plan
from exo_mesh.errors import EngineError
from exo_mesh.proto import control_pb2 as pb
from exo_mesh.proto import plan_pb2


def refuse_mismatch(plan: Plan, ready: Sequence[pb.StageReady]) -> None:
    """Raises EngineError naming both stages, unless each one's declared outputs are the next one's inputs by name and
    shape. An engine that declares nothing is believed: its self-test or its own kind speak for it."""
    for (one, given), (other, taken) in pairwise(zip(plan.stages, ready, strict=True)):
        if defect := boundary_defect(_shapes(given.outputs), _shapes(taken.inputs)):
            raise EngineError(
                f"{one.shard} ({one.engine} at {one.peer_id[:8]}) and {other.shard} ({other.engine} at "
                f"{other.peer_id[:8]}) do not fit together: {defect}"
            )


def _shapes(specs: Iterable[plan_pb2.TensorSpec]) -> tuple[TensorShape, ...]:
    return tuple((spec.name, tuple(spec.item_shape)) for spec in specs)
