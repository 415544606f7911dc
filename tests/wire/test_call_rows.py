"""A call between peers is said once: its row is the call of the protos, and is served to peers of all versions."""

from __future__ import annotations

import ast
import re
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import grpc.aio
import pytest
from google.protobuf.message import Message

import exo_mesh
from exo_mesh.errors import InputError, TransportError
from exo_mesh.rings.hosting.calls import COMMIT, READ_LOG
from exo_mesh.rings.serving.calls import CANCEL
from exo_mesh.wire.calls import GENERATE, PUT_IMAGE, RECALL
from exo_mesh.wire.channels import new_server
from exo_mesh.wire.control_server import ControlServer
from exo_mesh.wire.gate import Gate, handlers_of
from exo_mesh.wire.peer_call import (
    AnyRow,
    CallAnswer,
    PeerCall,
    PeerStream,
    PeerUpload,
    StreamAnswer,
    UploadAnswer,
    answer,
)
from exo_mesh.wire.proto import control_pb2 as pb
from exo_mesh.wire.proto import driver_pb2, paths_pb2
from tests.support.call_rows import all_rows, answers_of
from tests.support.neighbours import Neighbours
from tests.support.nodes import Machine, make_node

ROWS = {row.path: row for row in all_rows()}
METHODS = {
    f"/{service.full_name}/{method.name}": method
    for file in (pb, driver_pb2, paths_pb2)
    for service in file.DESCRIPTOR.services_by_name.values()
    for method in service.methods
}
MESSAGES = {file.DESCRIPTOR.name: file for file in (pb, driver_pb2, paths_pb2)}


def test_a_row_is_a_call_of_the_protos_with_its_messages() -> None:
    assert ROWS.keys() == METHODS.keys()
    for path, method in METHODS.items():
        row = ROWS[path]
        kind: type = PeerStream if method.server_streaming else PeerUpload if method.client_streaming else PeerCall
        assert isinstance(row, kind)
        assert (method.input_type, method.output_type) == (row.request.DESCRIPTOR, row.reply.DESCRIPTOR)


def test_a_node_answers_every_control_call_once(tmp_path: Path) -> None:
    node = make_node(tmp_path / "n", "n", Machine())
    answered = [one.row for one in node._parts.answers]
    assert sorted(row.name for row in answered) == sorted(row.name for row in ROWS.values() if row.service == "Control")


def stub(channel: grpc.aio.Channel, path: str) -> Any:
    """A call as the generated stubs of older versions make it."""
    method = METHODS[path]
    file = MESSAGES[method.containing_service.file.name]
    request, reply = getattr(file, method.input_type.name), getattr(file, method.output_type.name)
    kind = ("stream" if method.client_streaming else "unary", "stream" if method.server_streaming else "unary")
    make = getattr(channel, "_".join(kind))
    return make(path, request_serializer=request.SerializeToString, response_deserializer=reply.FromString)


async def test_a_stub_of_an_older_version_reaches_every_row_of_a_node() -> None:
    seen: list[AnyRow] = []

    def reply(row: AnyRow, request: Message) -> list[Message]:
        seen.append(row)
        return [row.reply()]

    server = ControlServer(answers_of(reply), peer_id="b")
    address = f"127.0.0.1:{await server.start('127.0.0.1', 0)}"
    async with grpc.aio.insecure_channel(address) as channel:
        for path, row in ROWS.items():
            if row.service == "Driver":
                continue
            call = stub(channel, path)(row.request(), timeout=10)
            got = [one async for one in call] if isinstance(row, PeerStream) else [await call]
            assert [type(one) for one in got] == [row.reply], path
    await server.stop(0)
    assert seen == [row for row in ROWS.values() if row.service == "Control"]


async def test_a_stub_of_an_older_version_reaches_the_driver() -> None:
    async def generate(request: driver_pb2.GenerateRequest) -> AsyncGenerator[driver_pb2.GenerateEvents, None]:
        for _ in range(2):
            yield driver_pb2.GenerateEvents(prefilled=len(request.prompt_ids))

    async def recall(request: driver_pb2.RecallRequest) -> driver_pb2.RecallReply:
        return driver_pb2.RecallReply(found=True)

    async def put_image(pieces: AsyncIterator[driver_pb2.ImagePiece]) -> driver_pb2.PutImageReply:
        if sum([len(piece.pixels) async for piece in pieces]) != 2:
            raise InputError("two pixels are expected")
        return driver_pb2.PutImageReply()

    server = new_server([Gate()])
    server.add_generic_rpc_handlers(
        handlers_of([StreamAnswer(GENERATE, generate), answer(RECALL, recall), UploadAnswer(PUT_IMAGE, put_image)])
    )
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        request = driver_pb2.GenerateRequest(prompt_ids=[1, 2, 3])
        assert [one.prefilled async for one in stub(channel, GENERATE.path)(request)] == [3, 3]
        assert (await stub(channel, RECALL.path)(driver_pb2.RecallRequest())).found
        piece = driver_pb2.ImagePiece(pixels=b"x")
        await stub(channel, PUT_IMAGE.path)(iter([piece, piece]))
        with pytest.raises(grpc.aio.AioRpcError, match="two pixels"):
            await stub(channel, PUT_IMAGE.path)(iter([piece]))
    await server.stop(0)


async def test_a_call_to_the_own_id_is_answered_by_the_same_row_without_a_wire() -> None:
    async def cancel(request: pb.CancelRequest) -> pb.CancelReply:
        if not request.request_id:
            raise InputError("which request?")
        return pb.CancelReply(found=True)

    async def commit(request: pb.CommitRequest) -> AsyncGenerator[pb.StageStatus, None]:
        yield pb.StageStatus(loading=pb.StageLoading())

    mesh = Neighbours("a", [answer(CANCEL, cancel), StreamAnswer(COMMIT, commit)])
    assert (await mesh.calls.call("a", CANCEL, pb.CancelRequest(request_id="r"))).found
    assert [one.HasField("loading") async for one in mesh.calls.stream("a", COMMIT, pb.CommitRequest())] == [True]
    with pytest.raises(InputError, match="which request"):
        await mesh.calls.call("a", CANCEL, pb.CancelRequest())
    with pytest.raises(TransportError, match="peer b is gone"):
        await mesh.calls.call("b", CANCEL, pb.CancelRequest())
    with pytest.raises(TransportError, match="peer b is gone"):
        await anext(mesh.calls.stream("b", COMMIT, pb.CommitRequest()))
    with pytest.raises(KeyError):
        await mesh.calls.call("a", READ_LOG, pb.ReadLogRequest())


async def test_a_caller_without_a_name_is_not_taken_for_this_node() -> None:
    seen = []

    async def cancel(request: pb.CancelRequest, caller: str) -> pb.CancelReply:
        seen.append(caller)
        return pb.CancelReply()

    (served,) = handlers_of([CallAnswer(CANCEL, cancel)])
    details, context = SimpleNamespace(method=CANCEL.path), SimpleNamespace(peer=lambda: "")
    handler: Any = served.service(cast(Any, details))
    await handler.unary_unary(pb.CancelRequest(), context)
    await Neighbours("a", [CallAnswer(CANCEL, cancel)]).calls.call("a", CANCEL, pb.CancelRequest())
    assert seen == ["unknown", ""]


def snake(name: str) -> str:
    return re.sub(r"(?<!^)([A-Z])", r"_\1", name).lower()


FORMS = ("{}", "_{}", "answer_{}", "_answer_{}", "{}_here")
NAMED = {form.format(snake(row.name)): row for row in ROWS.values() for form in FORMS}
"""The calls by the names of functions that may define them."""


def definitions(file: Path) -> Iterator[tuple[AnyRow, str]]:
    """The functions of a module that are named for a call, and know its row or its request."""
    text = file.read_text()
    if not re.search(rf"def ({'|'.join(NAMED)})\(", text):
        return
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name in NAMED:
            row = NAMED[node.name]
            if re.search(rf"\b({snake(row.name).upper()}|pb2?\.{row.request.DESCRIPTOR.name})\b", ast.unparse(node)):
                yield row, f"{file}:{node.lineno}"


def test_the_name_of_a_call_is_defined_at_most_three_times() -> None:
    found = {row.name: ["its row"] for row in ROWS.values()}
    root = Path(exo_mesh.__file__).parent
    for file in root.rglob("*.py"):
        if not {"proto", "bench"} & set(file.relative_to(root).parts):
            for row, where in definitions(file):
                found[row.name].append(where)
    most = {"Generate": 4, "Recall": 4}  # answered by the driver of a ring and by that of a whole model
    assert {name: where for name, where in found.items() if len(where) > most.get(name, 3)} == {}
    assert sum(len(where) for where in found.values()) <= 3 * len(ROWS)
