"""As much of a membership as the callers of peers need: who is there, and calls to them and to this node."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import Any

from exo_mesh.mesh.membership.calling import Calls
from exo_mesh.wire.peer_call import AnyAnswer


class Neighbours:
    """The node `own_id` and its peers, each with an id, a client and an info."""

    def __init__(
        self, own_id: str, answers: Iterable[AnyAnswer] = (), peers: Callable[[], Sequence[Any]] = tuple
    ) -> None:
        self.own = SimpleNamespace(id=own_id, name=own_id)
        self._peers = peers
        roster: Any = _Roster(self)
        self.calls = Calls(roster, lambda: answers)

    @property
    def peers(self) -> list[Any]:
        return list(self._peers())

    def is_alive(self, peer_id: str) -> bool:
        return peer_id == self.own.id or any(peer.id == peer_id for peer in self.peers)


class _Roster:
    def __init__(self, neighbours: Neighbours) -> None:
        self.own = neighbours.own
        self._neighbours = neighbours

    @property
    def peers(self) -> dict[str, Any]:
        return {peer.id: peer for peer in self._neighbours.peers}
