"""Both ends of a bare gRPC stream of bytes, each in a process of its own, for `exo_mesh.cli.bench.raw_grpc`."""

from __future__ import annotations

import asyncio
import base64
import json
import statistics
import sys
import time
from typing import Any

import grpc

from exo_mesh.security.credentials import Credentials
from exo_mesh.wire.channels import bind, new_server, open_channel

MESSAGE_BYTES = 1024 * 1024
"""Longest message: the fastest size between 64 KiB and 16 MiB for a bare stream on loopback."""

_METHOD = "/exo_mesh.bench/Stream"


async def _receive(tls: Credentials | None) -> None:
    """Serves streams until the parent ends this process."""
    server = new_server()
    method: grpc.RpcMethodHandler[bytes, bytes] = grpc.stream_stream_rpc_method_handler(_serve)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("exo_mesh.bench", {"Stream": method}),))
    port = bind(server, "127.0.0.1:0", tls)
    await server.start()
    _say(port)
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
            _say(await measure(call, int(size), int(count)))


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


def _say(answer: Any) -> None:
    sys.stdout.write(f"{json.dumps(answer)}\n")
    sys.stdout.flush()


def main(role: str) -> None:
    """Runs one of the two children."""
    import uvloop  # as in a runner

    given = json.loads(sys.stdin.readline())
    tls = Credentials(**{name: base64.b64decode(pem) for name, pem in given.items()}) if given else None
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_receive(tls) if role == "receive" else _send(tls))


if __name__ == "__main__":
    main(sys.argv[1])
