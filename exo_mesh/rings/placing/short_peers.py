"""Finds the peers of a ring that report themselves short of memory, or that drain."""

from __future__ import annotations

from collections.abc import Mapping

from exo_mesh.domain.device import PeerInfo, Telemetry
from exo_mesh.domain.health import Reason
from exo_mesh.domain.plan import Plan
from exo_mesh.errors import MemoryPressureError


def short_members(plan: Plan, readings: Mapping[str, Telemetry]) -> dict[str, Reason]:
    """The report of each member of a ring that is short of memory, by peer id."""
    found: dict[str, Reason] = {}
    for peer_id in plan.member_ids:
        reasons = readings[peer_id].reasons if peer_id in readings else ()
        for reason in reasons:
            if reason.code == MemoryPressureError.code:
                found[peer_id] = reason
    return found


def is_short(reading: Telemetry) -> bool:
    """Whether a peer reports that it is short of memory."""
    return any(reason.code == MemoryPressureError.code for reason in reading.reasons)


def draining_members(plan: Plan, readings: Mapping[str, Telemetry]) -> set[str]:
    """The members of a ring that drain, and will probably stop soon."""
    return {peer_id for peer_id in plan.member_ids if peer_id in readings and readings[peer_id].is_draining}


def refusal_of(plan: Plan, short: Mapping[str, Reason], peers: Mapping[str, PeerInfo], why: str) -> str:
    """The error text of a ring that refuses a request: peer, numbers and remedy. why: why no other ring takes the
    request."""
    reasons = [
        f"peer {peers[peer_id].name if peer_id in peers else peer_id[:8]}: {reason.message}; {reason.remedy}"
        for peer_id, reason in short.items()
    ]
    return f"{plan.instance_id} accepts no more requests now: " + "; ".join([*reasons, why])
