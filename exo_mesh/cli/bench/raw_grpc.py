"""The second baseline of `bench ring`: a bare gRPC stream of bytes between two processes, with the options of a hop.

Both ends run in children of their own, with the environment and the event loop of runners, so that all that differs
from a hop are frames, stages and the driver.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import asdict, dataclass

from exo_mesh.errors import TransportError
from exo_mesh.rings.hosting.runner_child import RUNNER_ENVIRONMENT
from exo_mesh.security.credentials import Credentials

ANSWER_S = 120.0
"""Longest wait for the start of a child, and for one measurement."""


@dataclass(frozen=True, slots=True)
class RawStream:
    """The sending child. Each call blocks until its answer is there."""

    child: subprocess.Popen[bytes]

    def ping_pong(self, payload_bytes: int, laps: int) -> tuple[float, float]:
        """Measures (p50, p99) seconds per hop: half of a round trip with `payload_bytes` each way."""
        p50, p99 = self._ask("echo", payload_bytes, laps)
        return p50, p99

    def bulk(self, payload_bytes: int, count: int) -> float:
        """Measures bytes per second one way: `count` payloads, and one confirmation at the end."""
        (bytes_per_s,) = self._ask("sink", payload_bytes, count)
        return bytes_per_s

    def _ask(self, kind: str, payload_bytes: int, count: int) -> list[float]:
        _tell(self.child, f"{kind} {payload_bytes} {count}")
        answer: list[float] = json.loads(_answer(self.child))
        return answer


@contextlib.contextmanager
def raw_stream(cpus: tuple[int, int] | None, tls: Credentials | None) -> Iterator[RawStream]:
    """Starts both children and connects them. cpus: pins the sender and the receiver to one each."""
    secret = json.dumps({name: base64.b64encode(pem).decode() for name, pem in asdict(tls).items()} if tls else None)
    with _child("receive", secret) as receiver:
        port = int(_answer(receiver))
        with _child("send", secret) as sender:
            _tell(sender, str(port))
            if cpus:
                os.sched_setaffinity(sender.pid, {cpus[0]})
                os.sched_setaffinity(receiver.pid, {cpus[1]})
            yield RawStream(sender)


@contextlib.contextmanager
def _child(role: str, secret: str) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "exo_mesh.wire.bare_stream", role]
    environment = {**os.environ, **RUNNER_ENVIRONMENT}
    pipe = subprocess.PIPE
    # without a buffer, whose rest could not be written to a child that has ended
    with subprocess.Popen(command, bufsize=0, stdin=pipe, stdout=pipe, env=environment) as child:
        try:
            _tell(child, secret)
            yield child
        finally:
            child.kill()


def _tell(child: subprocess.Popen[bytes], line: str) -> None:
    assert child.stdin is not None
    try:
        child.stdin.write(f"{line}\n".encode())
    except BrokenPipeError as exc:
        raise TransportError("the bare gRPC stream ended") from exc


def _answer(child: subprocess.Popen[bytes]) -> bytes:
    """The next line of a child, which is killed after ANSWER_S without one. Raises TransportError."""
    assert child.stdout is not None
    deadline = threading.Timer(ANSWER_S, child.kill)
    deadline.daemon = True
    deadline.start()
    line = child.stdout.readline()
    deadline.cancel()
    if not line:
        raise TransportError(f"the bare gRPC stream ended, or gave no answer within {ANSWER_S:g} s")
    return line
