"""Measures the CPU time of the Python of a lap: `python -m tools.bench lap --stages 2 --streams 1`.

The stages run in this process with their real workers, driver, codec and both ends of each hop. Only gRPC is left out:
a message goes from one end to the other through a queue. So the figures are those of warm caches, and include what the
engine `dummy` does. The aim for a frame with one row is 80 µs at the driver and 50 µs at each other stage.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import time
from collections import deque
from collections.abc import Coroutine, Generator
from dataclasses import replace
from statistics import median
from typing import Any

from exo_mesh.base.versions import SPOKEN
from exo_mesh.cli.bench.local_ring import ring_request
from exo_mesh.cli.bench.ring import MODEL, ring_plan
from exo_mesh.domain.frame import Frame, RingHello
from exo_mesh.domain.plan import NO_BALLOT, Plan
from exo_mesh.domain.request import SamplingParams
from exo_mesh.errors import MeshError
from exo_mesh.rings.runner.calls import events_message
from exo_mesh.rings.runner.inbox import Submit
from exo_mesh.rings.runner.mailbox import Mailbox
from exo_mesh.rings.runner.stage_setup import StageSetup
from exo_mesh.rings.runner.worker import Worker
from exo_mesh.weights.store import ModelStore
from exo_mesh.wire.codec import decode_ack
from exo_mesh.wire.ring_link import RingLink
from exo_mesh.wire.ring_receiver import RingReceiver

START_TURNS = 1000
"""Turns of the event loop within which the first frame leaves."""


class _NoMessage:
    """Awaited by a receiver that finds no message: it gives the control back to the benchmark."""

    def __await__(self) -> Generator[_NoMessage, None, None]:
        yield self


class Wire:
    """A hop without gRPC: it stands for the call of the sending end, and for the context of the receiving end."""

    def __init__(self, link: RingLink) -> None:
        self._link = link
        self.messages: deque[bytes] = deque()

    async def read(self) -> bytes:
        while not self.messages:
            await _NoMessage()
        return self.messages.popleft()

    async def write(self, message: bytes) -> None:
        """Carry an acknowledgement back."""
        self._link._acknowledge(decode_ack(message))


class _Call:
    """The sending end of a wire."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire

    async def write(self, message: bytes) -> None:
        self._wire.messages.append(message)


class LapRing:
    """A ring in this process. ns: thread CPU time of each stage so far, in nanoseconds."""

    def __init__(self, plan: Plan, payload_bytes: int) -> None:
        directory, num_stages = ModelStore(()).find(MODEL), len(plan.stages)
        options = {"payload_bytes": str(payload_bytes)}
        setups = [StageSetup(plan, index, directory, options, 64, prefix_bytes=0) for index in range(num_stages)]
        self.workers = [Worker(setup) for setup in setups]
        self.links = [RingLink(RingHello(0, 0, "", NO_BALLOT, 0)) for _ in setups]
        self._wires = [Wire(self.links[index - 1]) for index in range(num_stages)]
        self._readers: list[Coroutine[Any, Any, None]] = []
        self.ns = [0] * num_stages
        for index, worker in enumerate(self.workers):
            worker.load(lambda _done, _total: None)
            receiver = RingReceiver(SPOKEN, plan.instance_id, plan.ballot, setups[index].before, worker.accept)
            self._readers.append(receiver._read(0, self._wires[index]))  # type: ignore[arg-type]
            self.links[index]._call = _Call(self._wires[(index + 1) % num_stages])  # type: ignore[assignment]

    async def start(self, mailboxes: list[Mailbox], tokens: int, temperature: float) -> list[asyncio.Task[None]]:
        """Starts the workers and submits a request for each mailbox; returns once the first frame has left."""
        running = [asyncio.create_task(self._run(*pair)) for pair in zip(self.workers, self.links, strict=True)]
        for number, mailbox in enumerate(mailboxes):
            request = replace(ring_request(f"r{number}", [1], tokens), sampling=SamplingParams(temperature=temperature))
            self.workers[-1].inbox.put_nowait(Submit(request, mailbox))
        for reader in self._readers:
            reader.send(None)
        for _ in range(START_TURNS):
            if any(wire.messages for wire in self._wires):
                return running
            await asyncio.sleep(0)
        raise MeshError("the ring did not start")

    async def _run(self, worker: Worker, link: RingLink) -> None:
        async def send(frame: Frame) -> None:
            await link.send(frame)

        await worker.run(send)

    def turn(self) -> bool:
        """Lets each stage compute the messages that have come. Returns whether there were any."""
        moved = False
        for index, wire in enumerate(self._wires):
            if wire.messages:
                begin = time.thread_time_ns()
                self._readers[index].send(None)
                self.ns[index] += time.thread_time_ns() - begin
                moved = True
        return moved

    def close(self) -> None:
        for reader in self._readers:
            reader.close()


async def measure(num_stages: int, streams: int, tokens: int, payload_bytes: int, temperature: float) -> list[float]:
    """CPU time of each stage for each token, in microseconds."""
    ring = LapRing(ring_plan(num_stages, "dummy"), payload_bytes)
    mailboxes = [Mailbox() for _ in range(streams)]
    running = await ring.start(mailboxes, tokens, temperature)
    got = 0
    try:
        while got < streams * tokens:
            if not ring.turn():
                await asyncio.sleep(0)  # the end of a request goes through the inbox
            for mailbox in mailboxes:
                got += _take(mailbox)
    finally:
        for task in running:
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(*running)
        ring.close()
    return [ns / got / 1000 for ns in ring.ns]


def _take(mailbox: Mailbox) -> int:
    """Takes all tokens, as the call of a request would. Returns their number."""
    updates = [mailbox.take() for _ in range(mailbox.backlog)]
    return len(events_message(updates).events) if updates else 0


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("lap", help="CPU time of the Python of a lap", description=__doc__)
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--streams", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=3000, help="of each stream")
    parser.add_argument("--payload", type=int, default=8192, metavar="BYTES", help="activation of one token")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    gc.collect()
    gc.freeze()  # as a runner does
    rounds = [
        asyncio.run(measure(args.stages, args.streams, args.tokens, args.payload, args.temperature))
        for _ in range(args.rounds)
    ]
    *stages, driver = (median(column) for column in zip(*rounds, strict=True))
    others = f", each other stage {median(stages):.0f} us" if stages else ""
    print(f"{args.stages} stages, {args.streams} streams, medians of {args.rounds} rounds, CPU time for each token:")
    print(f"driver {driver:.0f} us{others}, {driver + sum(stages):.0f} us together")
    return 0
