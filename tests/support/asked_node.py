"""A node in a process of its own, as tests ask it: over its HTTP API."""

from __future__ import annotations

from typing import Any

import psutil

from exo_mesh.cli.client.api_client import ApiClient
from exo_mesh.cli.client.child_node import ChildNode, client_of


class AskedNode:
    """What every harness of real nodes offers: those of tests/support/peers.py, and of tools/faults behind a proxy."""

    ready: dict[str, Any]
    """What it said when it was ready: node_id, name, home, api_url, grpc_address."""

    @property
    def id(self) -> str:
        return str(self.ready["node_id"])

    @property
    def url(self) -> str:
        return str(self.ready["api_url"])

    @property
    def api(self) -> ApiClient:
        """A client with local rights."""
        return client_of(self.ready)

    def state(self) -> dict[str, Any]:
        """GET /state"""
        state: dict[str, Any] = self.api.get("/state")
        return state

    def instances(self) -> list[dict[str, Any]]:
        return list(self.state()["view"]["instances"])


def knows(node: AskedNode, ids: set[str], model: str) -> bool:
    """It knows exactly these peers, with their memory, and that each has the model."""
    state = node.state()
    peers = state["view"]["peers"]
    has_all = all(model in peer["models"] for peer in peers)
    return has_all and {peer["id"] for peer in peers} == ids == set(state["telemetry"])


def runner_processes(child: ChildNode) -> list[psutil.Process]:
    """The runners that a node has started and that still run."""
    try:
        found = psutil.Process(child.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []
    return [process for process in found if is_runner(process)]


def is_runner(process: psutil.Process) -> bool:
    try:
        return "exo_mesh.rings.runner" in process.cmdline() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False
