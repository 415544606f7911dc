"""A node of a closed mesh under noise: 100,000 datagrams and 100,000 connections at all its doors, on the loopback."""

from __future__ import annotations

import asyncio
import random
import socket
import sys
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from exo_mesh.cli.client.child_node import ChildNode, client_of, free_port
from exo_mesh.mesh.discovery.udp_sockets import LOOPBACK_BROADCAST
from exo_mesh.security.datagrams import MAGIC, Seal
from exo_mesh.security.secret import new_secret, write_new
from tests.support.processes import QUIET_FLAGS, clean_environ, eventually

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(sys.platform != "linux", reason="counts files and dropped datagrams as Linux does"),
]

COUNT = 100_000
NUM_STEPS = 20
AT_ONCE = 50
MIB = 2**20


@pytest.fixture
def ports() -> tuple[int, int]:
    """Of announcements and of the data plane."""
    return free_port(socket.SOCK_DGRAM), free_port()


@pytest.fixture
def node(tmp_path: Path, ports: tuple[int, int]) -> Iterator[ChildNode]:
    """A node that hears announcements and runs a stage."""
    write_new(tmp_path / "secret", new_secret())
    udp, data = ports
    flags = [*QUIET_FLAGS, "--discovery", "udp", "--listen-port", str(udp), "--broadcast-port", str(udp)]
    flags += ["--api-port", "0", "--data-ports", f"{data}-{data}", "--secret-file", str(tmp_path / "secret")]
    child = ChildNode(flags, tmp_path / "log", clean_environ(tmp_path))
    try:
        yield child
    finally:
        child.stop()


class Meter:
    """The memory and the files of the node and of its runner, and its lines of log."""

    def __init__(self, node: ChildNode) -> None:
        own = psutil.Process(node.pid)
        self._processes = [own, *node.runners()]
        self._log = node.log_path

    def mib(self) -> list[float]:
        return [process.memory_info().rss / MIB for process in self._processes]

    def num_fds(self) -> int:
        return sum(process.num_fds() for process in self._processes)

    def lines(self) -> list[str]:
        return self._log.read_text(errors="replace").splitlines()


def junk(rng: random.Random, number: int) -> bytes:
    """Noise, the beginnings of what would be heard, and what goes wrong later than at the first byte."""
    noise = rng.randbytes(rng.randrange(1, 600))
    hello = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"
    heads = [b"", hello, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"GET / HTTP/1.1\r\n", MAGIC]
    return heads[number % len(heads)] + noise


async def datagrams(rng: random.Random, port: int, count: int) -> None:
    """To where a node that is bound to the loopback listens; some are signed, with another secret."""
    stranger = Seal(rng.randbytes(32))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1)
        for number in range(count):
            data = junk(rng, number)
            sock.sendto(stranger.close(data) if number % 7 == 0 else data, (LOOPBACK_BROADCAST, port))
            if number % 20 == 0:
                await asyncio.sleep(0.002)  # else many are lost before the node has seen them


def num_dropped(port: int) -> int:
    """Datagrams to a port that the kernel dropped because the node was busy."""
    rows = [line.split() for line in Path("/proc/net/udp").read_text().splitlines()[1:]]
    return sum(int(row[-1]) for row in rows if row[1].endswith(f":{port:04X}"))


async def connections(rng: random.Random, ports: list[int], count: int) -> None:
    """Each says some junk, waits a moment for an answer, and hangs up; every other one by a reset."""

    async def knock(number: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", ports[number % len(ports)])
        if number % 2:
            linger = b"\x01\x00\x00\x00\x00\x00\x00\x00"
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        writer.write(junk(rng, number))
        with suppress(ConnectionError, TimeoutError):
            await asyncio.wait_for(reader.read(100), 0.02)
        writer.close()

    for start in range(0, count, AT_ONCE):
        await asyncio.gather(*(knock(number) for number in range(start, start + AT_ONCE)))


def test_memory_is_flat_and_the_log_quiet(node: ChildNode, ports: tuple[int, int]) -> None:
    ready = node.wait_ready(60)
    client = client_of(ready)
    chat: dict[str, Any] = {"model": "exo-mesh-demo", "max_tokens": 4, "messages": [{"role": "user", "content": "Hi."}]}
    assert client.post("/v1/chat/completions", chat, 60)["usage"]["completion_tokens"] == 4
    doors = [int(ready[name].rpartition(":")[2].strip("/")) for name in ("grpc_address", "api_url")] + [ports[1]]
    view = client.get("/state")["view"]
    (instance,) = view["instances"]
    assert instance["stages"][0]["endpoint"].endswith(f":{ports[1]}")
    meter, rng = Meter(node), random.Random(1)

    endure("datagrams", meter, lambda: datagrams(rng, ports[0], COUNT // NUM_STEPS))
    print(f"  {num_dropped(ports[0])} of them were dropped by the kernel")
    assert num_dropped(ports[0]) < COUNT / 2
    endure("connections", meter, lambda: connections(rng, doors, COUNT // NUM_STEPS))

    assert client.post("/v1/chat/completions", chat, 60)["usage"]["completion_tokens"] == 4
    assert client.get("/state")["view"] == view


def endure(what: str, meter: Meter, step: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """All steps of a flood, what they cost, and whether that is little."""
    num_fds, num_lines = meter.num_fds(), len(meter.lines())
    begin, course = time.monotonic(), [meter.mib()]
    for _ in range(NUM_STEPS):
        asyncio.run(step())
        course.append(meter.mib())
    took_s = time.monotonic() - begin
    assert eventually(lambda: meter.num_fds() <= num_fds + 2, 30), (num_fds, meter.num_fds())
    lines = meter.lines()[num_lines:]
    print(f"{COUNT} {what} in {took_s:.0f} s: MiB of node and runner at the start, after each tenth:")
    print("  " + " ".join("/".join(f"{mib:.1f}" for mib in mibs) for mibs in course[::2]))
    print(f"  files {num_fds} -> {meter.num_fds()}, {len(lines)} lines of log", *lines, sep="\n    ")
    for first, half, last in zip(course[0], course[NUM_STEPS // 2], course[-1], strict=True):
        assert last - first < 20 and last - half < 4
    assert any("refused" in line for line in lines), "they were heard"
    assert len(lines) <= 2 + took_s / 20
