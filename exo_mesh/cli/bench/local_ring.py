"""Runs a ring of runner processes on this machine without nodes, for the benchmarks of rings and tensor groups."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import grpc.aio

from exo_mesh.domain.footprint import POOL_TOKENS
from exo_mesh.domain.plan import Ballot, Plan, PlanInputs, StagePlan
from exo_mesh.domain.shard import Shard
from exo_mesh.domain.tensor_group import RankWiring
from exo_mesh.engine.process_environment import compute_environment
from exo_mesh.errors import EngineError, error_from_code
from exo_mesh.rings.hosting.runner_child import RUNNER_ENVIRONMENT
from exo_mesh.security.credentials import Credentials
from exo_mesh.wire.calls import GENERATE
from exo_mesh.wire.channels import method_of, open_channel
from exo_mesh.wire.plan_codec import ballot_to_proto, plan_to_proto, rank_to_proto
from exo_mesh.wire.proto import driver_pb2
from exo_mesh.wire.proto import runner_pb2 as pb
from exo_mesh.wire.runner_pipe import open_pipe, read_message, socket_pair, write_message
from exo_mesh.wire.tls_codec import tls_to_proto

INSTANCE, BALLOT = "bench", Ballot(1, "bench")
"""Of the plans of all rings here."""

NUM_IDS = 200
"""Token ids of prompts are below this number, which every tokenizer has."""

READY_DEADLINE_S = 60.0
"""Longest time between two reports of a runner that loads."""


@dataclass(slots=True)
class LocalRunner:
    """A runner process, controlled over its pipe like by a node. followers: ranks 1, 2, … of the group that it
    leads."""

    process: asyncio.subprocess.Process
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    port: int = 0
    ready: pb.Ready | None = None
    failed: pb.Failed | None = None
    followers: list[LocalRunner] = field(default_factory=list)
    beats: asyncio.Queue[pb.Heartbeat] = field(default_factory=lambda: asyncio.Queue(maxsize=1))

    async def expect(self, kind: str) -> pb.FromRunner:
        """Reads until a message of this kind arrives. Raises the error that the runner reports, or TimeoutError."""
        async with asyncio.timeout(READY_DEADLINE_S) as patience:
            while (message := await read_message(self.reader, pb.FromRunner)) is not None:
                patience.reschedule(asyncio.get_running_loop().time() + READY_DEADLINE_S)
                found = message.WhichOneof("message")
                if found == "failed":
                    self.failed = message.failed
                    raise error_from_code(message.failed.code, message.failed.message)
                if found == kind:
                    return message
        raise EngineError("a runner ended before it was ready")

    async def become_ready(self) -> None:
        """Waits until the runner and its followers are ready. Raises the error that one of them reports."""
        self.port = (await self.expect("listening")).listening.port
        self.ready = (await self.expect("ready")).ready
        for follower in self.followers:
            await follower.become_ready()
        if self.followers:
            endpoints = [f"127.0.0.1:{follower.port}" for follower in self.followers]
            await write_message(self.writer, pb.ToRunner(ranks=pb.LinkRanks(endpoints=endpoints)))

    async def keep_beats(self) -> None:
        """Reads heartbeats and keeps the last one until the runner ends; sets `failed` to the error that it reports."""
        while (message := await read_message(self.reader, pb.FromRunner)) is not None:
            if message.HasField("heartbeat"):
                if self.beats.full():
                    self.beats.get_nowait()
                self.beats.put_nowait(message.heartbeat)
            elif message.HasField("failed"):
                self.failed = message.failed

    async def fresh_beat(self) -> pb.Heartbeat:
        """Waits for a heartbeat that was made after this call: the second one to arrive."""
        async with asyncio.timeout(READY_DEADLINE_S):
            if not self.beats.empty():
                self.beats.get_nowait()
            await self.beats.get()
            return await self.beats.get()


@dataclass(frozen=True, slots=True)
class RingJob:
    """The parameters that are equal for all runners of the ring."""

    plan: Plan
    model_dir: Path
    options: dict[str, str]
    tls: Credentials | None
    prefix_bytes: int
    disks: Path | None = None


def even_plan(engine: str, num_layers: int, num_stages: int, context: int, pool_tokens: int = POOL_TOKENS) -> Plan:
    """A plan with stages of about equally many layers."""
    cuts = [num_layers * index // num_stages for index in range(num_stages + 1)]
    return plan_with_cuts(engine, cuts, context, pool_tokens)


def plan_with_cuts(engine: str, cuts: Sequence[int], context: int, pool_tokens: int) -> Plan:
    """A plan with a stage from each cut to the next, and without tensor groups."""
    stages = tuple(
        StagePlan(f"bench{index}", engine, Shard("bench", start, stop, cuts[-1]), 0)
        for index, (start, stop) in enumerate(pairwise(cuts))
    )
    return Plan(INSTANCE, BALLOT, "bench", "", stages, context, PlanInputs((), "memory", len(stages)), pool_tokens)


def ring_request(request_id: str, prompt_ids: Sequence[int], tokens: int) -> driver_pb2.GenerateRequest:
    """A greedy request that draws exactly this many tokens."""
    return driver_pb2.GenerateRequest(
        instance_id=INSTANCE,
        ballot=ballot_to_proto(BALLOT),
        request_id=request_id,
        prompt_ids=prompt_ids,
        max_tokens=tokens,
        ignore_eos=True,
        sampling=driver_pb2.Sampling(temperature=0, top_p=1, repetition_penalty=1),
    )


class Driver:
    """Sends requests to the driver of a ring."""

    def __init__(self, channel: grpc.aio.Channel, deadline_s: float) -> None:
        self._generate, self._deadline_s = method_of(channel, GENERATE), deadline_s

    async def events(self, request: driver_pb2.GenerateRequest) -> AsyncIterator[Sequence[driver_pb2.TokenEvent]]:
        """The events of an answer, as they come. Raises the error that ends it."""
        async for message in self._generate(request, timeout=self._deadline_s):
            if message.error_code:
                raise error_from_code(message.error_code, message.error_message)
            yield message.events


@contextlib.asynccontextmanager
async def driver_of(
    runners: Sequence[LocalRunner], deadline_s: float, tls: Credentials | None = None
) -> AsyncIterator[Driver]:
    """The driver of a ring. deadline_s: of each request."""
    async with open_channel(f"127.0.0.1:{runners[-1].port}", tls) as channel:
        await channel.channel_ready()
        yield Driver(channel, deadline_s)


async def spawn_stage(what: RingJob, index: int, cpu: int | None = None) -> LocalRunner:
    """Starts the runner of a stage; for a tensor group all ranks, and returns the leader."""
    group = what.plan.stages[index].group
    if group is None:
        return await spawn_runner(what, index, cpu, None)
    if group.backend != "ring":
        raise EngineError(f"a tensor group over {group.backend} cannot run on one machine; use the backend ring")
    endpoints = free_endpoints(group.size)
    wirings = [RankWiring(group.backend, rank, endpoints) for rank in range(group.size)]
    leader, *followers = [await spawn_runner(what, index, cpu, wiring) for wiring in wirings]
    leader.followers = followers
    return leader


def _prefix_disk(disks: Path | None, index: int) -> pb.PrefixDisk | None:
    if disks is None:
        return None
    return pb.PrefixDisk(directory=str(disks / str(index)), most_bytes=10**11, days=1)


def free_endpoints(number: int) -> tuple[str, ...]:
    """Endpoints on loopback with ports that are free at the moment."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(number)]
        return tuple(f"127.0.0.1:{bound.getsockname()[1]}" for bound in sockets)


async def spawn_runner(what: RingJob, index: int, cpu: int | None, rank: RankWiring | None) -> LocalRunner:
    """Starts one process: the stage, or one rank of it. cpu: the core to pin it to, or None."""
    ours, theirs = socket_pair()
    command = [sys.executable, "-m", "exo_mesh.rings.runner", "--control-fd", str(theirs.fileno())]
    process = await asyncio.create_subprocess_exec(
        *command, pass_fds=(theirs.fileno(),), env={**compute_environment(os.environ), **RUNNER_ENVIRONMENT}
    )
    theirs.close()
    if cpu is not None and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(process.pid, {cpu})
    runner = LocalRunner(process, *await open_pipe(ours))
    start = pb.StartStage(
        plan=plan_to_proto(what.plan),
        stage=index,
        model_dir=str(what.model_dir),
        options=what.options,
        host="127.0.0.1",
        max_queued=64,
        prefix_bytes=what.prefix_bytes,
        prefix_disk=_prefix_disk(what.disks, index),
        tls=tls_to_proto(what.tls),
        rank=None if rank is None else rank_to_proto(rank),
    )
    await write_message(runner.writer, pb.ToRunner(start=start))
    return runner


@contextlib.asynccontextmanager
async def local_ring(
    plan: Plan,
    model_dir: Path,
    options: dict[str, str],
    cpus: Sequence[int] = (),
    tls: Credentials | None = None,
    prefix_bytes: int = 0,
    disks: Path | None = None,
) -> AsyncIterator[list[LocalRunner]]:
    """Starts every stage of the plan on loopback, waits until all are ready, and links the ring; stops all at the end.

    cpus: stage i is pinned to cpus[i % len] where the system supports it, so that stages do not share a core.
    tls: the credentials of all ends of the hops; None for plain connections. All ranks of a tensor group run here; the
    returned runner of such a stage is the leader. prefix_bytes: limit of the prefix cache on each stage; 0: it is
    off. disks: a directory with the files of all stages; None: no KV is written to disk.
    """
    what = RingJob(plan, model_dir, options, tls, prefix_bytes, disks)
    runners: list[LocalRunner] = []
    readers: list[asyncio.Task[None]] = []
    try:
        for index in range(len(plan.stages)):
            cpu = cpus[index % len(cpus)] if cpus else None
            runners.append(await spawn_stage(what, index, cpu))
        for runner in runners:
            await runner.become_ready()
        for runner, following in zip(runners, runners[1:] + runners[:1], strict=True):
            link = pb.LinkNext(endpoint=f"127.0.0.1:{following.port}")
            await write_message(runner.writer, pb.ToRunner(link=link))
        everybody = [member for runner in runners for member in (runner, *runner.followers)]
        readers = [asyncio.create_task(runner.keep_beats()) for runner in everybody]
        yield runners
    finally:
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*(_stop(member) for runner in runners for member in (runner, *runner.followers)))


async def _stop(runner: LocalRunner) -> None:
    """Closes the pipe, which ends the runner; kills the runner if it does not end within 3 s."""
    runner.writer.close()
    try:
        async with asyncio.timeout(3):
            await runner.process.wait()
    except TimeoutError:
        runner.process.kill()
        await runner.process.wait()
