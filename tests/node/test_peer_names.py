"""Every call that takes a peer finds it by the same rule: id, name, or at least 4 digits of an id."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from exo_mesh.errors import InputError, UnknownPeerError
from exo_mesh.node.node import Node
from exo_mesh.rings.placing.spec import InstanceSpec
from tests.support.nodes import MODEL, mesh, until

CALLS: dict[str, Callable[[Node, str], Awaitable[Any]]] = {
    "drain": lambda node, peer: node.peers.drain(peer, on=False),
    "log": lambda node, peer: node.peers.log(peer, 3),
    "wake": lambda node, peer: node.peers.sleeps.wake(peer),
    "diagnostics": lambda node, peer: node.inspection.diagnostics.of(peer),
    "capture": lambda node, peer: node.inspection.capture(peer, "no-such-runner"),
    "cancel of a runner": lambda node, peer: node.inspection.cancel_runner(peer, "no-such-runner"),
    "cancel of a download": lambda node, peer: node.models.cancel_download(peer, "m"),
    "deletion of files": lambda node, peer: node.models.delete("m", peers=[peer]),
    "preview": lambda node, peer: node.instances.preview(InstanceSpec(MODEL, exclude_peers=(peer,))),
}


async def test_every_call_names_a_peer_in_the_same_ways(tmp_path: Path) -> None:
    async with mesh(tmp_path, 2, open_admin=True) as (asked, other):
        for call, ask in CALLS.items():
            for text in (other.node_id, "n1", other.node_id[:4]):
                await ask(asked, text)
            with pytest.raises(UnknownPeerError, match=r'no peer is called "nobody"; known peers: "n') as caught:
                await ask(asked, "nobody")
            assert caught.value.code == "not_found", call
        other.membership.describe(replace(other.membership.own, name="n0"))
        await until(lambda: all(peer.name == "n0" for peer in asked.membership.view.peers()))
        await until(lambda: all(peer.name == "n0" for peer in asked.membership.everybody))
        for call, ask in CALLS.items():
            if call == "wake":  # both nodes run on this machine, so they may be woken alike
                continue
            with pytest.raises(InputError, match='2 peers are called "n0": use an id') as ambiguous:
                await ask(asked, "n0")
            assert not isinstance(ambiguous.value, UnknownPeerError), call
        with pytest.raises(InputError, match='2 peers are called "n0": use an id'):
            await asked.peers.stops.tell("n0", restart=False)
        assert not asked.peers.stops.asked.is_set()
