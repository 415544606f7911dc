"""Decides whether a refused placement may become possible later, and so between HTTP 400 and 503."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence

from exo_mesh.domain.device import PeerInfo, Telemetry
from exo_mesh.domain.footprint import gigabytes
from exo_mesh.errors import (
    InputError,
    MemoryPressureError,
    MeshError,
    ModelError,
    PendingPlacementError,
    PlacementError,
)

FIGURES_S = 15.0
"""How long a placement waits for the telemetry of peers that have just joined; telemetry comes with every probe."""


async def judged(
    refusal: PlacementError,
    *,
    silent: Sequence[PeerInfo],
    gone: Sequence[PeerInfo],
    awaited: Sequence[str],
    in_use: str,
    fits: Callable[[Sequence[PeerInfo]], Awaitable[bool]],
) -> PlacementError:
    """Classify a placement refusal: `pending` if telemetry of peers is missing (`silent`), or needed peers do not
    answer (`gone`) or have not joined since this node started (`awaited`, their names); `memory_pressure` if the
    model would fit once memory is free; otherwise unchanged, because no set of known peers can ever hold the model.

    in_use: text that says what uses the memory of the peers. fits: whether a plan would exist if the peers ran nothing
    else and these further peers took part.
    """
    if silent:
        return _later(refusal, PendingPlacementError.code, f"the memory of {_names(silent)} is not known yet")
    if await fits(()):
        return _later(refusal, MemoryPressureError.code, f"it would fit if memory were free: {in_use}")
    if gone and await fits(gone):
        return _later(refusal, PendingPlacementError.code, f"it would fit with {_names(gone)} (not reachable now)")
    if awaited and refusal.reason != "too_few_layers":
        names = ", ".join(awaited)
        return _later(refusal, PendingPlacementError.code, f"this node has just started, and {names} may still join")
    return refusal


def _later(refusal: PlacementError, code: str, why: str) -> PlacementError:
    later = PlacementError(
        f"{refusal}; {why}",
        reason=refusal.reason,
        need_bytes=refusal.need_bytes,
        have=refusal.have,
        remedy=refusal.remedy,
    )
    later.code = code
    return later


async def finds_plan(proposal: Awaitable[object]) -> bool:
    """Whether a proposal results in a plan. True if that cannot be determined, so that a placement is not called
    impossible."""
    try:
        await proposal
    except (PlacementError, InputError, ModelError):
        return False
    except MeshError:
        return True
    return True


def capacity_of(info: PeerInfo, reading: Telemetry | None) -> int | None:
    """Bytes that models could use on a peer that ran nothing else; None if unknown."""
    if reading is not None:
        return reading.capacity_bytes or reading.total_bytes
    return max((device.memory_bytes for device in info.devices), default=0) or None


def memory_in_use(peers: Iterable[PeerInfo], readings: Mapping[str, Telemetry]) -> str:
    """Text that says what uses the memory of each peer, and the remedy."""
    shown = []
    for info in peers:
        if (reading := readings.get(info.id)) is not None and (capacity := capacity_of(info, reading)):
            others = max(0, capacity - reading.usable_bytes - reading.reserved_bytes)
            held = gigabytes(reading.reserved_bytes)
            shown.append(
                f"{info.name} has {gigabytes(capacity)}, models hold {held}, other programs {gigabytes(others)}"
            )
    return "; ".join([*shown, "stop a model or end other programs"])


def _names(peers: Iterable[PeerInfo]) -> str:
    return ", ".join(peer.name for peer in peers)
