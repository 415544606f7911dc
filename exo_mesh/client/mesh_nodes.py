"""The nodes of a mesh that a command may ask: the first was named, and that one tells the addresses of the others."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from typing import Any

from exo_mesh.client.api_client import ApiClient
from exo_mesh.errors import MeshError

MAX_MEMBERS = 64
LEARN_DEADLINE_S = 2.0


class MeshNodes:
    """Knows which node is asked now, and whom to ask next. Several threads may use it."""

    def __init__(self, first: ApiClient) -> None:
        self._first = first
        self._clients = {first.url: first}
        self._names: dict[str, str] = {}
        self._current = first
        self._lock = threading.Lock()

    @property
    def client(self) -> ApiClient:
        """The node that is asked now."""
        return self._current

    def __len__(self) -> int:
        return len(self._clients)

    def name_of(self, client: ApiClient) -> str:
        """The name of a node, or its address where nobody has told its name."""
        return self._names.get(client.url) or client.url

    def learn(self) -> dict[str, Any]:
        """Ask the node for the addresses of the others. What it answers to `/state`; {} if it does not answer."""
        try:
            state: dict[str, Any] = self._current.get("/state", LEARN_DEADLINE_S)
        except MeshError:
            return {}
        self.note(state["view"]["peers"], state["health"])
        return state

    def learn_whether_loaded(self, model: str) -> bool:
        """`learn`, and whether an instance of the model serves now."""
        instances = self.learn().get("view", {}).get("instances", ())
        return any(one["model"] == model and one.get("state") == "ready" for one in instances)

    def note(self, peers: Iterable[Mapping[str, Any]], health: Mapping[str, Any]) -> None:
        """Take the addresses of live peers.

        Any machine can join an open mesh, so the key of EXO_MESH_API_KEY is shown there only to the node that the user
        named. MeshNodes of a closed mesh have its secret, and its keys hold at each of them.
        """
        found: dict[str, tuple[str, ApiClient]] = {}
        for peer in list(peers)[:MAX_MEMBERS]:
            url = (peer.get("api_url") or "").rstrip("/")
            try:
                client = self._clients.get(url) or self._first.at(url, with_key=health.get("mesh") == "closed")
            except MeshError:
                continue  # a peer without an API, or with an address that is none
            found[client.url] = peer["name"], client
        with self._lock:
            self._names = {url: name for url, (name, _) in found.items()}
            kept = {self._first.url: self._first, self._current.url: self._current}
            self._clients = kept | {url: client for url, (_, client) in found.items()}

    def return_to_first(self) -> None:
        """Ask the node that was named again: another one does not know this caller."""
        with self._lock:
            self._current = self._first

    def leave(self, client: ApiClient) -> None:
        """Turn to the member after this one; does nothing if somebody else has turned already."""
        with self._lock:
            if self._current is not client:
                return
            urls = list(self._clients)
            self._current = self._clients[urls[(urls.index(client.url) + 1) % len(urls)]]
