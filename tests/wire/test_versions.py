"""Peers of different versions: how each reads a message with unknown fields (docs/reference/protocol.md)."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from google.protobuf.message import Message

from exo_mesh import OLDEST_PROTOCOL, PROTOCOL_VERSION
from exo_mesh.base.versions import SPOKEN, ProtocolRange
from exo_mesh.domain.device import PeerInfo, Telemetry
from exo_mesh.domain.download import DownloadState
from exo_mesh.domain.frame import Frame, Insert, Remove, UnknownOp
from exo_mesh.domain.plan import Ballot, Plan, PlanInputs, StagePlan
from exo_mesh.domain.shard import Shard
from exo_mesh.domain.view import (
    MAX_FOREIGN_BYTES,
    MAX_FOREIGN_PER_OWNER,
    ForeignInfo,
    InstanceState,
    Record,
    RecordKey,
    View,
)
from exo_mesh.errors import PeerVersionError, TransportError
from exo_mesh.mesh.membership.calls import EXCHANGE_REQUEST, HELLO
from exo_mesh.mesh.membership.peers import VERSIONS_PER_INCARNATION, refusal
from exo_mesh.mesh.membership.records import Records
from exo_mesh.models.text_sending import text_files
from exo_mesh.rings.hosting.calls import COMMIT
from exo_mesh.rings.serving.calls import CANCEL
from exo_mesh.security.key_table import ApiKey, Role, secret_digest
from exo_mesh.weights.card import IMAGE_FILES, LATER_TEXT_FILES, read_card
from exo_mesh.weights.store import ModelStore
from exo_mesh.wire import control_codec as codec
from exo_mesh.wire.codec import FrameAssembler, encode_frame
from exo_mesh.wire.control_client import ControlClient
from exo_mesh.wire.control_server import ControlServer
from exo_mesh.wire.driver_codec import event_from_proto
from exo_mesh.wire.incoming import MalformedError
from exo_mesh.wire.key_codec import keys_from_proto, keys_to_proto
from exo_mesh.wire.peer_call import StreamAnswer, answer
from exo_mesh.wire.proto import control_pb2 as pb
from exo_mesh.wire.proto import driver_pb2, plan_pb2
from exo_mesh.wire.readings import Reading, reading_from_proto, reading_to_proto
from exo_mesh.wire.unknown_fields import FIRST_OPTIONAL, require_known
from tests.support.checkpoints import TinyModel, write_checkpoint, write_json

NEWER = "a newer version"


def with_field(message: Message, number: int) -> Message:
    """The message with a field that nobody knows: a varint of 1."""
    message.MergeFromString(_varint(number << 3) + b"\x01")
    return message


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


# who fits together


@pytest.mark.parametrize(
    ("one", "other", "agreed"),
    [((4, 5), (4, 0), 4), ((4, 5), (4, 6), 5), ((4, 5), (5, 7), 5), ((4, 5), (6, 7), None), ((3, 0), (4, 5), None)],
)
def test_two_ranges_agree_on_the_newest_version_of_both(
    one: tuple[int, int], other: tuple[int, int], agreed: int | None
) -> None:
    first, second = ProtocolRange.said(*one), ProtocolRange.said(*other)
    assert first.agreed(second) == second.agreed(first) == agreed


def test_peers_are_refused_only_if_they_have_no_version_in_common() -> None:
    own = PeerInfo("a", 1, "a", "2.0", 4, "default", (), newest_protocol=6)
    for oldest, newest in ((4, 0), (5, 9), (6, 6)):
        assert refusal(own, PeerInfo("b", 1, "b", "9.0", oldest, "default", (), newest_protocol=newest)) == ""
    assert "protocol 7 to 9 (exo-mesh 9.0) has no version in common with 4 to 6 (exo-mesh 2.0)" in refusal(
        own, PeerInfo("b", 1, "b", "9.0", 7, "default", (), newest_protocol=9)
    )


def test_this_version_still_speaks_to_the_first_that_negotiated() -> None:
    assert SPOKEN == (OLDEST_PROTOCOL, PROTOCOL_VERSION) and OLDEST_PROTOCOL <= 5 <= PROTOCOL_VERSION


# requests


def test_a_request_with_an_unknown_field_is_refused_wherever_the_field_is() -> None:
    plan = plan_pb2.Plan(stages=[plan_pb2.StagePlan(peer_id="a")])
    request = pb.ReserveRequest(plan=plan, stage=0)
    require_known(request)
    with_field(request.plan.stages[0], 77)
    with pytest.raises(PeerVersionError, match="field 77 of StagePlan"):
        require_known(request)


def test_a_hint_may_be_left_out() -> None:
    require_known(with_field(pb.CancelRequest(request_id="r"), FIRST_OPTIONAL))
    require_known(with_field(driver_pb2.GenerateRequest(sampling=driver_pb2.Sampling()), FIRST_OPTIONAL + 5))


async def hello(request: pb.HelloRequest) -> pb.HelloReply:
    return pb.HelloReply(accepted=True)


async def cancel(request: pb.CancelRequest) -> pb.CancelReply:
    return pb.CancelReply(found=True)


async def commit(request: pb.CommitRequest) -> AsyncGenerator[pb.StageStatus, None]:
    yield pb.StageStatus(loading=pb.StageLoading())


@pytest.fixture
async def client() -> AsyncIterator[ControlClient]:
    server = ControlServer([answer(HELLO, hello), answer(CANCEL, cancel), StreamAnswer(COMMIT, commit)])
    client = ControlClient(f"127.0.0.1:{await server.start('127.0.0.1', 0)}")
    yield client
    await client.close()
    await server.stop(0)


async def test_a_peer_refuses_the_request_and_goes_on_answering_others(client: ControlClient) -> None:
    with pytest.raises(PeerVersionError, match="does not know field 90 of CancelRequest"):
        await client.call(CANCEL, with_field(pb.CancelRequest(request_id="r"), 90))
    with pytest.raises(PeerVersionError, match="does not know field 90 of CommitRequest"):
        await anext(client.stream(COMMIT, with_field(pb.CommitRequest(), 90)))  # type: ignore[arg-type]
    newer = with_field(pb.HelloRequest(peer=pb.PeerInfo(id="n")), 90)
    assert (await client.call(HELLO, newer)).accepted  # type: ignore[arg-type]
    assert (await client.call(CANCEL, pb.CancelRequest(request_id="r"))).found


async def test_a_call_that_a_peer_does_not_know_is_an_error_with_a_name(client: ControlClient) -> None:
    call = client._channel.unary_unary("/exo_mesh.Control/Teleport", pb.CancelRequest.SerializeToString)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await call(pb.CancelRequest(), metadata=client._metadata)
    error = client._translated(refused.value)
    assert isinstance(error, PeerVersionError) and "another version" in str(error)


# records and readings


def records_with(owner: str = "newer") -> Records:
    return Records("own", 1, lambda peer_id: 1 if peer_id == owner else None)


def take(records: Records, *messages: object) -> list[Record]:
    """Let records arrive in an exchange."""
    return records.take(EXCHANGE_REQUEST.read(pb.ExchangeRequest(push=messages)).push, 0.0)  # type: ignore[arg-type]


def test_a_record_is_passed_on_with_what_is_unknown_here() -> None:
    info = PeerInfo("newer", 1, NEWER, "9", 5, "default", ("127.0.0.1:1",), newest_protocol=9)
    sent = codec.record_to_proto(Record(RecordKey("peer", "newer", "newer"), VERSIONS_PER_INCARNATION, info))
    with_field(sent.peer, 200)
    records = records_with()
    assert [record.value for record in take(records, sent)] == [info]
    assert [codec.record_to_proto(record) for record in records.of_owner("newer", 5.0)] == [sent]
    records.forget("newer")
    assert records.of_owner("newer", 5.0) == []


def test_a_record_of_an_unknown_kind_is_kept_passed_on_and_deleted() -> None:
    sent = with_field(pb.Record(kind="wish", id="w", owner="newer", version=VERSIONS_PER_INCARNATION), 300)
    records, knowing = records_with(), View()
    assert isinstance(take(records, sent)[0].value, ForeignInfo)
    assert [codec.record_to_proto(record) for record in records.of_owner("newer", 0.0)] == [sent]
    knowing.merge([Record(RecordKey("wish", "w", "newer"), VERSIONS_PER_INCARNATION, ForeignInfo(b""))], 0.0)
    assert (records.view.digest(), records.view.sum) == (knowing.digest(), knowing.sum), "whoever can read it, too"
    gone = pb.Record(kind="wish", id="w", owner="newer", version=VERSIONS_PER_INCARNATION + 1, deleted=True)
    assert [record.deleted for record in take(records, gone)] == [True]


def test_unknown_kinds_cannot_fill_a_peer() -> None:
    records = records_with()
    flood = [
        with_field(pb.Record(kind=f"k{number}", id="x", owner="newer", version=VERSIONS_PER_INCARNATION), 300)
        for number in range(MAX_FOREIGN_PER_OWNER + 9)
    ]
    long = pb.Record(kind="k", id="x" * MAX_FOREIGN_BYTES, owner="newer", version=VERSIONS_PER_INCARNATION)
    assert take(records, long) == []
    assert len(take(records, *flood)) == MAX_FOREIGN_PER_OWNER


def test_a_reading_is_passed_on_with_what_is_unknown_here() -> None:
    records = records_with()
    sent = codec.telemetry_to_proto(Telemetry("newer", 7, 100, 200, 0))
    records.take_reading(reading_from_proto(with_field(sent, 200)))  # type: ignore[arg-type]
    passed_on = reading_to_proto(records.readings["newer"])
    assert passed_on == sent and records.telemetry["newer"].usable_bytes == 100
    later = Reading.of(Telemetry("newer", 8, 50, 200, 0))
    records.take_reading(later)
    assert records.readings["newer"] is later


def test_states_of_a_newer_version_are_steps_on_the_way() -> None:
    shard = plan_pb2.Shard(model="m", start=0, stop=1, num_layers=1)
    plan = plan_pb2.Plan(instance_id="i", stages=[plan_pb2.StagePlan(peer_id="a", shard=shard)])
    assert codec.instance_from_proto(pb.InstanceInfo(plan=plan, state=99)).state is InstanceState.LOADING  # type: ignore[arg-type]
    assert codec.download_from_proto(pb.DownloadInfo(state=99)).state is DownloadState.PENDING  # type: ignore[arg-type]


def test_an_end_of_an_answer_that_is_unknown_is_no_good_end() -> None:
    with pytest.raises(PeerVersionError, match='"filtered"'):
        event_from_proto(driver_pb2.TokenEvent(index=3, finish="filtered"))


def test_an_api_key_with_limits_that_are_unknown_is_not_taken_over() -> None:
    salt = "0" * 32
    key = ApiKey("0a1b2c3d", Role.USE, salt, secret_digest(salt, "s"), "2026-01-01")
    [sent] = keys_to_proto([key])
    assert keys_from_proto([sent]) == [key]
    assert keys_from_proto([with_field(sent, 50)]) == []  # type: ignore[list-item]


# frames


def carried(*ops: Any) -> Frame:
    frame = FrameAssembler().feed(b"".join(encode_frame(Frame(Ballot(1, "a"), 1, ops=ops))))
    assert frame is not None
    return frame


def test_an_operation_of_a_newer_version_is_carried_on_as_it_came() -> None:
    pin, plain = UnknownOp("Pin", 7, ("prefix", [1, 2])), UnknownOp("Pin", 7)
    ops = (Insert(7, 100), pin, plain, Remove(3))
    once = carried(*ops)
    assert once.ops == ops and carried(*once.ops).ops == ops


@pytest.mark.parametrize("op", [(), ("Pin",), ("Pin", "x"), ("Insert", "x", 1), (1, 2), "Pin"])
def test_what_is_no_operation_of_any_version_is_malformed(op: Any) -> None:
    with pytest.raises(MalformedError):
        carried(op)


def test_a_field_at_the_end_of_an_operation_is_left_out() -> None:
    assert carried(("Insert", 7, 100, "priority")).ops == (Insert(7, 100),)


# what peers compare


def test_the_digest_of_a_model_is_the_same_in_all_versions() -> None:
    """It changes with the shipped model only: peers that compute it in two ways do not find each other's files."""
    digest = "f7f4caf16a8db65f58cfe4193abff2bbb5e7e410d6ecf3c3d84fcac8b2e72638"
    assert ModelStore(()).card("exo-mesh-demo").digest == digest


def test_the_digests_of_a_model_are_of_its_files_as_they_are_written(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "m", TinyModel(layers=2))
    config = json.loads((model / "config.json").read_bytes())
    odd = {"pad_token_id": -1, "sliding_window": 0, "time_step_limit": [0.0, {"__float__": "Infinity"}]}
    write_json(model / "config.json", {**config, **odd})
    for name in LATER_TEXT_FILES:
        write_json(model / name, {})
    card = read_card(model, "m")
    assert card.digest == "b879784aaf3ee75757fdb4c7452669245186b540d082fd2f8572b70250cd86f9"
    assert card.text_digest == "a63a20f60d0868eab0cd3837cc34be2b643bd6e7594aecc297b2dda8b972abdf"


@pytest.mark.parametrize("takes", [False, True])
async def test_a_peer_gets_only_the_text_files_that_it_takes(tmp_path: Path, takes: bool) -> None:
    model = write_checkpoint(tmp_path / "m", TinyModel(layers=2))
    for name in (*LATER_TEXT_FILES, *IMAGE_FILES):
        write_json(model / name, {})
    sent = {name async for name, _ in text_files(model, images=False, later=takes)}
    assert {"tokenizer.json", "config.json"} <= sent
    assert sent & {*LATER_TEXT_FILES, *IMAGE_FILES} == (set(LATER_TEXT_FILES) if takes else set())


def test_the_digest_of_a_plan_without_news_is_the_same_in_all_versions() -> None:
    """Inputs that older versions do not know count only if they are set."""
    stage = StagePlan("a", "mlx", Shard("m", 0, 3, 3), 5)
    plan = Plan("m-1", Ballot(4, "a"), "m", "d", (stage,), 2048, PlanInputs((("a", 9),), "memory", 1), 8192)
    assert plan.digest == "f2bc8f3c5c89276e58020a3a08f576cfeea4972177cc5c35e7a6e700f67d427f"


def test_the_sum_and_the_digest_of_a_view_are_the_same_in_all_versions() -> None:
    view = View()
    keys = [RecordKey("peer", "a", "a"), RecordKey("instance", "i-1", "a"), RecordKey("download", "m", "a")]
    view.merge([Record(key, 3, ForeignInfo(b"")) for key in keys], 0.0)
    assert view.sum == 17645223840379620032
    assert view.digest() == "ce1929cd8c11bb420215376c746b517f2295f7e364245b36dbfb82375ade1c77"


def test_a_record_whose_kind_and_content_disagree_is_still_refused() -> None:
    with pytest.raises(TransportError):
        codec.record_from_proto(pb.Record(kind="peer", id="p", owner="p", version=1, card=pb.CardInfo(toml=b"")))


@pytest.mark.parametrize(("sent", "known"), [("", "full"), ("api", "api"), ("edge", "edge"), ("newer", "full")])
def test_a_role_is_a_hint_and_an_unknown_one_means_full(sent: str, known: str) -> None:
    assert pb.PeerInfo.DESCRIPTOR.fields_by_name["role"].number >= FIRST_OPTIONAL
    info = codec.peer_from_proto(pb.PeerInfo(id="a", role=sent))
    assert info.role == known and codec.peer_from_proto(codec.peer_to_proto(info)) == info
