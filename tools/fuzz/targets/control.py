"""Every call of the control port of an open mesh, by three callers: a stranger, one with a stolen id, and a peer.

The peer has said hello and answers probes. None of them may stop, drain, read or empty a node; ending the work of
others takes at least the peer.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from exo_mesh import PROTOCOL_VERSION
from exo_mesh.wire.gate import NAMESPACE_KEY
from exo_mesh.wire.proto import control_pb2 as pb
from tools.fuzz.calls import stream_once
from tools.fuzz.mutate import random_message
from tools.fuzz.rig import MODEL, Rig

COUNT, NUM_NODES, CLOSED = 600, 2, False
FLAGS = ("--discovery", "none")
MAX_NODE_SHARE = 1.5
DEADLINE_S = 5.0

SERVICE = pb.DESCRIPTOR.services_by_name["Control"]
OWNER_ONLY = (
    "StopNode",
    "Drain",
    "Capture",
    "ReadLog",
    "ReadTraces",
    "DeleteTraces",
    "DropModel",
    "DeleteCard",
    "Wake",
)
PEER_ONLY = ("DeleteInstance", "KeepInstance", "Cancel")
LEFT_OUT = ("SelfTest", "DescribeModel")
"""Calls that are not sent, because each one that names an engine starts a child process."""
UNHARMFUL = ("Goodbye", "Release", "Reserve", "Commit", "Link", "Exchange", "Probe")
"""Calls whose well-formed message in the name of the other node may change what a ring does; they are sent as drawn."""

ROLES = ("stranger", "forged", "peer")
REFUSED = ("PERMISSION_DENIED", "UNAUTHENTICATED", "UNIMPLEMENTED", "FAILED_PRECONDITION", "INVALID_ARGUMENT")
PEER_ID = "f" * 32


@contextmanager
def prepared(directory: Path, seed: int, numbers: Sequence[int]) -> Iterator[dict[str, str]]:
    yield {}


def ids_of(rig: Rig) -> tuple[str, str]:
    """Returns the ids of both nodes."""
    return rig.nodes[0].id, rig.nodes[1].id


def effective(rig: Rig) -> Mapping[str, Any]:
    """Returns for each restricted call a message that has an effect where it is obeyed."""
    own, _ = ids_of(rig)
    return {
        "StopNode": pb.StopNodeRequest(node_id=own),
        "Drain": pb.DrainRequest(on=True, node_id=own),
        "ReadLog": pb.ReadLogRequest(records=5),
        "DeleteTraces": pb.DeleteTracesRequest(all=True),
        "DropModel": pb.DropModelRequest(model="nobody/nothing", files=True),
        "DeleteCard": pb.DeleteCardRequest(model="nobody/nothing"),
        "Wake": pb.WakeRequest(peer_id=own, macs=["02:00:00:00:00:01"]),
        "DeleteInstance": pb.DeleteInstanceRequest(instance_id=f"{MODEL}-1"),
        "KeepInstance": pb.KeepInstanceRequest(instance_id=f"{MODEL}-1", idle_s=0.01),
        "Cancel": pb.CancelRequest(request_id="req_1", instance_id=f"{MODEL}-1"),
    }


def case(rig: Rig, number: int) -> tuple[str, str, bytes]:
    """Returns a role, a call, and its message: one that has an effect, or a drawn one that names a real node."""
    rng = random.Random(f"{rig.seed}/{number}")
    known = effective(rig)
    methods = [one for one in SERVICE.methods if one.name not in LEFT_OUT]
    method = methods[number % len(methods)]
    role = ROLES[number // len(methods) % len(ROLES)]
    if method.name in known and rng.random() < 0.7:
        return role, method.name, known[method.name].SerializeToString()
    message = random_message(rng, getattr(pb, method.input_type.name))
    for field in ("from_peer", "peer_id"):
        if role == "forged" and method.name not in UNHARMFUL and field in method.input_type.fields_by_name:
            setattr(message, field, ids_of(rig)[1])
    return role, method.name, message.SerializeToString()


class _Answering(grpc.GenericRpcHandler):
    """The peer's own control port: it answers hellos and probes, and knows no other call."""

    def __init__(self, info: pb.PeerInfo) -> None:
        replies = {
            "Hello": pb.HelloReply(accepted=True, peer=info),
            "Probe": pb.ProbeReply(peer_id=info.id, incarnation=info.incarnation),
            "Exchange": pb.ExchangeReply(),
        }
        self._replies = {f"/{SERVICE.full_name}/{name}": one.SerializeToString() for name, one in replies.items()}

    def service(self, handler_call_details: Any) -> Any:
        reply = self._replies.get(handler_call_details.method)
        if reply is None:
            return None

        async def answer(request: bytes, context: Any) -> bytes:
            return reply

        return grpc.unary_unary_rpc_method_handler(answer)


@asynccontextmanager
async def admitted(rig: Rig, channel: grpc.aio.Channel) -> AsyncIterator[None]:
    """A peer that has said a real hello, and whose port answers the hello of the node and its probes."""
    server = grpc.aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    info = pb.PeerInfo(
        id=PEER_ID, incarnation=1, name="fuzz", version="0.1.0", protocol=PROTOCOL_VERSION, namespace=rig.namespace,
        addresses=[f"127.0.0.1:{port}"],
    )  # fmt: skip
    server.add_generic_rpc_handlers((_Answering(info),))
    await server.start()
    try:
        hello = pb.HelloRequest(peer=info).SerializeToString()
        await stream_once(channel, f"/{SERVICE.full_name}/Hello", [hello], DEADLINE_S, _metadata(rig, "peer"))
        yield
    finally:
        await server.stop(0)


def _metadata(rig: Rig, role: str) -> tuple[tuple[str, str], ...]:
    claimed = {"stranger": "", "forged": ids_of(rig)[1], "peer": PEER_ID}[role]
    proof = (("exo-mesh-proof", f"{claimed}:{'0' * 32}"),) if claimed else ()
    return ((NAMESPACE_KEY, rig.namespace), *proof)


async def attack(rig: Rig, rng: random.Random, count: int) -> Counter[str]:
    """Makes the calls of each role, the peer's last: a peer on this machine may speak for it."""
    outcomes: Counter[str] = Counter()
    cases = [case(rig, number) for number in range(rig.first, rig.first + count)]
    async with grpc.aio.insecure_channel(rig.control) as channel:
        for role in ROLES[:2]:
            outcomes += await _calls(rig, channel, [one for one in cases if one[0] == role])
        async with admitted(rig, channel):
            outcomes += await _calls(rig, channel, [one for one in cases if one[0] == "peer"])
    _judge(rig)
    return outcomes


async def _calls(rig: Rig, channel: grpc.aio.Channel, cases: Sequence[tuple[str, str, bytes]]) -> Counter[str]:
    outcomes: Counter[str] = Counter()
    obeyed: Counter[str] = Counter()
    last = "the start"
    for role, name, message in cases:
        status = await stream_once(channel, f"/{SERVICE.full_name}/{name}", [message], DEADLINE_S, _metadata(rig, role))
        outcomes[status] += 1
        if status == "UNAVAILABLE" or not rig.nodes[0].alive:
            rig.harm.append(f"a node is gone after {last}")
            break
        last = f"{name} of a {role}"
        if (name in OWNER_ONLY or (name in PEER_ONLY and role != "peer")) and status not in REFUSED:
            obeyed[f"{name} of a {role}: {status}"] += 1
    rig.harm += [f"{what}, {number} times" for what, number in obeyed.items()]
    return outcomes


def _judge(rig: Rig) -> None:
    """Notes what the calls have changed."""
    if not rig.nodes[0].alive:
        return
    if any(rig.api_of(index).get("/drain").get("draining") for index in (0, 1)):
        rig.harm.append("a node drains")
        rig.api.delete("/drain")
    if not any(one["id"] == f"{MODEL}-1" for one in rig.api.get("/state")["view"]["instances"]):
        rig.notes.append("the instance is gone: placed again")
        rig.instance()
