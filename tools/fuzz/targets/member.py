"""A hostile member of a closed mesh: malformed messages on its control and data ports, with its certificate."""

from __future__ import annotations

import datetime
import random
from collections import Counter

from exo_mesh.security.certificates import issue
from exo_mesh.wire.channels import open_channel
from exo_mesh.wire.gate import NAMESPACE_KEY
from exo_mesh.wire.proto import control_pb2 as pb
from exo_mesh.wire.proto import driver_pb2
from exo_mesh.wire.ring_link import FRAMES_METHOD
from tools.fuzz.calls import many, stream_once
from tools.fuzz.mutate import mutated, random_message
from tools.fuzz.rig import Rig

COUNT, NUM_NODES, CLOSED = 20_000, 1, True
FLAGS = ("--discovery", "none")
DEADLINE_S = 2.0

_SERVICE = pb.DESCRIPTOR.services_by_name["Control"]
LEFT_OUT = ("DescribeModel", "SelfTest")
"""Calls that are not sent, because each one that names an engine starts a child process."""


async def attack(rig: Rig, rng: random.Random, count: int) -> Counter[str]:
    """Sends the messages; nine of ten go to the control port."""
    credentials = issue(rig.secret, "mad", ["127.0.0.1"], datetime.datetime.now(datetime.UTC))
    control = open_channel(rig.control, credentials)
    data = open_channel(rig.instance()["stages"][-1]["endpoint"], credentials)
    methods = [method for method in _SERVICE.methods if method.name not in LEFT_OUT]

    async def one(number: int) -> str:
        if number % 10 == 0:
            name = rng.choice(("/exo_mesh.Driver/Generate", FRAMES_METHOD))
            messages = [mutated(rng, random_message(rng, driver_pb2.GenerateRequest).SerializeToString())]
            return await stream_once(data, name, messages, DEADLINE_S)
        method = rng.choice(methods)
        message = random_message(rng, getattr(pb, method.input_type.name)).SerializeToString()
        message = message if number % 3 else mutated(rng, message)
        path = f"/{_SERVICE.full_name}/{method.name}"
        return await stream_once(control, path, [message], DEADLINE_S, ((NAMESPACE_KEY, rig.namespace),))

    outcomes = await many(count, one)
    await control.close()
    await data.close()
    return outcomes
