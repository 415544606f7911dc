"""Two nodes of which one reaches the other at two addresses."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from exo_mesh.cli.client.child_node import free_port
from exo_mesh.node.node import Node
from tests.support.nodes import SLOW, Machine, knows_all, make_node, until
from tests.support.relays import SECOND, Relay


@dataclass
class TwoWays:
    """Two nodes. near reaches far at two addresses, and first uses the one through the relays."""

    near: Node
    far: Node
    control: Relay
    data: Relay


@asynccontextmanager
async def two_ways(tmp_path: Path, delay_s: float = 0.0) -> AsyncIterator[TwoWays]:
    port = free_port()
    far = make_node(tmp_path / "far", "far", Machine(), engine_options=SLOW, data_ports=(port, port))
    await far.start()
    control, data = Relay(far.grpc_port, delay_s), Relay(port, delay_s)
    async with control.plugged_in(), data.plugged_in():
        bootstrap = (f"{SECOND}:{far.grpc_port}",)
        near = make_node(tmp_path / "near", "near", Machine(), engine_options=SLOW, bootstrap_peers=bootstrap)
        await near.start()
        try:
            await until(lambda: knows_all(near, 2) and knows_all(far, 2))
            (peer,) = near.membership.peers
            await until(lambda: len(peer.addresses) == 2)
            if peer.client.address != bootstrap[0]:  # far was the first to say hello
                peer.use(peer.client.at(*bootstrap))
            yield TwoWays(near, far, control, data)
        finally:
            await asyncio.gather(near.stop(), far.stop())
