"""Nodes with a secret: those who share it work together, and nobody else gets in."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import grpc
import pytest

from exo_mesh.node.node import Node
from exo_mesh.security.certificates import authority
from exo_mesh.security.secret import new_secret
from exo_mesh.wire import handshake_counter
from exo_mesh.wire.proto import control_pb2, driver_pb2
from exo_mesh.wire.ring_link import FRAMES_METHOD
from tests.security.strangers import channels, refused
from tests.support.nodes import Machine, a_request, instances, make_node, mesh, tokens, until

CONTROL_METHODS = [
    f"/{service.full_name}/{method.name}"
    for service in control_pb2.DESCRIPTOR.services_by_name.values()
    for method in service.methods
]
GENERATE = driver_pb2.DESCRIPTOR.services_by_name["Driver"].methods_by_name["Generate"]


def authority_pem(secret: str) -> bytes:
    from cryptography.hazmat.primitives.serialization import Encoding

    return authority(secret).public_bytes(Encoding.PEM)


async def test_two_peers_with_one_secret_answer_and_let_no_stranger_say_anything(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    secret = new_secret()
    async with mesh(tmp_path, 2, secret=secret, min_peers=2) as nodes:
        before = await tokens(nodes[0], a_request("before"))
        await until(lambda: [one.state for one in instances(nodes[1])] == ["ready"])
        (instance,) = instances(nodes[1])
        assert len(instance.stages) == 2
        assert nodes[0].observation.health().mesh == "closed"

        for node in nodes:
            for name, channel in channels(f"127.0.0.1:{node.grpc_port}", authority_pem(secret)).items():
                for method in CONTROL_METHODS:
                    assert await refused(channel, method), f"{name}: {method}"
                await channel.close()
        for stage in instance.stages:
            for name, channel in channels(stage.endpoint, authority_pem(secret)).items():
                assert await refused(channel, FRAMES_METHOD, request_stream=True), name
                assert await refused(channel, f"/{GENERATE.containing_service.full_name}/{GENERATE.name}"), name
                await channel.close()

        assert await tokens(nodes[0], a_request("after")) == before
        assert len(instances(nodes[0])) == 1
        for node in nodes:
            assert secret not in repr(node.observation.state())
    assert secret not in caplog.text
    assert "PRIVATE KEY" not in caplog.text


async def test_the_methods_that_are_tried_are_all_there_are() -> None:
    """The loop above is worth nothing if it is empty, or if a call that is let in looks like a refused one."""
    assert len(CONTROL_METHODS) >= 11
    assert "/exo_mesh.Control/Hello" in CONTROL_METHODS


async def test_an_open_mesh_lets_the_same_calls_in(tmp_path: Path) -> None:
    async with mesh(tmp_path, 1) as (node,), grpc.aio.insecure_channel(f"127.0.0.1:{node.grpc_port}") as channel:
        assert not await refused(channel, "/exo_mesh.Control/Cancel")
        assert node.observation.health().mesh == "open"


async def strangers(tmp_path: Path, *secrets: str) -> list[Node]:
    """Nodes of which each later one dials the first."""
    nodes: list[Node] = []
    for index, secret in enumerate(secrets):
        bootstrap = (f"127.0.0.1:{nodes[0].grpc_port}",) if nodes else ()
        node = make_node(tmp_path / f"n{index}", f"n{index}", Machine(), bootstrap_peers=bootstrap, secret=secret)
        await node.start()
        nodes.append(node)
    return nodes


@pytest.mark.parametrize(
    ("first", "second", "here", "there"),
    [
        pytest.param(
            new_secret(),
            new_secret(),
            "to the control port: they did not prove",
            "has another secret than this one",
            id="another secret",
        ),
        pytest.param(
            new_secret(),
            "",
            "to the control port: they did not prove",
            "its mesh has a secret, but this node has none",
            id="no secret",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "",
            new_secret(),
            "",
            "has another secret than this one, or none",
            id="only the newcomer has one",
            marks=pytest.mark.extended,
        ),
    ],
)
async def test_a_wrong_secret_is_one_clear_line_on_both_sides(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    first: str,
    second: str,
    here: str,
    there: str,
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(handshake_counter, "PATIENCE_S", 1.0)
    monkeypatch.setattr(handshake_counter, "LOOK_EVERY_S", 0.1)
    nodes = await strangers(tmp_path, first, second)
    try:
        await until(lambda: there in caplog.text and here in caplog.text)
        await asyncio.sleep(0.7)  # time for a second line, which must not come
        warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
        assert len(warnings) == (2 if here else 1), warnings
        for node in nodes:
            assert len(node.membership.peers) == 0
        assert any(there in reason.message for reason in nodes[1].observation.health().reasons)
    finally:
        await asyncio.gather(*(node.stop() for node in nodes))
