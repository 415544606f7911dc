"""How each pair of other peers comes to be shown once, from what they tell of their links."""

from __future__ import annotations

from pathlib import Path

from exo_mesh.domain.device import HopReading, Telemetry
from exo_mesh.domain.reports import LinkReport
from exo_mesh.node.inspection.describe import hops_of_others
from tests.support.nodes import mesh, until


def reading(peer_id: str, **links: float) -> Telemetry:
    told = tuple(HopReading(other, rtt_ms, kind="ethernet") for other, rtt_ms in links.items())
    return Telemetry(peer_id, 1, 1, 1, 0, hops=told)


def test_each_pair_of_other_peers_is_shown_once_and_no_peer_that_has_gone() -> None:
    told = {
        "a": reading("a", b=1.0, c=2.0),
        "b": reading("b", a=1.0, c=3.0),
        "c": reading("c", a=2.0, b=4.0, d=5.0, gone=6.0),
        "d": reading("d", d=7.0),
    }
    shown = [(teller, hop.peer_id, hop.rtt_ms) for teller, hop in hops_of_others("a", told)]
    assert shown == [("b", "c", 3.0), ("c", "d", 5.0)]


async def test_the_topology_of_one_peer_has_the_link_between_two_others(tmp_path: Path) -> None:
    async with mesh(tmp_path, 3) as (one, two, three):
        others = {two.node_id, three.node_id}

        def between() -> list[LinkReport]:
            return [link for link in one.observation.topology().links if {link.source, link.to} == others]

        await until(lambda: len(between()) == 1 and between()[0].rtt_ms is not None)
        assert len(one.observation.topology().links) == 3
