"""Driver/Generate and Driver/Recall on the data port of an open mesh."""

from __future__ import annotations

import random
from collections import Counter

import grpc.aio

from exo_mesh.wire.proto import driver_pb2 as pb
from tools.fuzz.calls import DEADLINE_S, many, stream_once
from tools.fuzz.mutate import mutated, random_message
from tools.fuzz.rig import Rig

COUNT, NUM_NODES, CLOSED = 20_000, 1, False
FLAGS = ("--discovery", "none")


def good_request(rig: Rig) -> pb.GenerateRequest:
    """Returns a request that the driver answers."""
    instance = rig.instance()
    counter, proposer = instance["ballot"]
    return pb.GenerateRequest(
        instance_id=instance["id"],
        ballot={"counter": counter, "proposer": proposer},
        request_id="fuzz",
        prompt_ids=[1, 2, 3],
        max_tokens=3,
        sampling=pb.Sampling(top_p=1.0, repetition_penalty=1.0),
    )


async def attack(rig: Rig, rng: random.Random, count: int) -> Counter[str]:
    """Sends mutations of a good request, and senseless requests with the right ballot."""
    good = good_request(rig)
    endpoint = rig.instance()["stages"][-1]["endpoint"]
    async with grpc.aio.insecure_channel(endpoint) as channel:

        async def one(number: int) -> str:
            if number % 20 == 0:
                return await stream_once(channel, "/exo_mesh.Driver/Recall", [rng.randbytes(34)], DEADLINE_S)
            request = good
            if number % 2:
                request = random_message(rng, pb.GenerateRequest)
                request.instance_id = good.instance_id
                request.ballot.CopyFrom(good.ballot)
                request.max_tokens %= 8
            request.request_id = f"fuzz-{number}"
            data = request.SerializeToString()
            data = data if number % 4 == 1 else mutated(rng, data)
            return await stream_once(channel, "/exo_mesh.Driver/Generate", [data], DEADLINE_S)

        return await many(count, one)
