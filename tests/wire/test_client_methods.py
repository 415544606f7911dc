"""A client of a peer makes the calls of its rows when they are first used: a node may know a thousand addresses."""

from __future__ import annotations

from typing import Any

import grpc
import pytest

from exo_mesh.mesh.membership.calls import PROBE
from exo_mesh.wire import control_client
from exo_mesh.wire.control_client import ControlClient
from exo_mesh.wire.proto import control_pb2 as pb


class Counting:
    """A channel that counts the calls that are made of it, none of which reaches a peer."""

    def __init__(self) -> None:
        self.made: list[str] = []

    def unary_unary(self, path: str, *args: Any) -> Any:
        self.made.append(path)

        async def call(request: pb.ProbeRequest, **options: Any) -> pb.ProbeReply:
            return pb.ProbeReply()

        return call

    def get_state(self) -> grpc.ChannelConnectivity:
        return grpc.ChannelConnectivity.IDLE

    async def close(self) -> None: ...


async def test_a_call_is_made_at_its_first_use_and_once(monkeypatch: pytest.MonkeyPatch) -> None:
    channel = Counting()
    monkeypatch.setattr(control_client, "open_channel", lambda *args: channel)
    client = ControlClient("127.0.0.1:1")
    assert channel.made == []
    for _ in range(2):
        await client.call(PROBE, pb.ProbeRequest())
    assert channel.made == [PROBE.path]
    await client.close()
