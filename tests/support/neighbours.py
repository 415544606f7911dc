"""As much of a membership as the callers of peers need: who is there, and calls to them and to this node."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import Any

from exo_mesh.mesh.membership.port import Calls
from exo_mesh.wire.peer_call import AnyAnswer


class Neighbours:
    """The node `own_id` and its peers, each with an id, a client and an info."""

    def __init__(
        self, own_id: str, answers: Iterable[AnyAnswer] = (), peers: Callable[[], Sequence[Any]] = tuple
    ) -> None:
        self.own = SimpleNamespace(id=own_id, name=own_id)
        self._peers = peers
        self.calls = Calls(own_id, self._client_of, lambda: answers)

    @property
    def peers(self) -> list[Any]:
        return list(self._peers())

    def _client_of(self, peer_id: str) -> Any:
        return next((peer.client for peer in self.peers if peer.id == peer_id), None)

    def is_alive(self, peer_id: str) -> bool:
        return peer_id == self.own.id or any(peer.id == peer_id for peer in self.peers)
