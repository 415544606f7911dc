"""A client of a peer makes the calls of its service when they are first used: a node may know a thousand addresses."""

from __future__ import annotations

from typing import Any

import pytest

from exo_mesh.wire.careful_channel import CarefulChannel, LazyStub
from exo_mesh.wire.proto import control_pb2_grpc as rpc


class Counting:
    """A channel that counts the calls that are made of it."""

    def __init__(self) -> None:
        self.made: list[tuple[str, str]] = []

    def unary_unary(self, path: str, *args: Any, **options: Any) -> Any:
        self.made.append(("unary_unary", path))
        return lambda request, **more: path

    def unary_stream(self, path: str, *args: Any, **options: Any) -> Any:
        self.made.append(("unary_stream", path))
        return lambda request, **more: path


def test_a_call_is_made_at_its_first_use_and_once() -> None:
    channel: Any = Counting()
    stub = LazyStub(rpc.ControlStub, CarefulChannel(channel, None))
    assert channel.made == []
    assert stub.Probe(b"") == stub.Probe(b"") == "/exo_mesh.Control/Probe"
    assert channel.made == [("unary_unary", "/exo_mesh.Control/Probe")]


def test_it_has_the_calls_of_the_whole_stub_and_no_others() -> None:
    lazily: Any = Counting()
    at_once: Any = Counting()
    whole = rpc.ControlStub(CarefulChannel(at_once, None))  # type: ignore[no-untyped-call]
    stub = LazyStub(rpc.ControlStub, CarefulChannel(lazily, None))
    for name in vars(whole):
        getattr(stub, name)
    assert lazily.made == at_once.made and len(lazily.made) > 30
    with pytest.raises(AttributeError):
        _ = stub.Nothing
