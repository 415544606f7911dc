"""The links between other peers, as those peers told of them in their telemetry. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from exo_mesh.domain.device import HopReading, Telemetry


def hops_of_others(own_id: str, readings: Mapping[str, Telemetry]) -> list[tuple[str, HopReading]]:
    """(peer, its way to another) of each pair of other live peers once, as the first by id that tells of it says."""
    found: dict[tuple[str, str], tuple[str, HopReading]] = {}
    for teller in sorted(readings):
        for hop in readings[teller].hops:
            if own_id not in (teller, hop.peer_id) and hop.peer_id in readings and teller != hop.peer_id:
                found.setdefault((min(teller, hop.peer_id), max(teller, hop.peer_id)), (teller, hop))
    return [found[pair] for pair in sorted(found)]
