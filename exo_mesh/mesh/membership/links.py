"""Collects the links between other peers from those peers' telemetry. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from exo_mesh.domain.device import HopReading, Telemetry


def hops_of_others(own_id: str, readings: Mapping[str, Telemetry]) -> list[tuple[str, HopReading]]:
    """(peer, its link to another peer) once for each pair of other live peers. If both peers report their link, the
    report of the peer with the lower id is used."""
    found: dict[tuple[str, str], tuple[str, HopReading]] = {}
    for reporter in sorted(readings):
        for hop in readings[reporter].hops:
            if own_id not in (reporter, hop.peer_id) and hop.peer_id in readings and reporter != hop.peer_id:
                found.setdefault((min(reporter, hop.peer_id), max(reporter, hop.peer_id)), (reporter, hop))
    return [found[pair] for pair in sorted(found)]
