"""API keys of a closed mesh: made at one peer, valid at all; removed at one peer, refused by all."""

from __future__ import annotations

import datetime
import logging
from pathlib import Path

import pytest

from exo_mesh.mesh.membership.calls import SHARE_KEYS
from exo_mesh.node.node import Node
from exo_mesh.security.api_keys import FILE_NAME, KeyFile, Role, new_key, revoke
from exo_mesh.security.key_table import ApiKey, merge
from exo_mesh.security.secret import new_secret
from exo_mesh.wire.key_codec import keys_to_proto
from exo_mesh.wire.proto import control_pb2 as pb
from tests.support.nodes import Machine, make_node, mesh, until

NOW = datetime.datetime(2030, 5, 1, tzinfo=datetime.UTC)
WITHIN_S = 2.0


def add(node: Node, *keys: ApiKey) -> None:
    """What `exo-mesh key` does, in another process."""
    KeyFile(node.settings.home / FILE_NAME).change(lambda held: merge(held, keys).values())


def takes(node: Node, text: str) -> bool:
    return node.keys.file.check(text) is not None


async def test_every_peer_takes_a_new_key_and_refuses_a_removed_one_within_two_seconds(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    text, key = new_key(Role.USE, NOW)
    async with mesh(tmp_path, 3, secret=new_secret()) as nodes:
        add(nodes[0], key)
        await until(lambda: all(takes(node, text) for node in nodes), WITHIN_S)
        assert all(node.keys.file.check(text) == key for node in nodes), "with its role"
        # on disk as well, so that it is valid after a restart
        await until(lambda: all(key in KeyFile(node.settings.home / FILE_NAME).read() for node in nodes), WITHIN_S)
        add(nodes[2], revoke(key.id, NOW))
        await until(lambda: not any(takes(node, text) for node in nodes), WITHIN_S)
        await until(lambda: len({node.keys.digest for node in nodes}) == 1, WITHIN_S)
        for node in nodes:
            assert key.digest not in repr(node.observation.state())
    assert text[-43:] not in caplog.text and key.digest not in caplog.text


@pytest.mark.extended
async def test_a_peer_that_was_away_learns_what_was_removed_and_does_not_bring_it_back(tmp_path: Path) -> None:
    secret = new_secret()
    (text, key), (newer_text, newer) = new_key(Role.USE, NOW), new_key(Role.ADMIN, NOW)
    async with mesh(tmp_path, 2, secret=secret) as nodes:
        away = make_node(
            tmp_path / "away", "away", Machine(), secret=secret, bootstrap_peers=(f"127.0.0.1:{nodes[0].grpc_port}",)
        )
        await away.start()
        add(nodes[0], key)
        await until(lambda: takes(away, text))
        await away.stop()
        add(nodes[0], revoke(key.id, NOW), newer)
        await until(lambda: not takes(nodes[1], text) and takes(nodes[1], newer_text))

        back = make_node(
            tmp_path / "away", "away", Machine(), secret=secret, bootstrap_peers=(f"127.0.0.1:{nodes[0].grpc_port}",)
        )
        assert takes(back, text), "it cannot know yet"
        await back.start()
        try:
            await until(lambda: not takes(back, text) and takes(back, newer_text))
            await until(lambda: len({node.keys.digest for node in (*nodes, back)}) == 1)
            assert not any(takes(node, text) for node in nodes)
        finally:
            await back.stop()


@pytest.mark.extended
async def test_keys_that_both_had_before_they_met_are_valid_at_both(tmp_path: Path) -> None:
    made = [new_key(Role.USE, NOW) for _ in range(2)]
    for index, (_, key) in enumerate(made):
        KeyFile(tmp_path / f"n{index}" / FILE_NAME).write([key])
    async with mesh(tmp_path, 2, secret=new_secret()) as nodes:
        await until(lambda: all(takes(node, text) for node in nodes for text, _ in made))


async def test_in_an_open_mesh_nobody_plants_a_key_and_none_is_told(tmp_path: Path) -> None:
    (text, key), (planted_text, planted) = new_key(Role.USE, NOW), new_key(Role.ADMIN, NOW)
    async with mesh(tmp_path, 2) as nodes:
        add(nodes[0], key)
        await until(lambda: takes(nodes[0], text))
        request = pb.ShareKeysRequest(keys=keys_to_proto([planted]))
        client = nodes[1].membership.client_at(f"127.0.0.1:{nodes[0].grpc_port}")
        with pytest.raises(Exception, match="only in a mesh with a secret"):
            await client.call(SHARE_KEYS, request, 2.0)
        await client.close()
        assert not takes(nodes[0], planted_text) and not takes(nodes[1], text)
        assert [node.keys.digest for node in nodes] == [0, 0]


async def test_keys_from_the_mesh_hold_though_the_file_cannot_be_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    text, key = new_key(Role.USE, NOW)
    node = make_node(tmp_path / "n", "n", Machine(), secret=new_secret())
    try:
        node.keys.file.write([key])
        node.settings.home.joinpath(f".{FILE_NAME}.lock").mkdir()
        assert takes(node, text)
        await node.keys.compare(0, [revoke(key.id, NOW)])
        assert not takes(node, text)
        assert "a restart would forget them" in caplog.text
    finally:
        await node.stop()
