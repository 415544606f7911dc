"""Every form of the peers file; an edit takes effect, a bad one does not."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exo_mesh.errors import InputError
from exo_mesh.mesh.discovery.peers_file import PeersFileDiscovery, parse_peers
from exo_mesh.mesh.discovery.port import Announcement
from tests.mesh.discovery.waiting import until

MANUAL = {
    "peers": {
        "studio": {"address": "10.0.0.1", "port": 5001, "device_capabilities": {"memory": 1}},
        "box": {"address": "fd00::2", "port": 5000},
    }
}
HOSTFILE = [
    {"ssh": "studio1", "ips": ["10.0.0.1"], "rdma": [None, "rdma_en5"]},
    {"ssh": "me@studio2.local", "ips": [], "rdma": ["rdma_en5", None]},
]


@pytest.mark.parametrize(
    ("text", "peers"),
    [
        (json.dumps(MANUAL), ("10.0.0.1:5001", "[fd00::2]:5000")),
        (json.dumps(["10.0.0.1:5001", "studio"]), ("10.0.0.1:5001", "studio:5000")),
        (json.dumps([{"address": "box", "port": 7}, {"address": "den"}]), ("box:7", "den:5000")),
        (json.dumps([{"host": "box", "port": 7}, {"host": "den"}]), ("box:7", "den:5000")),
        (json.dumps({"peers": ["a:1"]}), ("a:1",)),
        (json.dumps(HOSTFILE), ("10.0.0.1:5000", "studio2.local:5000")),
        (json.dumps({"backend": "ring", "hosts": HOSTFILE}), ("10.0.0.1:5000", "studio2.local:5000")),
        ("# ours\n10.0.0.1:5001\n\nstudio  # the big one\n[fd00::2]:9\nfd00::3\n", ("10.0.0.1:5001", "studio:5000",
                                                                                   "[fd00::2]:9", "[fd00::3]:5000")),
        ("a:1\na:1\n", ("a:1",)),
        ("", ()),
        ('{"peers": {}}', ()),
    ],
)  # fmt: skip
def test_every_form_is_read(text: str, peers: tuple[str, ...]) -> None:
    assert parse_peers(text, "f", 5000) == peers


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "f: not valid JSON"),
        ({"nodes": {}}, "f: peers: is missing"),
        ({"peers": 3}, "f: peers: must be an object or a list"),
        ({"peers": {"studio": 3}}, 'f: peers.studio: must be "host:port" or an object'),
        ({"peers": {"studio": {"port": 1}}}, "f: peers.studio.address: is missing"),
        ({"peers": {"studio": {"address": "", "port": 1}}}, "f: peers.studio.address: must be a host"),
        ({"peers": {"studio": {"address": "a", "port": 0}}}, "f: peers.studio.port: must be a port from 1 to 65535"),
        ({"peers": {"studio": {"address": "a", "port": "1"}}}, "f: peers.studio.port: must be a port"),
        (["a:b"], 'f: [0]: "a:b" is not host:port'),
        ([{"host": "a b"}], "f: [0].host: must be a host or an address"),
        ("a:1\nb c\n", 'f: line 2: "b c" is not host:port'),
        ("a:99999", 'f: line 1: "a:99999" is not host:port'),
        ([f"h{n}:1" for n in range(1025)], "f: names 1025 peers, more than 1024"),
    ],
)
def test_a_bad_file_is_refused_with_path_and_field(content: Any, message: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_peers(content if isinstance(content, str) else json.dumps(content), "f", 5000)
    assert str(caught.value).startswith(message)


@given(st.text(max_size=300) | st.binary(max_size=300).map(lambda raw: raw.decode(errors="replace")))
def test_any_text_is_read_or_refused(text: str) -> None:
    for variant in (text, "{" + text, "[" + text):
        try:
            peers = parse_peers(variant, "f", 5000)
        except InputError:
            continue
        assert all(peer.rpartition(":")[2].isdigit() for peer in peers)


@pytest.mark.parametrize("content", [None, "{", b"\xff\xfe\x00"])
def test_a_file_that_is_missing_or_bad_at_the_start_is_refused(tmp_path: Path, content: str | bytes | None) -> None:
    path = tmp_path / "peers.json"
    if content is not None:
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(InputError, match=r"peers\.json: "):
        PeersFileDiscovery(path, 5000)


async def test_an_edit_takes_effect_and_a_bad_one_warns_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    path = tmp_path / "peers.json"
    path.write_text('["a:1"]')
    heard: list[str] = []
    discovery = PeersFileDiscovery(path, 5000, check_every_s=0.02)
    await discovery.start(Announcement("default", "me", 1), heard.append)
    await until(lambda: heard == ["a:1"])
    path.write_text('["a:1", "b:2"]')
    await until(lambda: "b:2" in heard, what="peers file: an edit is seen")
    path.write_text('["a:1", garbage')
    await until(lambda: caplog.records)
    path.unlink()
    await until(lambda: len(caplog.records) == 2)
    assert discovery.addresses == ("a:1", "b:2")
    path.write_text("c:3\n")
    await until(lambda: "c:3" in heard)
    await discovery.stop()
    first, second = (record.getMessage() for record in caplog.records)
    assert str(path) in first and "not valid JSON" in first and "keeping the 2 peers of the last valid file" in first
    assert "cannot be read: No such file" in second
