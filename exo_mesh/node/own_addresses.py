"""Telling the mesh when the addresses of this machine change: cables, Wi-Fi, VPNs, leases."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace

from exo_mesh.membership.service import Membership
from exo_mesh.node import this_machine

LOOK_EVERY_S = 3.0

_log = logging.getLogger(__name__)


async def keep_addresses(membership: Membership, host: str, port: int) -> None:
    """Look every LOOK_EVERY_S, for ever; describe the node anew when its addresses have changed."""
    while True:
        await asyncio.sleep(LOOK_EVERY_S)
        now = this_machine.addresses(host, port)
        if now != membership.own.addresses:
            _log.info("the addresses of this node are %s now", ", ".join(now))
            membership.describe(replace(membership.own, addresses=now))
