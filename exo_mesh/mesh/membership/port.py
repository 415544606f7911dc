"""The port through which a node calls other nodes. The membership knows this protocol and no network library.

The membership keeps a client for each peer, replaces the client when another address works better, and closes it when
the peer is gone. All packages make their calls to the peer through it.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Protocol

from exo_mesh.wire.peer_call import PeerCall, PeerStream, Q, R
from exo_mesh.wire.probes.asking import DatagramProbes


class ControlPort(Protocol):
    """The control endpoint of one peer, at one address.

    A new client does no I/O before its first call. It connects and reconnects by itself.

    Every call fails with a MeshError and nothing else:
    - TransportError: the peer cannot be reached, or the connection was closed during the call.
    - StrangerError, a kind of TransportError: the two nodes have different mesh secrets, if that can be determined.
    - DeadlineError: no answer before the deadline, which includes the time to connect.
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

    @property
    def datagrams(self) -> DatagramProbes | None:
        """Probes of the peer by datagrams; None if all are calls."""

    async def close(self) -> None:
        """Close the connection. Running calls may fail with TransportError. May be called again."""

    async def close_when_idle(self) -> None:
        """Close the connection after the last stream that outlives a verdict has ended, without ending any."""

    async def connects(self, timeout_s: float) -> bool:
        """Whether a process of this mesh accepts connections at the address. Calls nothing and raises no MeshError."""

    async def is_refused(self, timeout_s: float) -> bool:
        """Whether the machine refuses connections at the address, so that no process listens there. False if nothing
        answers; raises no MeshError."""

    async def call(self, row: PeerCall[Q, R], request: Q, timeout_s: float | None = None) -> R:
        """Make a call. timeout_s: the deadline of the row, if None."""

    def stream(self, row: PeerStream[Q, R], request: Q, *, quiet: bool = False) -> AsyncGenerator[R, None]:
        """The messages of a stream. quiet: over a connection with so few pings that half a minute may pass before its
        loss is noticed. The client is not idle meanwhile."""
