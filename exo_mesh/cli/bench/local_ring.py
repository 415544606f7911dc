"""Runs a ring of runner processes on this machine without nodes, for the benchmarks of rings and tensor groups."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from itertools import pairwise
from pathlib import Path
from typing import TypeVar

import msgspec

from exo_mesh.domain.footprint import POOL_TOKENS
from exo_mesh.domain.plan import Ballot, Plan, PlanInputs, StagePlan
from exo_mesh.domain.request import GenerateRequest, SamplingParams
from exo_mesh.domain.runner.heartbeat import Heartbeat
from exo_mesh.domain.runner.reports import FromRunner, RunnerFailed, RunnerListening, RunnerReady
from exo_mesh.domain.shard import Shard
from exo_mesh.domain.tensor_group import RankWiring
from exo_mesh.engine.process_environment import compute_environment
from exo_mesh.errors import EngineError, error_from_code
from exo_mesh.rings.hosting.runner_child import RUNNER_ENVIRONMENT
from exo_mesh.security.credentials import Credentials
from exo_mesh.wire.driver_connection import Ask, open_driver
from exo_mesh.wire.runner_commands import LinkNext, LinkRanks, PrefixDisk, StartStage
from exo_mesh.wire.runner_pipe import open_pipe, read_report, socket_pair, write_command

INSTANCE, BALLOT = "bench", Ballot(1, "bench")
"""Of the plans of all rings here."""

NUM_IDS = 200
"""Token ids of prompts are below this number, which every tokenizer has."""

READY_DEADLINE_S = 60.0
"""Longest time between two reports of a runner that loads."""

_Report = TypeVar("_Report", bound=FromRunner)


class LocalRunner(msgspec.Struct):
    """A runner process, controlled over its pipe like by a node. followers: ranks 1, 2, … of the group that it
    leads."""

    plan: Plan
    process: asyncio.subprocess.Process
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    port: int = 0
    ready: RunnerReady | None = None
    failed: RunnerFailed | None = None
    followers: list[LocalRunner] = msgspec.field(default_factory=list)
    beats: asyncio.Queue[Heartbeat] = msgspec.field(default_factory=lambda: asyncio.Queue(maxsize=1))

    async def expect(self, kind: type[_Report]) -> _Report:
        """Reads until a report of this kind arrives. Raises the error that the runner reports, or TimeoutError."""
        async with asyncio.timeout(READY_DEADLINE_S) as patience:
            while (report := await read_report(self.reader)) is not None:
                patience.reschedule(asyncio.get_running_loop().time() + READY_DEADLINE_S)
                if isinstance(report, RunnerFailed):
                    self.failed = report
                    raise error_from_code(report.code, report.message)
                if isinstance(report, kind):
                    return report
        raise EngineError("a runner ended before it was ready")

    async def become_ready(self) -> None:
        """Waits until the runner and its followers are ready. Raises the error that one of them reports."""
        self.port = (await self.expect(RunnerListening)).port
        self.ready = await self.expect(RunnerReady)
        for follower in self.followers:
            await follower.become_ready()
        if self.followers:
            endpoints = tuple(f"127.0.0.1:{follower.port}" for follower in self.followers)
            await write_command(self.writer, LinkRanks(endpoints))

    async def keep_beats(self) -> None:
        """Reads heartbeats and keeps the last one until the runner ends; sets `failed` to the error that it reports."""
        while (report := await read_report(self.reader)) is not None:
            if isinstance(report, Heartbeat):
                if self.beats.full():
                    self.beats.get_nowait()
                self.beats.put_nowait(report)
            elif isinstance(report, RunnerFailed):
                self.failed = report

    def driver(self, tls: Credentials | None = None) -> AbstractAsyncContextManager[Ask]:
        """A connection for requests, if this is the last stage."""
        return open_driver(f"127.0.0.1:{self.port}", self.plan, tls)

    async def fresh_beat(self) -> Heartbeat:
        """Waits for a heartbeat that was made after this call: the second one to arrive."""
        async with asyncio.timeout(READY_DEADLINE_S):
            if not self.beats.empty():
                self.beats.get_nowait()
            await self.beats.get()
            return await self.beats.get()


class RingJob(msgspec.Struct, frozen=True):
    """The parameters that are equal for all runners of the ring."""

    plan: Plan
    model_dir: Path
    options: dict[str, str]
    tls: Credentials | None
    prefix_bytes: int
    disks: Path | None = None
    draft: str = "off"


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


def ring_request(request_id: str, prompt_ids: Sequence[int], tokens: int) -> GenerateRequest:
    """A greedy request that draws exactly this many tokens."""
    return GenerateRequest(request_id, tuple(prompt_ids), tokens, SamplingParams(temperature=0.0), ignore_eos=True)


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
    runner = LocalRunner(what.plan, process, *await open_pipe(ours))
    start = StartStage(
        plan=what.plan,
        stage=index,
        model_dir=str(what.model_dir),
        options=what.options,
        host="127.0.0.1",
        max_queued=64,
        prefix_bytes=what.prefix_bytes,
        prefix_disk=None if what.disks is None else PrefixDisk(str(what.disks / str(index)), 10**11, 1),
        tls=what.tls,
        rank=rank,
        draft=what.draft,
    )
    await write_command(runner.writer, start)
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
    draft: str = "off",
    relay: Callable[[str], Awaitable[str]] | None = None,
) -> AsyncIterator[list[LocalRunner]]:
    """Starts every stage of the plan on loopback, waits until all are ready, and links the ring; stops all at the end.

    cpus: stage i is pinned to cpus[i % len] where the system supports it, so that stages do not share a core.
    tls: the credentials of all ends of the hops; None for plain connections. All ranks of a tensor group run here; the
    returned runner of such a stage is the leader. prefix_bytes: limit of the prefix cache on each stage; 0: it is
    off. disks: a directory with the files of all stages; None: no KV is written to disk. draft: where the driver takes
    drafts from. relay: gives the endpoint through which a stage is reached, such as a slow link.
    """
    what = RingJob(plan, model_dir, options, tls, prefix_bytes, disks, draft)
    runners: list[LocalRunner] = []
    readers: list[asyncio.Task[None]] = []
    try:
        for index in range(len(plan.stages)):
            cpu = cpus[index % len(cpus)] if cpus else None
            runners.append(await spawn_stage(what, index, cpu))
        for runner in runners:
            await runner.become_ready()
        for runner, following in zip(runners, runners[1:] + runners[:1], strict=True):
            endpoint = f"127.0.0.1:{following.port}"
            await write_command(runner.writer, LinkNext(endpoint if relay is None else await relay(endpoint)))
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
