"""The port for probe datagrams of real nodes: flooded with noise, forged, copied and very long datagrams, and closed
by a setting."""

from __future__ import annotations

import random
import socket
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from exo_mesh.cli.client.child_node import ChildNode, client_of, free_port, running_node
from exo_mesh.security.probe_seal import OPEN, SEALED, ProbeSeal, seal_with
from exo_mesh.security.secret import new_secret
from exo_mesh.wire.probes.messages import ProbeQuestion, encode_question, new_token
from exo_mesh.wire.proto import control_pb2 as pb
from tests.support.processes import QUIET_FLAGS, clean_environ, eventually

COUNT = 30_000
MIB = 2**20


@pytest.fixture
def secret() -> str:
    return new_secret()


@dataclass(frozen=True, slots=True)
class FloodedNode:
    child: ChildNode
    ready: Mapping[str, Any]

    @property
    def log(self) -> str:
        return self.child.log_path.read_text(errors="replace")

    def sees(self) -> list[str]:
        return sorted(peer["name"] for peer in client_of(self.ready).get("/state", 10.0)["view"]["peers"])


@pytest.fixture
def nodes(tmp_path: Path, secret: str) -> Iterator[list[FloodedNode]]:
    """Two nodes that know each other."""
    (tmp_path / "secret").write_text(secret)
    first = free_port()
    children: list[ChildNode] = []
    try:
        for name in ("one", "two"):
            (tmp_path / name).mkdir()
            flags = [*QUIET_FLAGS, "--name", name, "--api-port", "0", "--secret-file", str(tmp_path / "secret")]
            flags += ["--discovery", "manual", "--grpc-port", str(first if name == "one" else free_port())]
            flags += ["--bootstrap-peers", f"127.0.0.1:{first}"]
            children.append(ChildNode(flags, tmp_path / name / "log", clean_environ(tmp_path / name)))
        found = [FloodedNode(child, child.wait_ready(60)) for child in children]
        assert eventually(lambda: all(node.sees() == ["one", "two"] for node in found), 30)
        yield found
    finally:
        for child in children:
            child.stop()


def junk(rng: random.Random, stranger: ProbeSeal, copied: bytes, number: int) -> bytes:
    """A datagram that no node should answer, of another kind for each number."""
    question = encode_question(ProbeQuestion(new_token(), 1, pb.ProbeRequest(from_peer="x", target="y")))
    kinds = [
        rng.randbytes(rng.randrange(1500)),
        SEALED + rng.randbytes(rng.randrange(1200)),
        OPEN + question,
        stranger.close(question),
        copied,
        SEALED + bytes(60_000),  # in fragments
        b"",
    ]
    return kinds[number % len(kinds)]


@pytest.mark.extended
@pytest.mark.timeout(240)
def test_a_flood_of_a_nodes_port_for_probes_harms_nobody(nodes: list[FloodedNode], secret: str) -> None:
    host, _, port = nodes[0].ready["grpc_address"].rpartition(":")
    target, rng = (host, int(port)), random.Random(3)
    process = psutil.Process(nodes[0].child.pid)
    members_question = encode_question(ProbeQuestion(new_token(), 1, pb.ProbeRequest(from_peer="x", target="y")))
    copied, stranger = seal_with(secret).close(members_question), ProbeSeal(b"o" * 32)
    memory = [process.memory_info().rss]
    num_fds = process.num_fds()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.bind(("127.0.0.1", 0))
        sock.setblocking(False)
        for number in range(COUNT):
            sock.sendto(junk(rng, stranger, copied, number), target)
            if number % 50 == 0:
                time.sleep(0.002)  # so that the node, too, gets a core
            if number % (COUNT // 3) == 0:
                memory.append(process.memory_info().rss)
        memory.append(process.memory_info().rss)
        assert all(node.sees() == ["one", "two"] for node in nodes)
        with pytest.raises(BlockingIOError):
            sock.recv(2000)  # no answer to any of them
    logs = [node.log for node in nodes]
    assert sum("probe datagram" in line for line in logs[0].splitlines()) in (1, 2), "at most one a minute"
    assert not any("suspected" in log or "Traceback" in log for log in logs)
    assert memory[-1] - memory[1] < 8 * MIB, [round(rss / MIB, 1) for rss in memory]
    assert process.num_fds() <= num_fds + 8


@pytest.mark.parametrize(("flags", "is_open"), [((), True), (("--no-probe-datagrams",), False)])
def test_a_setting_keeps_the_port_for_probes_closed(tmp_path: Path, flags: tuple[str, ...], is_open: bool) -> None:
    with running_node(tmp_path / "home", ["--engine", "dummy", *flags], clean_environ(tmp_path)) as node:
        host, _, port = node.ready["grpc_address"].rpartition(":")
        assert can_bind(host, int(port)) is not is_open


def can_bind(host: str, port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            sock.bind((host, port))
        except OSError:
            return False
    return True
