"""The calls of the membership, and those to a node as a whole: one row each, this node's answers, and the function that
callers use.

What a newer version adds to news is ignored. In records and readings it is passed on.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

from exo_mesh.base.clock import monotonic
from exo_mesh.domain.addresses import valid_macs
from exo_mesh.domain.device import PeerInfo
from exo_mesh.errors import TransportError
from exo_mesh.mesh.membership.fences import Fence
from exo_mesh.mesh.membership.known_peers import MAX_KNOWN_ADDRESSES
from exo_mesh.mesh.membership.messages import (
    ExchangeReply,
    ExchangeRequest,
    HelloReply,
    HelloRequest,
    ProbeReply,
    ProbeRequest,
)
from exo_mesh.mesh.membership.port import Calls, ControlPort, require_own
from exo_mesh.security.key_table import ApiKey
from exo_mesh.wire.call_access import ANYBODY, CONFIRM_S, SECRET, OwnCalls, host_of_peer, owner
from exo_mesh.wire.incoming import MAX_BYTES, STRANGER_BYTES
from exo_mesh.wire.key_codec import keys_from_proto, keys_to_proto
from exo_mesh.wire.message_codec import Codec
from exo_mesh.wire.peer_call import CALL_S, PeerCall
from exo_mesh.wire.proto import control_pb2 as pb

GOODBYE_S = 0.5
WAKE_S = 2.0
SHARE_S = 1.5

REACH_S = 2.0
"""How long a peer may take to report whether it reaches another peer; its own probe takes less than a second."""

HELLO = PeerCall(
    "Hello", pb.HelloRequest, pb.HelloReply, ANYBODY, deadline_s=CALL_S, reply_bytes=STRANGER_BYTES, takes_unknown=True
)
PROBE = PeerCall(
    "Probe", pb.ProbeRequest, pb.ProbeReply, ANYBODY, deadline_s=CALL_S, peer_bytes=MAX_BYTES, takes_unknown=True
)
INDIRECT_PROBE = PeerCall(
    "IndirectProbe", pb.IndirectProbeRequest, pb.IndirectProbeReply, ANYBODY, deadline_s=CALL_S, takes_unknown=True
)
EXCHANGE = PeerCall(
    "Exchange",
    pb.ExchangeRequest,
    pb.ExchangeReply,
    ANYBODY,
    deadline_s=CALL_S,
    peer_bytes=MAX_BYTES,
    takes_unknown=True,
)
GOODBYE = PeerCall("Goodbye", pb.GoodbyeRequest, pb.GoodbyeReply, ANYBODY, deadline_s=GOODBYE_S, takes_unknown=True)
CONFIRM = PeerCall("Confirm", pb.ConfirmRequest, pb.ConfirmReply, ANYBODY, deadline_s=CONFIRM_S)
STOP_NODE = PeerCall(
    "StopNode",
    pb.StopNodeRequest,
    pb.StopNodeReply,
    owner("exo-mesh node stop` or `exo-mesh node restart"),
    deadline_s=CALL_S,
)
WAKE = PeerCall("Wake", pb.WakeRequest, pb.WakeReply, owner("exo-mesh wake PEER"), deadline_s=WAKE_S)
SHARE_KEYS = PeerCall(
    "ShareKeys", pb.ShareKeysRequest, pb.ShareKeysReply, SECRET, deadline_s=SHARE_S, takes_unknown=True
)


HELLO_REQUEST = Codec(HelloRequest, pb.HelloRequest, error=TransportError)
HELLO_REPLY = Codec(HelloReply, pb.HelloReply, error=TransportError)
PROBE_REQUEST = Codec(ProbeRequest, pb.ProbeRequest)
PROBE_REPLY = Codec(ProbeReply, pb.ProbeReply)
EXCHANGE_REQUEST = Codec(ExchangeRequest, pb.ExchangeRequest)
EXCHANGE_REPLY = Codec(ExchangeReply, pb.ExchangeReply)
FENCE = Codec(Fence, pb.Fence)

fence_to_proto, fence_from_proto = FENCE.write, FENCE.read


async def answer_hello(
    admit: Callable[[HelloRequest, str], Awaitable[HelloReply]], request: pb.HelloRequest, caller: str
) -> pb.HelloReply:
    """admit: see Admission.answer_hello. caller: gRPC's name of the caller."""
    return HELLO_REPLY.write(await admit(HELLO_REQUEST.read(request), host_of_peer(caller)))


async def hello(client: ControlPort, request: HelloRequest, timeout_s: float) -> HelloReply:
    """Introduce this node to another one."""
    return HELLO_REPLY.read(await client.call(HELLO, HELLO_REQUEST.write(request), timeout_s))


async def answer_probe(reply: Callable[[ProbeRequest], ProbeReply], request: pb.ProbeRequest) -> pb.ProbeReply:
    """reply: see Probing.answer."""
    return PROBE_REPLY.write(reply(PROBE_REQUEST.read(request)))


def answer_datagram(
    reply: Callable[[ProbeRequest, str], tuple[ProbeReply | None, bool]], request: pb.ProbeRequest, host: str
) -> tuple[pb.ProbeReply | None, bool]:
    """reply: see Probing.answer_datagram."""
    found, is_known = reply(PROBE_REQUEST.read(request), host)
    return None if found is None else PROBE_REPLY.write(found), is_known


async def probe(client: ControlPort, request: ProbeRequest, timeout_s: float, *, by_call: bool) -> ProbeReply:
    """Send a probe by a datagram or, if that does not work, by a call. by_call: the answer must show that calls reach
    the peer, so a datagram does not do."""
    message, began, datagrams = PROBE_REQUEST.write(request), monotonic(), client.datagrams
    heard = None if by_call or datagrams is None else await datagrams.ask(message)
    if heard is None:
        heard = await client.call(PROBE, message, max(0.0, timeout_s - (monotonic() - began)))
        if datagrams is not None:
            datagrams.called(heard)
    return PROBE_REPLY.read(heard)


async def answer_exchange(
    reply: Callable[[ExchangeRequest], ExchangeReply], request: pb.ExchangeRequest
) -> pb.ExchangeReply:
    """reply: see Exchange.answer."""
    return EXCHANGE_REPLY.write(reply(EXCHANGE_REQUEST.read(request)))


async def exchange(client: ControlPort, request: ExchangeRequest, timeout_s: float) -> ExchangeReply:
    """Make one call of an anti-entropy round."""
    return EXCHANGE_REPLY.read(await client.call(EXCHANGE, EXCHANGE_REQUEST.write(request), timeout_s))


async def goodbye(client: ControlPort, own: PeerInfo, *, asleep: bool = False) -> None:
    """Notify a peer that this node leaves on purpose, or that its machine is about to sleep."""
    await client.call(GOODBYE, pb.GoodbyeRequest(peer_id=own.id, incarnation=own.incarnation, asleep=asleep))


async def answer_goodbye(leaves: Callable[[str, int, bool], None], request: pb.GoodbyeRequest) -> pb.GoodbyeReply:
    """leaves: see Membership.peer_leaves."""
    leaves(request.peer_id, request.incarnation, request.asleep)
    return pb.GoodbyeReply()


class Reach(NamedTuple):
    """Whether a node reaches a peer. refused: the peer's machine answers that nothing listens at its addresses."""

    reached: bool = False
    refused: bool = False


async def answer_indirect_probe(
    probe: Callable[[str, int], Awaitable[Reach]], request: pb.IndirectProbeRequest
) -> pb.IndirectProbeReply:
    """probe: see Probing.answer_indirect."""
    found = await probe(request.target, request.incarnation)
    return pb.IndirectProbeReply(reached=found.reached, refused=found.refused)


async def indirect_probe(client: ControlPort, own_id: str, target: PeerInfo, timeout_s: float) -> Reach:
    """Let a peer probe another one for this node."""
    request = pb.IndirectProbeRequest(from_peer=own_id, target=target.id, incarnation=target.incarnation)
    reply = await client.call(INDIRECT_PROBE, request, timeout_s)
    return Reach(reply.reached, reply.refused)


async def reaches(calls: Calls, from_id: str, target: str, incarnation: int) -> bool:
    """Whether a node gets an answer from another one now."""
    request = pb.IndirectProbeRequest(from_peer=calls.own_id, target=target, incarnation=incarnation)
    return (await calls.call(from_id, INDIRECT_PROBE, request, REACH_S)).reached


async def answer_confirm(own_calls: OwnCalls, request: pb.ConfirmRequest) -> pb.ConfirmReply:
    return pb.ConfirmReply(is_mine=own_calls.confirm(request.proof))


async def confirm(calls: Calls, peer_id: str, proof: str) -> bool:
    """Whether a peer makes the call with this proof."""
    return (await calls.call(peer_id, CONFIRM, pb.ConfirmRequest(proof=proof))).is_mine


async def answer_stop_node(own: PeerInfo, ask: Callable[[bool], None], request: pb.StopNodeRequest) -> pb.StopNodeReply:
    """ask: see StopDesk."""
    require_own(own, request.node_id)
    ask(request.restart)
    return pb.StopNodeReply()


async def stop_node(calls: Calls, peer_id: str, *, restart: bool) -> None:
    """Stop or restart a node; returns once it has acknowledged."""
    await calls.call(peer_id, STOP_NODE, pb.StopNodeRequest(restart=restart, node_id=peer_id))


async def answer_wake(
    send_packets: Callable[[str, Sequence[str], Sequence[str]], int], request: pb.WakeRequest
) -> pb.WakeReply:
    """send_packets: see SleepDesk."""
    macs, addresses = valid_macs(request.macs), request.addresses[:MAX_KNOWN_ADDRESSES]
    return pb.WakeReply(num_networks=send_packets(request.peer_id, macs, addresses))


async def wake(calls: Calls, peer_id: str, sleeper: str, macs: Sequence[str], addresses: Sequence[str]) -> int:
    """Let a node send Wake-on-LAN packets for another machine, the `sleeper`. Returns the number of networks in which
    it did."""
    request = pb.WakeRequest(peer_id=sleeper, macs=macs, addresses=addresses)
    return (await calls.call(peer_id, WAKE, request)).num_networks


async def answer_share_keys(
    compare: Callable[[int, Sequence[ApiKey] | None], Awaitable[tuple[int, list[ApiKey]]]], request: pb.ShareKeysRequest
) -> pb.ShareKeysReply:
    """compare: see KeySharing."""
    digest, shown = await compare(request.digest, keys_from_proto(request.keys) if request.keys else None)
    return pb.ShareKeysReply(digest=digest, keys=keys_to_proto(shown))


async def share_keys(calls: Calls, peer_id: str, digest: int, keys: Sequence[ApiKey] = ()) -> tuple[int, list[ApiKey]]:
    """Send a peer API keys or, without keys, ask for those that it holds if its digest differs. Returns the digest and
    the keys of its answer."""
    request = pb.ShareKeysRequest(digest=digest, keys=keys_to_proto(keys))
    reply = await calls.call(peer_id, SHARE_KEYS, request)
    return reply.digest, keys_from_proto(reply.keys)
