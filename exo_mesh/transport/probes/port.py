"""Sends and answers probe datagrams, on the UDP port that has the number of the control port."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from ipaddress import ip_address
from typing import cast

from exo_mesh.errors import TransportError
from exo_mesh.proto import control_pb2 as pb
from exo_mesh.security.datagrams import RefusedDatagrams
from exo_mesh.security.probe_seal import ProbeSeal, seal_with
from exo_mesh.transport.probes.messages import (
    MAX_DATAGRAM_BYTES,
    ProbeAnswer,
    ProbeQuestion,
    decode,
    encode_answer,
    encode_question,
    new_token,
)

MAX_WAITING = 64
"""Most questions that wait for an answer; a node has a few at a time."""

Answerer = Callable[[pb.ProbeRequest, str], tuple[pb.ProbeReply | None, bool]]
"""Takes a question and the host that it came from. Returns the reply and whether to answer at all; without a reply the
caller is asked to call."""

_log = logging.getLogger(__name__)


def probe_port(secret: str, incarnation: int) -> ProbePort:
    """The port of a node with this secret of the mesh, in this start; not open yet."""
    return ProbePort(seal_with(secret), incarnation)


class ProbePort(asyncio.DatagramProtocol):
    """The socket for probe datagrams. Before `start`, or if the port cannot be used, no datagram is sent or answered.

    incarnation: of this node; questions to another one are not answered.
    """

    def __init__(self, seal: ProbeSeal, incarnation: int) -> None:
        self._seal = seal
        self._incarnation = incarnation
        self._answer: Answerer = _nobody_is_known
        self._transport: asyncio.DatagramTransport | None = None
        self._versions: tuple[int, ...] = ()
        self._waiting: dict[bytes, asyncio.Future[ProbeAnswer]] = {}
        self.refusals = RefusedDatagrams(what="probe datagram")

    async def start(self, host: str, port: int, answer: Answerer) -> bool:
        """Listen on host:port. Returns whether that worked; if not, peers call this node instead. answer: see
        Answerer."""
        self._answer = answer
        try:
            transport, _ = await asyncio.get_running_loop().create_datagram_endpoint(
                lambda: self, local_addr=(host.strip("[]"), port)
            )
        except OSError as exc:
            _log.info("probes use gRPC only, because UDP port %d on %s cannot be used: %s", port, host, exc)
            return False
        self._transport = transport
        self._versions = (4,) if transport.get_extra_info("socket").family == socket.AF_INET else (6,)
        return True

    def stop(self) -> None:
        """Close the socket. Questions that wait get no answer."""
        if self._transport is not None:
            self._transport.close()
            self._transport = None

    def can_ask(self, address: str) -> bool:
        """Whether datagrams can be sent to "host:port": the host is an IP address of the socket's version. A link-local
        address of IPv6 is not, because it has no meaning without the interface."""
        try:
            found = ip_address(_host_of(address))
        except ValueError:
            return False
        return self._transport is not None and found.version in self._versions and not found.is_link_local

    async def ask(
        self, address: str, request: pb.ProbeRequest, incarnation: int, timeout_s: float
    ) -> ProbeAnswer | None:
        """Send a probe to "host:port", for which `can_ask` must be true. None without an answer in time."""
        if self._transport is None or len(self._waiting) >= MAX_WAITING:
            return None
        question = ProbeQuestion(new_token(), incarnation, request)
        answered: asyncio.Future[ProbeAnswer] = asyncio.get_running_loop().create_future()
        self._waiting[question.token] = answered
        try:
            self._send(encode_question(question), (_host_of(address), int(address.rpartition(":")[2])))
            async with asyncio.timeout(timeout_s):
                return await answered
        except TimeoutError:
            return None
        finally:
            del self._waiting[question.token]

    def datagram_received(self, data: bytes, addr: tuple[str | int, ...]) -> None:
        host = _plain(str(addr[0]))
        try:
            if len(data) > MAX_DATAGRAM_BYTES:
                raise TransportError("not a probe")
            heard = decode(self._seal.open(data))
            if isinstance(heard, ProbeQuestion):
                self._reply(heard, host, addr)
            elif (waiting := self._waiting.get(heard.token)) is not None and not waiting.done():
                waiting.set_result(heard)
        except TransportError as exc:  # anybody can send to the port
            if line := self.refusals.note(host, str(exc)):
                _log.info("%s", line)

    def error_received(self, exc: Exception) -> None:
        """A datagram could not be sent; its question ends without an answer."""

    def _reply(self, question: ProbeQuestion, host: str, addr: tuple[str | int, ...]) -> None:
        if question.incarnation != self._incarnation:
            return
        reply, is_known = self._answer(question.request, host)
        if is_known:
            self._send(encode_answer(question.token, reply), addr)

    def _send(self, payload: bytes, addr: tuple[str | int, ...]) -> None:
        if self._transport is not None:
            try:
                self._transport.sendto(self._seal.close(payload), cast("tuple[str, int]", addr))
            except OSError as exc:  # no route: the question ends without an answer
                _log.debug("a probe to %s cannot be sent: %s", addr[0], exc)


def _nobody_is_known(request: pb.ProbeRequest, host: str) -> tuple[pb.ProbeReply | None, bool]:
    return None, False


def _host_of(address: str) -> str:
    return address.rpartition(":")[0].strip("[]")


def _plain(host: str) -> str:
    """An address without the interface, and not as an IPv4 address within IPv6."""
    try:
        parsed = ip_address(host.partition("%")[0])
    except ValueError:
        return host
    return str(getattr(parsed, "ipv4_mapped", None) or parsed)
