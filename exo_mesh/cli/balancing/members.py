"""Reads the nodes of a live mesh from its members, as upstreams for nginx."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from exo_mesh.cli.balancing.writing import Upstream
from exo_mesh.cli.client.api_client import ApiClient
from exo_mesh.domain.addresses import needs_interface
from exo_mesh.errors import MeshError

MAX_ASKED = 5
"""Most members that are read. Several are needed: a member that was cut off sees only itself."""
DEADLINE_S = 2.0
_NAME = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")
_UNSAFE = re.compile(r"[^A-Za-z0-9 ._-]")


class LiveMembers:
    """Reads the state from the node called and from some of the members seen last."""

    def __init__(self, first: ApiClient) -> None:
        self._first = first
        self._others: dict[str, ApiClient] = {}

    def read(self) -> list[Upstream]:
        """Every node that some member sees alive, ordered by id. Raises the first error if no member answers."""
        found: dict[str, Upstream] = {}
        answers, failure = [], None
        for client in [self._first, *list(self._others.values())[: MAX_ASKED - 1]]:
            try:
                answers.append(client.get("/state", DEADLINE_S))
            except MeshError as exc:
                failure = failure or exc
        if not answers and failure is not None:
            raise failure
        for state in answers:
            for peer_id, upstream in upstreams_of(state).items():
                # a node's own report wins, and so does any report that it accepts no new requests
                known = found.get(peer_id)
                if known is None or not upstream.takes_new or peer_id == state["node_id"]:
                    found[peer_id] = upstream
        self._remember(answers, found)
        return from_elsewhere([found[peer_id] for peer_id in sorted(found)])

    def _remember(self, answers: list[dict[str, Any]], found: Mapping[str, Upstream]) -> None:
        """Remembers which members to read next time, besides the first."""
        is_closed = any(state["health"].get("mesh") == "closed" for state in answers)
        urls = [f"{upstream.scheme}://{upstream.address}" for _, upstream in sorted(found.items())]
        for url in urls:
            if url != self._first.url and url not in self._others:
                self._others[url] = self._first.at(url, with_key=is_closed)
        if urls:
            self._others = {url: client for url, client in self._others.items() if url in urls}


def upstreams_of(state: Mapping[str, Any]) -> dict[str, Upstream]:
    """Upstreams by peer id, from an answer to GET /state: the peers whose API nginx can reach.

    Peers write their own records, so anything that is not an address is left out of the configuration.
    """
    readings = state.get("telemetry", {})
    found = {}
    for peer in state["view"]["peers"]:
        address, scheme = _address_of(peer.get("api_url") or "")
        reading = readings.get(peer["id"], {})
        if address:
            found[str(peer["id"])] = Upstream(
                address,
                _UNSAFE.sub("_", str(peer.get("name", "")))[:64],
                scheme,
                not reading.get("draining", False),
                _whole(reading.get("total_bytes")),
            )
    return found


def from_elsewhere(nodes: list[Upstream]) -> list[Upstream]:
    """Drops nodes whose API is on loopback, unless all are, as in a mesh on one machine."""
    reachable = [node for node in nodes if not node.is_loopback]
    return reachable or nodes


def _address_of(url: str) -> tuple[str, str]:
    """("host:port", scheme) of an API's URL; ("", "") if it is not one."""
    try:
        parts = urlsplit(url)
        host, port = (parts.hostname or "").lower(), parts.port
    except ValueError:
        return "", ""
    if parts.scheme not in ("http", "https") or not port:
        return "", ""
    try:
        ip = ipaddress.ip_address(host)
    except ValueError:
        return (f"{host}:{port}", parts.scheme) if _NAME.fullmatch(host) else ("", "")
    if ip.is_unspecified or "%" in host or needs_interface(host):
        return "", ""
    return (f"[{ip}]:{port}" if ip.version == 6 else f"{ip}:{port}"), parts.scheme


def _whole(value: object) -> int:
    return value if isinstance(value, int) and value > 0 else 0
