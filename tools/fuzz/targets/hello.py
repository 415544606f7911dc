"""Forged hellos, each in the name of another peer. A node keeps at most MAX_PEERS of them."""

from __future__ import annotations

import random
from collections import Counter

import grpc.aio

from exo_mesh import PROTOCOL_VERSION
from exo_mesh.mesh.membership.peers import MAX_PEERS
from exo_mesh.wire.gate import NAMESPACE_KEY
from exo_mesh.wire.proto import control_pb2 as pb
from tools.fuzz.calls import DEADLINE_S, many, stream_once
from tools.fuzz.mutate import TEXTS, mutated
from tools.fuzz.rig import Rig

COUNT, NUM_NODES, CLOSED = 20_000, 1, False
FLAGS = ("--discovery", "none")


async def attack(rig: Rig, rng: random.Random, count: int) -> Counter[str]:
    """Sends hellos. Four of five are well-formed; their addresses are closed ports of this machine."""
    most = 0
    async with grpc.aio.insecure_channel(rig.control) as channel:

        async def one(number: int) -> str:
            nonlocal most
            peer = pb.PeerInfo(
                id=rng.randbytes(16).hex(),
                incarnation=rng.randrange(2**50),
                name=rng.choice(TEXTS),
                version="0.1.0",
                protocol=PROTOCOL_VERSION,
                namespace=rig.namespace,
                addresses=[f"127.0.0.1:{rng.randrange(1, 1024)}"],
                models=[rng.choice(TEXTS) for _ in range(rng.randrange(20))],
            )
            data = pb.HelloRequest(peer=peer).SerializeToString()
            data = data if number % 5 else mutated(rng, data)
            metadata = ((NAMESPACE_KEY, rig.namespace),)
            code = await stream_once(channel, "/exo_mesh.Control/Hello", [data], DEADLINE_S, metadata)
            return code

        outcomes = await many(count, one)
    most = len(rig.api.get("/state", 10)["view"]["peers"])
    rig.notes.append(f"{most} peers in the view after the last hello, at most {MAX_PEERS} are kept")
    if most > MAX_PEERS + 1:
        outcomes["TOO MANY PEERS"] += most
    return outcomes
