"""The nodes that a command may ask: the user names the first, and that node reports the addresses of the others."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

from exo_mesh.cli.client.api_client import ApiClient
from exo_mesh.errors import MeshError

MAX_MEMBERS = 64
LEARN_DEADLINE_S = 2.0


class MeshNodes:
    """Keeps the node that a command asks, and switches to the next one when it fails. Several threads may use it."""

    def __init__(self, first: ApiClient) -> None:
        self._first = first
        self._clients = {first.url: first}
        self._names: dict[str, str] = {}
        self._current = first
        self._lock = threading.Lock()

    @property
    def client(self) -> ApiClient:
        """A client of the node that the command currently asks."""
        return self._current

    def __len__(self) -> int:
        return len(self._clients)

    def name_of(self, client: ApiClient) -> str:
        """The name of a node, or its address if its name is unknown."""
        return self._names.get(client.url) or client.url

    def learn(self) -> dict[str, Any]:
        """Ask the current node for `/state` and note the addresses of the other nodes. Returns the state, or {} if the
        node does not answer."""
        try:
            state: dict[str, Any] = self._current.get("/state", LEARN_DEADLINE_S)
        except MeshError:
            return {}
        self.note(state["view"]["peers"], state["health"])
        return state

    def learn_whether_loaded(self, model: str) -> bool:
        """Does what `learn` does, and returns whether an instance of the model is ready."""
        instances = self.learn().get("view", {}).get("instances", ())
        return any(one["model"] == model and one.get("state") == "ready" for one in instances)

    def note(self, peers: Iterable[Mapping[str, Any]], health: Mapping[str, Any]) -> None:
        """Replace the known nodes by the given live peers.

        Any machine can join an open mesh, so there only the node that the user named receives the key of
        EXO_MESH_API_KEY. All nodes of a closed mesh have its secret and accept its keys, so there all of them get it.
        With the local token of the named node, they get a session that this node makes from it. A node alone makes
        none: nobody would take it.
        """
        is_closed = health.get("mesh") == "closed"
        peers = list(peers)[:MAX_MEMBERS]
        if is_closed and sum(bool(peer.get("api_url")) for peer in peers) > 1:
            with suppress(MeshError):  # the node has just died, which the next call reports
                self._first.open_session()
        found: dict[str, tuple[str, ApiClient]] = {}
        for peer in peers:
            url = (peer.get("api_url") or "").rstrip("/")
            try:
                client = self._clients.get(url) or self._first.at(url, with_key=is_closed)
            except MeshError:
                continue  # the peer has no API, or its address is invalid
            found[client.url] = peer["name"], client
        with self._lock:
            self._names = {url: name for url, (name, _) in found.items()}
            kept = {self._first.url: self._first, self._current.url: self._current}
            self._clients = kept | {url: client for url, (_, client) in found.items()}

    def return_to_first(self) -> None:
        """Go back to the node that the user named: other nodes may not accept this caller's credentials."""
        with self._lock:
            self._current = self._first

    def leave(self, client: ApiClient) -> None:
        """Switch from this node to the next one; does nothing if another thread has already switched."""
        with self._lock:
            if self._current is not client:
                return
            urls = list(self._clients)
            self._current = self._clients[urls[(urls.index(client.url) + 1) % len(urls)]]
