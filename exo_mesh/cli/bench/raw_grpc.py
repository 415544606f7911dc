"""The second baseline of `bench ring`: a bare gRPC stream of bytes between two processes, with the options of a hop.

Both ends run in children of their own, with the environment and the event loop of runners, so that all that differs
from a hop are frames, stages and the driver.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict

import msgspec

from exo_mesh.cli.bench.measuring import LineChild
from exo_mesh.rings.hosting.runner_child import RUNNER_ENVIRONMENT
from exo_mesh.security.credentials import Credentials

ANSWER_S = 120.0
"""Longest wait for the start of a child, and for one measurement."""


class RawStream(msgspec.Struct, frozen=True):
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
    command = [sys.executable, "-m", "exo_mesh.wire.bare_stream", role]
    return LineChild(command, "the bare gRPC stream", {**os.environ, **RUNNER_ENVIRONMENT})
