"""Which peers of a ring are short of memory, as they say themselves."""

from __future__ import annotations

from collections.abc import Mapping

from exo_mesh.domain.device import PeerInfo, Telemetry
from exo_mesh.domain.health import Reason
from exo_mesh.domain.plan import Plan
from exo_mesh.errors import MemoryPressureError


def short_members(plan: Plan, readings: Mapping[str, Telemetry]) -> dict[str, Reason]:
    """By peer id what each member of a ring says that is short of memory."""
    found: dict[str, Reason] = {}
    for peer_id in plan.member_ids:
        reasons = readings[peer_id].reasons if peer_id in readings else ()
        for reason in reasons:
            if reason.code == MemoryPressureError.code:
                found[peer_id] = reason
    return found


def refusal_of(plan: Plan, short: Mapping[str, Reason], peers: Mapping[str, PeerInfo], why: str) -> str:
    """Why a ring refuses a request, for its client: peer, numbers and remedy. why: why it goes nowhere else."""
    told = [
        f"peer {peers[peer_id].name if peer_id in peers else peer_id[:8]}: {reason.message}; {reason.remedy}"
        for peer_id, reason in short.items()
    ]
    return f"{plan.instance_id} takes no more requests now: " + "; ".join([*told, why])
