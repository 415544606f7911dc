"""Sends one question to all peers in parallel, and lists the peers that do not answer in time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from exo_mesh.errors import MeshError
from exo_mesh.mesh.membership.peers import Peer
from exo_mesh.mesh.membership.service import Membership

AT_ONCE = 16
MAX_ASKED = 128
"""Most peers that are asked at once; in a larger mesh, ask the other nodes one by one."""

_T = TypeVar("_T")


async def ask_peers(
    membership: Membership, question: Callable[[Peer], Awaitable[_T]]
) -> tuple[list[tuple[Peer, _T]], list[dict[str, str]]]:
    """Returns the answers, and [{"id", "name", "why"}] of the peers without one. question: has its own deadline."""
    turns = asyncio.Semaphore(AT_ONCE)

    async def ask(peer: Peer) -> tuple[Peer, _T] | MeshError:
        async with turns:
            try:
                return peer, await question(peer)
            except MeshError as exc:
                return exc

    peers = membership.peers
    answers = await asyncio.gather(*(ask(peer) for peer in peers[:MAX_ASKED]))
    unreachable = [
        {"id": peer.id, "name": peer.info.name, "why": str(answer)}
        for peer, answer in zip(peers, answers, strict=False)
        if isinstance(answer, MeshError)
    ]
    unreachable += [
        {"id": info.id, "name": info.name, "why": f"no answer for {gone_s:.0f} s"} for info, gone_s in membership.lost
    ]
    unreachable += [{"id": peer.id, "name": peer.info.name, "why": "not asked"} for peer in peers[MAX_ASKED:]]
    return [answer for answer in answers if not isinstance(answer, MeshError)], unreachable
