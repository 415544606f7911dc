"""The port through which a node calls other nodes. The membership knows these protocols and no network library.

`ControlPort` has the calls that the membership makes. `PeerClient` adds the calls that other packages make to a peer.
Both use one connection: the membership keeps a client for each peer, replaces the client when another address works
better, and closes it when the peer is gone.

Two classes implement `PeerClient`. `exo_mesh.wire.control_client.ControlClient` calls over gRPC; a node passes it
to its membership (`exo_mesh/node/node.py`). `tools.simulate.network.SimClient` calls through memory, on a fake clock.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Protocol

from exo_mesh.wire.peer_call import PeerCall, PeerStream, Q, R
from exo_mesh.wire.proto import control_pb2 as pb
from exo_mesh.wire.proto import paths_pb2


class ControlPort(Protocol):
    """The control endpoint of one peer, at one address.

    A new client does no I/O before its first call. It connects and reconnects by itself.

    Every call fails with a MeshError and nothing else:
    - TransportError: the peer cannot be reached, or the connection was closed during the call.
    - StrangerError, a kind of TransportError: the two nodes have different mesh secrets, if that can be determined.
    - DeadlineError: no answer within `timeout_s`, which includes the time to connect.
    - any other MeshError: the peer's own refusal.
    Cancelling the task of the caller ends the call and raises CancelledError.
    """

    address: str
    """ "host:port"."""

    def at(self, address: str) -> ControlPort:
        """A new client with the same credentials and another address. The caller of `at` closes it."""

    @property
    def is_idle(self) -> bool:
        """True while no call and no stream is running."""

    async def close(self) -> None:
        """Close the connection. Running calls may fail with TransportError. May be called again."""

    async def close_when_idle(self) -> None:
        """Close the connection after the last stream of stage reports has ended, without ending any."""

    async def call(self, row: PeerCall[Q, R], request: Q, timeout_s: float | None = None) -> R:
        """Make a call. timeout_s: the deadline of the row, if None."""

    def stream(self, row: PeerStream[Q, R], request: Q, *, quiet: bool = False) -> AsyncGenerator[R, None]:
        """The messages of a stream. quiet: over a connection with so few pings that half a minute may pass before its
        loss is noticed."""

    async def hello(self, request: pb.HelloRequest, timeout_s: float) -> pb.HelloReply:
        """Introduce this node. The reply says whether the peer admits it, and if not, why."""

    async def probe(self, request: pb.ProbeRequest, timeout_s: float, *, by_call: bool = False) -> pb.ProbeReply:
        """Ask whether the peer is alive; both sides add news. by_call: the answer must show that calls reach the peer,
        so a datagram does not do."""

    async def is_refused(self, timeout_s: float) -> bool:
        """Whether the machine refuses connections at the address, so that no process listens there. False if nothing
        answers; raises no MeshError."""

    async def indirect_probe(self, request: pb.IndirectProbeRequest, timeout_s: float) -> pb.IndirectProbeReply:
        """Ask the peer to probe a third peer."""

    async def exchange(self, request: pb.ExchangeRequest, timeout_s: float) -> pb.ExchangeReply:
        """One call of an anti-entropy round."""

    async def goodbye(self, request: pb.GoodbyeRequest, timeout_s: float) -> None:
        """Notify the peer that this node leaves on purpose."""

    async def confirm(self, proof: str, timeout_s: float) -> bool:
        """Ask the peer whether it makes the call with this proof."""

    async def probe_path(self, reply_bytes: int, timeout_s: float) -> paths_pb2.PathProbeReply:
        """Measure the path to the peer. The reply has the id of the peer and `reply_bytes` bytes, but at most
        domain.addresses.MAX_PROBE_BYTES."""


class PeerClient(ControlPort, Protocol):
    """All calls to one peer. The membership does not make the calls that this class adds.

    They fail like the calls of ControlPort. Each has its own deadline, except calls with `timeout_s`, and `commit`,
    which has none.
    """

    def at(self, address: str) -> PeerClient:
        """See ControlPort.at."""

    async def connects(self, timeout_s: float) -> bool:
        """Whether a process of this mesh accepts connections at the address. Calls nothing and raises no MeshError."""

    async def stop_node(self, node_id: str, *, restart: bool) -> None:
        """Stop or restart the peer; returns once it has acknowledged. MeshError if the peer is not `node_id`."""

    async def wake(self, request: pb.WakeRequest, timeout_s: float) -> int:
        """Ask the peer to send Wake-on-LAN packets for another machine. Returns the number of networks in which it
        did."""

    async def share_keys(self, request: pb.ShareKeysRequest, timeout_s: float) -> pb.ShareKeysReply:
        """Send the peer API keys, or ask for the keys that it holds."""
