"""Sends and answers probe datagrams, on the UDP port that has the number of the control port."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from ipaddress import ip_address

from exo_mesh.domain.addresses import split
from exo_mesh.errors import MeshError, TransportError
from exo_mesh.security.datagrams import RefusedDatagrams
from exo_mesh.security.probe_seal import ProbeSeal, seal_with
from exo_mesh.wire.probes.messages import (
    MAX_DATAGRAM_BYTES,
    ProbeAnswer,
    ProbeQuestion,
    decode,
    encode_answer,
    encode_question,
    new_token,
)
from exo_mesh.wire.probes.udp_socket import Address, UdpSocket, listening
from exo_mesh.wire.proto import control_pb2 as pb

MAX_WAITING = 64
"""Most questions that wait for an answer; a node has a few at a time."""

Answerer = Callable[[pb.ProbeRequest, str], tuple[pb.ProbeReply | None, bool]]
"""Takes a question and the host that it came from. Returns the reply and whether to answer at all; without a reply the
caller is asked to call."""

_log = logging.getLogger(__name__)


def probe_port(secret: str, incarnation: int) -> ProbePort:
    """The port of a node with this secret of the mesh, in this start; not open yet."""
    return ProbePort(seal_with(secret), incarnation)


class ProbePort:
    """The socket for probe datagrams. Before `start`, or if the port cannot be used, no datagram is sent or answered.

    incarnation: of this node; questions to another one are not answered.
    """

    def __init__(self, seal: ProbeSeal, incarnation: int) -> None:
        self._seal = seal
        self._incarnation = incarnation
        self._answer: Answerer = _nobody_is_known
        self._socket: UdpSocket | None = None
        self._waiting: dict[bytes, asyncio.Future[ProbeAnswer]] = {}
        self.refusals = RefusedDatagrams(what="probe datagram")

    async def start(self, host: str, port: int, answer: Answerer) -> bool:
        """Listen on host:port. Returns whether that worked; if not, peers call this node instead. answer: see
        Answerer."""
        self._answer = answer
        try:
            self._socket = UdpSocket(await listening(host, port), self._heard, MAX_DATAGRAM_BYTES)
        except OSError as exc:  # a TimeoutError, too
            _log.info("probes use gRPC only, because UDP port %d on %s cannot be used: %s", port, host, exc)
        return self._socket is not None

    def stop(self) -> None:
        """Close the socket. Questions that wait get no answer."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def can_ask(self, address: str) -> bool:
        """Whether datagrams can be sent to "host:port": the host is an IP address that the socket can send to."""
        return self._target(address) is not None

    async def ask(
        self, address: str, request: pb.ProbeRequest, incarnation: int, timeout_s: float
    ) -> ProbeAnswer | None:
        """Send a probe to "host:port". None without an answer in time, or if `can_ask` is false."""
        to = self._target(address)
        if to is None or len(self._waiting) >= MAX_WAITING:
            return None
        question = ProbeQuestion(new_token(), incarnation, request)
        answered: asyncio.Future[ProbeAnswer] = asyncio.get_running_loop().create_future()
        self._waiting[question.token] = answered
        try:
            self._send(encode_question(question), to)
            await asyncio.wait([answered], timeout=timeout_s)  # keeps an answer that comes together with the timeout
            return answered.result() if answered.done() else None
        finally:
            del self._waiting[question.token]

    def _target(self, address: str) -> Address | None:
        if self._socket is None:
            return None
        try:
            host, port = split(address)
            return self._socket.address_of(host, int(port))
        except ValueError:
            return None

    def _heard(self, data: bytes, sender: Address) -> None:
        host = _plain(sender[0])
        try:
            if len(data) > MAX_DATAGRAM_BYTES:
                raise TransportError("not a probe")
            heard = decode(self._seal.open(data))
            if isinstance(heard, ProbeQuestion):
                self._reply(heard, host, sender)
            elif (waiting := self._waiting.get(heard.token)) is not None and not waiting.done():
                waiting.set_result(heard)
        except MeshError as exc:  # anybody can send to the port
            if line := self.refusals.note(host, str(exc)):
                _log.info("%s", line)

    def _reply(self, question: ProbeQuestion, host: str, sender: Address) -> None:
        if question.incarnation != self._incarnation:
            return
        reply, is_known = self._answer(question.request, host)
        if is_known:
            self._send(encode_answer(question.token, reply), sender)

    def _send(self, payload: bytes, to: Address) -> None:
        if self._socket is not None:
            self._socket.send(self._seal.close(payload), to)


def _nobody_is_known(request: pb.ProbeRequest, host: str) -> tuple[pb.ProbeReply | None, bool]:
    return None, False


def _plain(host: str) -> str:
    """An address without the interface, and not as an IPv4 address within IPv6."""
    try:
        parsed = ip_address(host.partition("%")[0])
    except ValueError:
        return host
    return str(getattr(parsed, "ipv4_mapped", None) or parsed)
