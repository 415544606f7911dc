"""What other peers send is bounded before it is parsed, and its texts are printable afterwards."""

from __future__ import annotations

import pytest
from google.protobuf.message import Message

from exo_mesh.base.printable import MAX_CHARS
from exo_mesh.domain.device import MAX_ITEMS
from exo_mesh.wire.control_codec import peer_from_proto, peer_to_proto
from exo_mesh.wire.incoming import (
    LARGE_BYTES,
    MAX_BYTES,
    STRANGER_BYTES,
    MalformedError,
    OversizedError,
    first_text,
    read_message,
)
from exo_mesh.wire.proto import control_pb2 as pb
from tests.wire.hostile import MESSAGES, filled, texts_of


@pytest.mark.parametrize("cls", MESSAGES, ids=lambda cls: cls.DESCRIPTOR.name)
def test_every_text_of_every_message_is_printable_and_bounded(cls: type[Message]) -> None:
    for message in filled(cls):
        read = read_message(cls, message.SerializeToString())
        assert len(list(texts_of(read))) == len(list(texts_of(message)))
        for text in texts_of(read):
            assert text.isprintable() and len(text) <= MAX_CHARS, text


def test_a_name_that_is_fine_stays_as_it_is() -> None:
    name = "Küche 👩‍💻 \u0627\u0628"  # with a joiner, which is no control
    assert read_message(pb.PeerInfo, pb.PeerInfo(name=name).SerializeToString()).name == name


def test_a_message_of_many_empty_items_is_refused_before_it_is_parsed() -> None:
    for nested in (pb.ExchangeRequest(push=[pb.Record()] * 400_000), one_peer_with_devices(400_000)):
        data = nested.SerializeToString()
        assert len(data) < MAX_BYTES
        with pytest.raises(OversizedError, match="items"):
            read_message(pb.ExchangeRequest, data)


def one_peer_with_devices(count: int) -> pb.ExchangeRequest:
    return pb.ExchangeRequest(push=[pb.Record(peer=pb.PeerInfo(devices=[pb.Device()] * count))])


def test_bytes_above_the_limit_are_refused() -> None:
    data = pb.HelloRequest(peer=pb.PeerInfo(name="x" * STRANGER_BYTES)).SerializeToString()
    with pytest.raises(OversizedError, match="longer than the allowed 262144"):
        read_message(pb.HelloRequest, data, STRANGER_BYTES)


@pytest.mark.parametrize("data", [b"\xff", b"\x0a\x05abc", b"\x0b\x0c", b"\x80" * 20, b"\x0a\x02\xff\xfe"])
@pytest.mark.parametrize("padding", [b"", b"\x12\x00" * LARGE_BYTES], ids=["short", "long"])
def test_what_is_no_message_is_malformed(data: bytes, padding: bytes) -> None:
    if data == b"\x0b\x0c":
        pytest.skip("an unknown group, which protobuf lets pass")
    with pytest.raises((MalformedError, OversizedError)):
        read_message(pb.ProbeRequest, padding + data)


def test_the_caller_is_seen_before_its_message_is_parsed() -> None:
    assert first_text(pb.ExchangeRequest(from_peer="a" * 32, incarnation=1).SerializeToString()) == "a" * 32
    for data in (b"", b"\x0a", b"\x12\x01x", b"\x0a\x7f" + b"x" * 127):
        assert first_text(data) == ""


def test_a_hello_with_the_most_models_is_short_enough_for_a_stranger() -> None:
    name = "an-organisation-with-a-long-name/A-Model-With-A-Long-Name-"
    models = tuple(f"{name}{number}" for number in range(2 * MAX_ITEMS))
    message = peer_to_proto(peer_from_proto(pb.PeerInfo(id="a", models=models)))
    message = peer_to_proto(
        peer_from_proto(pb.PeerInfo(id="a", models=models, model_engines=[pb.ModelEngines(model=m) for m in models]))
    )
    data = pb.HelloRequest(peer=message).SerializeToString()
    assert len(message.models) > 500 and len(data) < STRANGER_BYTES
    assert read_message(pb.HelloRequest, data, STRANGER_BYTES).peer == message
