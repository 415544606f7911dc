"""Records and readings of peers are kept as they came: read when somebody looks, and never encoded again."""

from __future__ import annotations

from typing import Any

import pytest

from exo_mesh.domain.device import PeerInfo, Telemetry
from exo_mesh.domain.download import DownloadInfo, DownloadState
from exo_mesh.domain.view import CardInfo, ForeignInfo, Record, RecordKey, Unread
from exo_mesh.mesh.membership import records as module
from exo_mesh.mesh.membership.calls import EXCHANGE_REQUEST
from exo_mesh.mesh.membership.peers import VERSIONS_PER_INCARNATION
from exo_mesh.mesh.membership.records import MAX_AS_SENT_BYTES, MAX_READING_BYTES, Records
from exo_mesh.wire import control_codec as codec
from exo_mesh.wire.proto import control_pb2 as pb
from exo_mesh.wire.readings import Reading, reading_to_proto

FIRST = VERSIONS_PER_INCARNATION
DOWNLOAD = DownloadInfo("m", DownloadState.ONGOING, 5, 10)


def records_with(owner: str = "p") -> Records:
    return Records("own", 1, lambda peer_id: 1 if peer_id == owner else None)


def sent(value: Any, kind: str, version: int = FIRST, record_id: str = "x", owner: str = "p") -> pb.Record:
    return codec.record_to_proto(Record(RecordKey(kind, record_id, owner), version, value))


def take(records: Records, *messages: pb.Record, now: float = 0.0) -> list[Record]:
    """Let records arrive in an exchange."""
    return records.take(EXCHANGE_REQUEST.read(pb.ExchangeRequest(push=messages)).push, now)


def passed_on(records: Records, now: float = 0.0) -> list[pb.Record]:
    return [codec.record_to_proto(record) for record in records.of_owner("p", now)]


def take_reading(records: Records, *messages: pb.Telemetry) -> None:
    for reading in EXCHANGE_REQUEST.read(pb.ExchangeRequest(telemetry=messages)).telemetry:
        records.take_reading(reading)


@pytest.fixture
def num_read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The messages that are decoded or encoded from now on."""
    seen: list[str] = []
    for made in (codec.PEER, codec.DOWNLOAD, codec.CARD, codec.TELEMETRY):
        made._read or made._compile()
        for step in ("_read", "_fields"):
            original = getattr(made, step)
            monkeypatch.setattr(
                made, step, lambda one, step=step, original=original: (seen.append(step), original(one))[1]
            )
    return seen


def test_a_record_is_read_only_when_somebody_looks_and_only_once(num_read: list[str]) -> None:
    records, message = records_with(), sent(DOWNLOAD, "download")
    num_read.clear()
    [record] = take(records, message)
    assert take(records, message, now=1.0) == [], "the same comes with several messages"
    assert passed_on(records, 2.0) == [message] and num_read == []
    assert [record.value, record.value] == [DOWNLOAD, DOWNLOAD] and num_read == ["_read"]
    assert passed_on(records, 2.0) == [message] and num_read == ["_read"]


def test_a_record_of_this_node_is_encoded_once_for_all_peers(num_read: list[str]) -> None:
    records = records_with("own")
    num_read.clear()
    key = records.write("download", "x", DOWNLOAD, 0.0)
    first, second = (records.get(key, now) for now in (0.0, 1.0))
    assert first is not None and second is not None and codec.record_bytes(first) > 0
    assert (
        codec.record_to_proto(first)
        == codec.record_to_proto(second)
        == sent(DOWNLOAD, "download", FIRST + 1, "x", "own")
    )
    assert num_read == ["_fields", "_fields"], "the second time in this test"
    assert first.value is DOWNLOAD


def test_a_reading_is_read_only_when_somebody_looks_and_only_once(num_read: list[str]) -> None:
    records, reading = records_with(), Telemetry("p", 3, 10, 20, 5, keys_digest=77)
    message = codec.telemetry_to_proto(reading)
    num_read.clear()
    for _ in range(2):
        take_reading(records, message)
    assert (
        reading_to_proto(records.readings["p"]) == message
        and records.readings["p"].keys_digest == 77
        and num_read == []
    )
    assert [*records.telemetry.values(), records.telemetry["p"]] == [reading, reading] and num_read == ["_read"]
    assert len(records.telemetry) == 1 and "q" not in records.telemetry and records.telemetry.get("q") is None


@pytest.mark.parametrize("peer_id", ["gone", "own"])
def test_a_reading_of_nobody_else_alive_is_not_kept(peer_id: str) -> None:
    records = records_with()
    records.take_reading(Reading.of(Telemetry(peer_id, 2**63, 10, 20, 5)))
    assert records.readings == {}


@pytest.mark.parametrize(
    "broken",
    [
        sent(PeerInfo("p", 1, "n", "1", 5, "d", ()), "peer"),
        sent(CardInfo("x" * 5000), "card"),
        sent(DOWNLOAD, "card"),
    ],
    ids=["id", "card", "kind"],
)
def test_a_record_beyond_a_bound_is_no_record_of_its_kind(broken: pb.Record) -> None:
    if broken.HasField("peer"):
        broken.peer.id = "x" * 65
    records = records_with()
    assert all(isinstance(one.value, ForeignInfo) for one in take(records, broken))
    assert records.view.peers() == records.view.cards() == []
    assert passed_on(records) in ([], [broken]), "others may be able to read it"


def test_what_is_kept_as_received_is_bounded_for_each_owner() -> None:
    records = records_with()
    name = "n" * 250
    info = PeerInfo("p", 1, "n", "1", 5, "d", (), models=tuple(f"{name}{number}" for number in range(200)))
    flood = [sent(info, "peer", FIRST + number, f"r{number}") for number in range(40)]
    assert len(take(records, *flood)) == 40
    kept = [one.content for one in records.view.of_owner("p")]
    as_sent = sum(len(one.data) for one in kept if isinstance(one, Unread))
    assert MAX_AS_SENT_BYTES / 2 < as_sent <= MAX_AS_SENT_BYTES
    assert sum(isinstance(one, PeerInfo) for one in kept) > 0, "the rest was read, which bounds it"
    message = codec.telemetry_to_proto(Telemetry("p", 3, 10, 20, 5, tokens={f"{name}{n}": n for n in range(90)}))
    assert message.ByteSize() > MAX_READING_BYTES
    take_reading(records, message)
    assert isinstance(records.readings["p"].content, Telemetry)


def test_a_new_version_replaces_what_was_kept_of_the_old_one() -> None:
    records = records_with()
    for number in range(module.MAX_AS_SENT_BYTES // 100):
        take(records, sent(DOWNLOAD, "download", FIRST + number))
    [held] = records.view.of_owner("p")
    assert isinstance(held.content, Unread)
    gone = pb.Record(kind="download", id="x", owner="p", version=FIRST + 10**6, deleted=True)
    assert [one.deleted for one in take(records, gone, now=1.0)] == [True] and records.view.downloads() == []
