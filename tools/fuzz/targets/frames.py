"""Ring/Frames on the data ports of an open mesh of two nodes: streams of a hello and a few frames each."""

from __future__ import annotations

import random
from collections import Counter

import grpc.aio
import numpy as np

from exo_mesh import PROTOCOL_VERSION
from exo_mesh.domain.frame import HIDDEN, Fault, Frame, Insert, RingHello, Row
from exo_mesh.domain.plan import Ballot
from exo_mesh.domain.tensor import Tensor
from exo_mesh.wire.codec import encode_frame, encode_hello
from exo_mesh.wire.ring_link import FRAMES_METHOD
from tools.fuzz.calls import many, stream_once
from tools.fuzz.mutate import mutated
from tools.fuzz.rig import Rig

COUNT, NUM_NODES, CLOSED = 20_000, 2, False
FLAGS = ("--discovery", "none")
MESSAGES_PER_STREAM = 5
DEADLINE_S = 0.5
"""A healthy stream stays open for ever, so it is cut after this time."""


def good_messages(ballot: Ballot, step: int) -> list[bytes]:
    """Returns a hello and a frame with rows, ops, a tensor and a fault."""
    hidden = Tensor.from_numpy(np.ones((2, 16), dtype=np.float32))
    frame = Frame(ballot, step, (Row(1, 0, 2, 1),), (5, 6), (Insert(1, 4),), {HIDDEN: hidden}, (Fault(9, 0, "x", "y"),))
    return list(encode_frame(frame))


async def attack(rig: Rig, rng: random.Random, count: int) -> Counter[str]:
    """Attacks the ring. Half of the streams have a hello of another ballot or a mutated one; the others are
    admitted."""
    instance = rig.instance()
    ballot = Ballot(*instance["ballot"])
    endpoints = [stage["endpoint"] for stage in instance["stages"]]
    channels = [grpc.aio.insecure_channel(endpoint) for endpoint in endpoints]

    async def one(number: int) -> str:
        stage = number % len(channels)
        believed = ballot if number % 4 else Ballot(ballot.counter + 1, "x" * 32)
        hello = RingHello(PROTOCOL_VERSION, 0, instance["id"], believed, (stage - 1) % len(channels))
        first = encode_hello(hello)
        messages = [first if number % 2 else first[:1] + mutated(rng, first[1:])]
        for step in range(1, MESSAGES_PER_STREAM):
            for message in good_messages(ballot, step):
                messages.append(message[:1] + mutated(rng, message[1:]) if rng.random() < 0.9 else message)
        return await stream_once(channels[stage], FRAMES_METHOD, messages, DEADLINE_S)

    outcomes = await many(count // MESSAGES_PER_STREAM, one)
    for channel in channels:
        await channel.close()
    return Counter({code: MESSAGES_PER_STREAM * number for code, number in outcomes.items()})
