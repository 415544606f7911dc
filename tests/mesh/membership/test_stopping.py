"""A node that stops or restarts already is not restarted again; a stop wins."""

from __future__ import annotations

import pytest

from exo_mesh.errors import StopPendingError, UnknownPeerError, error_from_code
from exo_mesh.mesh.membership.stopping import StopDesk
from tests.mesh.membership.meshes import Peer, peer_info


def desk() -> StopDesk:
    return Peer(peer_info("a")).membership.stops


@pytest.mark.parametrize("first", [True, False])
async def test_a_restart_of_a_node_that_stops_is_refused(first: bool) -> None:
    stops = desk()
    assert await stops.tell("", restart=first) == "a"
    with pytest.raises(StopPendingError, match="already"):
        await stops.tell("name-a", restart=True)
    assert stops.wants_restart is first
    assert isinstance(error_from_code("stop_pending", "x"), StopPendingError), "also from another peer"


async def test_a_stop_is_accepted_again_and_during_a_restart() -> None:
    stops = desk()
    await stops.tell("a", restart=True)
    await stops.tell("a", restart=False)
    await stops.tell("a", restart=False)
    assert stops.asked.is_set() and not stops.wants_restart
    with pytest.raises(UnknownPeerError):
        await stops.tell("nobody", restart=False)
