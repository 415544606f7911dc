"""The second baseline of `bench ring`: a bare gRPC stream of bytes between two processes, with the options of a hop.

Both ends run in children of their own, with the environment and the event loop of runners, so that all that differs
from a hop are frames, stages and the driver.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import grpc

from exo_mesh.cli.bench.measuring import LineChild
from exo_mesh.rings.hosting.runner_child import RUNNER_ENVIRONMENT
from exo_mesh.security.credentials import Credentials
from exo_mesh.wire.channels import bind, new_server, open_channel

MESSAGE_BYTES = 1024 * 1024
"""Longest message: the fastest size between 64 KiB and 16 MiB for a bare stream on loopback."""

ANSWER_S = 120.0
"""Longest wait for the start of a child, and for one measurement."""

_METHOD = "/exo_mesh.bench/Stream"


@dataclass(frozen=True, slots=True)
class RawStream:
    """The sending child. Each call blocks until its answer is there."""

    child: LineChild

    def ping_pong(self, payload_bytes: int, laps: int) -> tuple[float, float]:
        """Measures (p50, p99) seconds per hop: half of a round trip with `payload_bytes` each way."""
        p50, p99 = self._ask("echo", payload_bytes, laps)
        return p50, p99

    def bulk(self, payload_bytes: int, count: int) -> float:
        """Measures bytes per second one way: `count` payloads, and one confirmation at the end."""
        (bytes_per_s,) = self._ask("sink", payload_bytes, count)
        return bytes_per_s

    def _ask(self, kind: str, payload_bytes: int, count: int) -> list[float]:
        self.child.tell(f"{kind} {payload_bytes} {count}")
        answer: list[float] = json.loads(self.child.line(ANSWER_S))
        return answer


@contextlib.contextmanager
def raw_stream(cpus: tuple[int, int] | None, tls: Credentials | None) -> Iterator[RawStream]:
    """Starts both children and connects them. cpus: pins the sender and the receiver to one each."""
    secret = json.dumps({name: base64.b64encode(pem).decode() for name, pem in asdict(tls).items()} if tls else None)
    with _child("receive") as receiver, _child("send") as sender:
        for child in (receiver, sender):
            child.tell(secret)
        sender.tell(str(int(receiver.line(ANSWER_S))))
        if cpus:
            os.sched_setaffinity(sender.process.pid, {cpus[0]})
            os.sched_setaffinity(receiver.process.pid, {cpus[1]})
        yield RawStream(sender)


def _child(role: str) -> LineChild:
    command = [sys.executable, "-m", "exo_mesh.cli.bench.raw_grpc", role]
    return LineChild(command, "the bare gRPC stream", {**os.environ, **RUNNER_ENVIRONMENT})


async def _receive(tls: Credentials | None) -> None:
    """Serves streams until the parent ends this process."""
    server = new_server()
    method: grpc.RpcMethodHandler[bytes, bytes] = grpc.stream_stream_rpc_method_handler(_serve)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("exo_mesh.bench", {"Stream": method}),))
    port = bind(server, "127.0.0.1:0", tls)
    await server.start()
    print(port, flush=True)
    await asyncio.to_thread(sys.stdin.read)  # it ends with the parent, however that ends


async def _serve(_requests: object, context: grpc.aio.ServicerContext[Any, Any]) -> None:
    """Executes commands "KIND BYTES COUNT", each followed by its payloads, until the stream ends."""
    while isinstance(command := await context.read(), bytes):
        kind, size, count = command.decode().split()
        if kind == "echo":
            for _ in range(int(count)):
                await context.write(await context.read())
            continue
        missing = int(size) * int(count)
        while missing > 0:
            missing -= len(await context.read())
        await context.write(b"\x01")


async def _send(tls: Credentials | None) -> None:
    """Executes the commands of the parent, one line each."""
    async with open_channel(f"127.0.0.1:{sys.stdin.readline().strip()}", tls) as channel:
        call: grpc.aio.StreamStreamCall[bytes, bytes] = channel.stream_stream(_METHOD)()
        while line := sys.stdin.readline():
            kind, size, count = line.split()
            await call.write(line.encode())
            measure = _echo if kind == "echo" else _sink
            print(json.dumps(await measure(call, int(size), int(count))), flush=True)


async def _echo(call: grpc.aio.StreamStreamCall[bytes, bytes], size: int, count: int) -> list[float]:
    payload, times = bytes(size), []
    for _ in range(count):
        start = time.perf_counter()
        await call.write(payload)
        await call.read()
        times.append((time.perf_counter() - start) / 2)
    return [statistics.median(times), statistics.quantiles(times, n=100)[98]]


async def _sink(call: grpc.aio.StreamStreamCall[bytes, bytes], size: int, count: int) -> list[float]:
    messages = [bytes(min(MESSAGE_BYTES, size - start)) for start in range(0, size, MESSAGE_BYTES)]
    start = time.perf_counter()
    for _ in range(count):
        for message in messages:
            await call.write(message)
    await call.read()
    return [size * count / (time.perf_counter() - start)]


def main(role: str) -> None:
    """Runs one of the two children."""
    import uvloop  # as in a runner

    given = json.loads(sys.stdin.readline())
    tls = Credentials(**{name: base64.b64decode(pem) for name, pem in given.items()}) if given else None
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_receive(tls) if role == "receive" else _send(tls))


if __name__ == "__main__":
    main(sys.argv[1])
