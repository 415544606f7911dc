"""Lists the addresses of all nodes for Prometheus, in the format of its http_sd_configs."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from urllib.parse import urlsplit

import msgspec
from aiohttp import web

from exo_mesh.api.context import ApiContext
from exo_mesh.api.errors import json_response
from exo_mesh.domain.addresses import needs_interface
from exo_mesh.domain.reports import PeerReport, StateReport

_HOST = re.compile(r"[A-Za-z0-9.-]{1,253}|\[[0-9A-Fa-f:.]{2,45}\]")
"""The only form of host that is accepted, because peers write their own records."""


class ScrapeTarget(msgspec.Struct):
    """One entry of http_sd_configs."""

    targets: list[str]
    labels: dict[str, str]


ScrapeTargets = list[ScrapeTarget]


class ScrapeTargetRoutes:
    """Each method answers one route."""

    def __init__(self, context: ApiContext) -> None:
        self._observation = context.services.observation

    async def targets(self, request: web.Request) -> web.Response:
        """GET /v1/prometheus/targets"""
        return json_response(scrape_targets(self._observation.state()))


def scrape_targets(state: StateReport) -> list[ScrapeTarget]:
    """One target for each live node that has an API, in the order of the peers in the state."""
    used = {link.to: link.address for link in state.links if link.source == state.node_id}
    return list(_targets(state.view.peers, used))


def _targets(peers: list[PeerReport], used: Mapping[str, str]) -> Iterator[ScrapeTarget]:
    """Yields the targets. used: by peer id, the control address by which this node reaches the peer. The peer's API is
    on the same host, while the address that a peer with several networks announces first may be unreachable. Prometheus
    cannot dial a link-local IPv6 address, which is often the fastest one between nodes."""
    for peer in peers:
        try:
            announced = urlsplit(peer.api_url)
            port = announced.port
        except ValueError:
            continue
        hosts = [address.rpartition(":")[0] for address in (used.get(peer.id, ""), announced.netloc)]
        host = next((one for one in hosts if one and not needs_interface(one)), "")
        if peer.alive and port and announced.scheme in ("http", "https") and _HOST.fullmatch(host):
            labels = {
                "__scheme__": announced.scheme,
                "node": peer.name,
                "__meta_exo_mesh_node_id": peer.id,
                "__meta_exo_mesh_version": peer.version,
            }
            yield ScrapeTarget([f"{host}:{port}"], labels)
