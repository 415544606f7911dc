"""Calls from outside meet limits before any handler sees them, and each refusal has the status that says why."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf.message import Message

from exo_mesh.errors import StrangerError, TransportError
from exo_mesh.mesh.membership.calls import HELLO
from exo_mesh.node.inspection.calls import DIAGNOSE
from exo_mesh.rings.hosting.calls import COMMIT
from exo_mesh.wire.control_client import ControlClient
from exo_mesh.wire.control_server import ControlServer
from exo_mesh.wire.gate import NAMESPACE_KEY
from exo_mesh.wire.incoming import MAX_BYTES, STRANGER_BYTES
from exo_mesh.wire.peer_call import AnyRow
from exo_mesh.wire.proto import control_pb2 as pb
from tests.support.call_rows import answers_of
from tests.wire.hostile import filled, texts_of

SERVICE = pb.DESCRIPTOR.services_by_name["Control"]
METHODS = [method.name for method in SERVICE.methods]
PEER = "a" * 32
StatusCode = grpc.StatusCode


class Recorder:
    """A node that notes what reaches it, and answers with hostile texts."""

    def __init__(self) -> None:
        self.seen: list[Message] = []
        self.strangers: list[tuple[str, str, str]] = []
        self.replies: dict[AnyRow, list[Message]] = {}
        self.answers = answers_of(self._reply)

    def _reply(self, row: AnyRow, request: Message) -> list[Message]:
        self.seen.append(request)
        return self.replies.get(row) or list(filled(row.reply))


class Place:
    """A control server on the loopback and ways to call it."""

    def __init__(self) -> None:
        self.handler: Any = Recorder()
        self.server = ControlServer(
            self.handler.answers,
            is_peer=lambda peer_id: peer_id == PEER,
            on_stranger=lambda *who: self.handler.strangers.append(who),
        )
        self.address = ""

    async def code_of(self, method: str, data: bytes, namespace: str | None = "default") -> grpc.StatusCode:
        """The status that raw bytes are answered with."""
        metadata = () if namespace is None else ((NAMESPACE_KEY, namespace),)
        async with grpc.aio.insecure_channel(self.address) as channel:
            call = channel.unary_stream(f"/exo_mesh.{method}")(data, metadata=metadata, timeout=10)
            try:
                async for _ in call:
                    pass
            except grpc.aio.AioRpcError as exc:
                return exc.code()
            return StatusCode.OK


@pytest.fixture
async def place() -> AsyncIterator[Place]:
    made = Place()
    made.address = f"127.0.0.1:{await made.server.start('127.0.0.1', 0)}"
    yield made
    await made.server.stop(0)


async def test_every_control_call_of_another_namespace_is_denied(place: Place) -> None:
    for method in [*(f"Control/{name}" for name in METHODS), "Paths/ProbePath"]:
        assert await place.code_of(method, b"", "elsewhere") is StatusCode.PERMISSION_DENIED, method
    assert place.handler.seen == []
    for namespace in ("default", None):  # a caller that names none is of the default one
        assert await place.code_of("Control/Goodbye", b"", namespace) is StatusCode.OK


async def test_who_said_hello_from_another_namespace_is_noted_without_the_namespace(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    client = ControlClient(place.address, None, "acme-research")
    with pytest.raises(StrangerError, match=r"^namespace [0-9a-f]{8} is not 37a8eec1$"):
        await client.call(HELLO, pb.HelloRequest(peer=pb.PeerInfo(id="b", name="box")))
    await client.close()
    ((who, reason, peer_id),) = place.handler.strangers
    assert (who, peer_id) == ("box at 127.0.0.1", "b")
    assert "acme" not in caplog.text and "acme" not in reason


async def test_no_text_of_a_caller_or_of_a_reply_is_unprintable(place: Place) -> None:
    for method in SERVICE.methods:
        for message in filled(getattr(pb, method.input_type.name)):
            assert await place.code_of(f"Control/{method.name}", message.SerializeToString()) is StatusCode.OK
    assert len(place.handler.seen) >= len(METHODS)
    texts = [text for message in place.handler.seen for text in texts_of(message)]
    client = ControlClient(place.address)
    texts += texts_of(await client.call(HELLO, pb.HelloRequest()))
    texts += [text async for status in client.stream(COMMIT, pb.CommitRequest()) for text in texts_of(status)]
    await client.close()
    assert len(texts) > 100 and all(text.isprintable() for text in texts)


async def test_sizes(place: Place) -> None:
    def padded(num_bytes: int, from_peer: str) -> bytes:
        request = pb.ExchangeRequest(from_peer=from_peer)
        request.want.extend(["x" * 1000] * (num_bytes // 1003))
        return request.SerializeToString()

    for num_bytes, peer_id, code in [
        (STRANGER_BYTES - 5000, "z" * 32, StatusCode.OK),
        (STRANGER_BYTES + 5000, "z" * 32, StatusCode.RESOURCE_EXHAUSTED),
        (STRANGER_BYTES + 5000, PEER, StatusCode.OK),
        (MAX_BYTES + 5000, PEER, StatusCode.RESOURCE_EXHAUSTED),
    ]:
        assert await place.code_of("Control/Exchange", padded(num_bytes, peer_id)) is code, (num_bytes, peer_id)
    assert await place.code_of("Control/Hello", padded(STRANGER_BYTES + 5000, PEER)) is StatusCode.RESOURCE_EXHAUSTED
    many = pb.ExchangeRequest(from_peer=PEER, push=[pb.Record()] * 200_000).SerializeToString()
    assert await place.code_of("Control/Exchange", many) is StatusCode.RESOURCE_EXHAUSTED
    assert len(place.handler.seen) == 2


async def test_what_is_no_protobuf_is_an_invalid_argument_and_one_line(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    for name in METHODS:
        assert await place.code_of(f"Control/{name}", b"\xff\xff") is StatusCode.INVALID_ARGUMENT, name
    assert place.handler.seen == []
    lines = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(lines) == 1 and not lines[0].exc_info


async def test_a_reply_that_is_too_long_is_an_error(place: Place) -> None:
    client = ControlClient(place.address)
    place.handler.replies[DIAGNOSE] = [pb.DiagnoseReply(json=b"x" * 5 * MAX_BYTES)]
    with pytest.raises(TransportError, match="longer than"):
        await client.call(DIAGNOSE, pb.DiagnoseRequest())
    await client.close()
