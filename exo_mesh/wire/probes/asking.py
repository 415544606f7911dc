"""Probes one address of a peer by datagrams while that works; the caller makes a call otherwise."""

from __future__ import annotations

from exo_mesh.base.clock import Clock, monotonic
from exo_mesh.wire.probes.messages import fits
from exo_mesh.wire.probes.port import ProbePort
from exo_mesh.wire.probes.turns import ANSWER_S, DatagramTurns
from exo_mesh.wire.proto import control_pb2 as pb


class DatagramProbes:
    """The probes by datagram of the peer at "host:port", sent through `port`."""

    def __init__(self, address: str, port: ProbePort, clock: Clock = monotonic) -> None:
        self.port = port
        self._address = address
        self._clock = clock
        self._turns = DatagramTurns()

    async def ask(self, request: pb.ProbeRequest) -> pb.ProbeReply | None:
        """The peer's reply to a probe by datagram. None if the peer must be called: it did not answer within ANSWER_S,
        it wants a call, or datagrams cannot be used now."""
        if not (self._turns.may_ask(self._clock()) and fits(request) and self.port.can_ask(self._address)):
            return None
        answer = await self.port.ask(self._address, request, self._turns.incarnation, ANSWER_S)
        if answer is None:
            self._turns.missed(self._clock())
            return None
        self._turns.answered()
        return answer.reply

    def called(self, reply: pb.ProbeReply) -> None:
        """Record the reply to a probe that was a call."""
        self._turns.called(reply.incarnation, takes_datagrams=reply.takes_datagrams)

    def call_failed(self) -> None:
        """Record that the peer did not answer a call: the next probe is a call."""
        self._turns.call_failed()
