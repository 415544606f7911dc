"""Whole nodes in one process, on the loopback, with the dummy engine and the shipped model."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import psutil

from exo_mesh.domain.reports import InstanceReport
from exo_mesh.domain.request import GenerateRequest, SamplingParams, TokenEvent
from exo_mesh.domain.runner_limits import RunnerLimits
from exo_mesh.machine.memory import MemoryReading
from exo_mesh.mesh.membership.detector import Timing
from exo_mesh.node.node import Node
from exo_mesh.node.wiring import Tuning
from exo_mesh.rings.hosting.runner_starter import HostLimits
from exo_mesh.rings.hosting.supervisor import RUNNER_COMMAND
from exo_mesh.rings.serving.request_run import Patience
from exo_mesh.settings.config import Settings

MODEL = "exo-mesh-demo"
GB = 10**9

SLOW = {"cost_ms": "10"}
"""Engine options of a dummy engine that takes 10 ms for each frame."""

FAST = Timing(period_s=0.2, probe_s=1.0, suspicion_s=1.0, gossip_s=0.05, call_s=2.0)


async def until(condition: Callable[[], object], timeout_s: float = 15.0) -> None:
    """Poll until the condition holds; the test fails if it never does."""
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.01)


class Machine:
    """What a test may change of a node's surroundings while it runs."""

    def __init__(self, usable_bytes: int = 8 * GB) -> None:
        self.usable_bytes = usable_bytes

    def read_memory(self) -> MemoryReading:
        # headroom is a tenth of the total, at most 1 GiB
        return MemoryReading(20 * 2**30, self.usable_bytes + 2**30)


def make_node(
    home: Path,
    name: str,
    machine: Machine,
    *,
    max_resumes: int = 3,
    silence_s: float = 10.0,
    limits: RunnerLimits | None = None,
    command: Sequence[str] = RUNNER_COMMAND,
    **settings: Any,
) -> Node:
    """Not started yet."""
    values: dict[str, Any] = {
        "home": home,
        "name": name,
        "host": "127.0.0.1",
        "grpc_port": 0,
        "api": False,
        "discovery": (),
        "engine": "dummy",
        "engine_options": {},
        "context_limit": 2048,
        "auto_replicas": "off",
        "measure_engines": "off",
    }
    host = HostLimits(limits or RunnerLimits(silence_s=silence_s, stopped_s=silence_s / 5), command)
    tuning = Tuning(timing=FAST, host=host, patience=Patience(max_resumes=max_resumes))
    return Node(Settings(**{**values, **settings}), memory_reader=machine.read_memory, tuning=tuning)


@asynccontextmanager
async def mesh(
    tmp_path: Path,
    count: int,
    *,
    usable_bytes: tuple[int, ...] = (),
    commands: tuple[Sequence[str], ...] = (),
    each: Sequence[Mapping[str, Any]] = (),
    **options: Any,
) -> AsyncIterator[list[Node]]:
    """Nodes that all know each other, the first by address; stopped at the end, leaving no child process. each:
    settings of one node, besides those of all."""
    nodes: list[Node] = []
    try:
        for index in range(count):
            machine = Machine(usable_bytes[index] if usable_bytes else 8 * GB)
            bootstrap = (f"127.0.0.1:{nodes[0].grpc_port}",) if nodes else ()
            command = commands[index] if commands else RUNNER_COMMAND
            own = {**options, **(each[index] if each else {})}
            node = make_node(
                tmp_path / f"n{index}", f"n{index}", machine, bootstrap_peers=bootstrap, command=command, **own
            )
            nodes.append(node)
            await node.start()
        await until(lambda: all(knows_all(node, count) for node in nodes))
        yield nodes
    finally:
        await asyncio.gather(*(node.stop() for node in nodes))
    assert not runners(), "a runner outlived its node"


def knows_all(node: Node, count: int) -> bool:
    peers = node.membership.view.peers()
    return len(peers) == count and len(node.membership.telemetry) == count and all(peer.models for peer in peers)


def runners() -> list[int]:
    """Pids of the runner processes that this process has started and that still run. Runners of nodes that are
    processes of their own do not count: their nodes have started them."""
    found = []
    for child in psutil.Process(os.getpid()).children():
        try:
            if "exo_mesh.rings.runner" in child.cmdline() and child.status() != psutil.STATUS_ZOMBIE:
                found.append(child.pid)
        except psutil.NoSuchProcess:
            continue
    return found


def a_request(request_id: str = "r", max_tokens: int = 12, prompt: tuple[int, ...] = (5, 6, 7)) -> GenerateRequest:
    return GenerateRequest(request_id, prompt, max_tokens, SamplingParams(temperature=0), ignore_eos=True)


async def tokens(node: Node, request: GenerateRequest, model: str = MODEL) -> list[int]:
    """All token ids of a request; checks that it ends exactly once and numbers its tokens without gaps."""
    events: list[TokenEvent] = []
    async with aclosing(node.requests.generate(model, request)) as items:
        async for item in items:
            if isinstance(item, TokenEvent):
                events.append(item)
    assert [event.index for event in events] == list(range(len(events)))
    assert [event.finish is not None for event in events] == [False] * (len(events) - 1) + [True]
    return [event.token_id for event in events if event.token_id is not None]


def instances(node: Node) -> list[InstanceReport]:
    return node.observation.state().view.instances


async def collect(node: Node, request_id: str, max_tokens: int, into: list[int]) -> None:
    """Append the token ids of a request to `into` as they come."""
    async with aclosing(node.requests.generate(MODEL, a_request(request_id, max_tokens))) as items:
        async for item in items:
            if isinstance(item, TokenEvent) and item.token_id is not None:
                into.append(item.token_id)


async def crash(node: Node) -> None:
    """The control plane of the node falls silent at once: no goodbye, no release."""
    await node._server.stop(0)
    await node.membership._tasks.close()
    for keeper in node._owning.owned_rings.monitors.values():
        await keeper.close()
    node._owning.owned_rings.monitors.clear()
