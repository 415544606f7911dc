"""A ring of runner processes on this machine without nodes: what the ring bench measures, and nothing else."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from exo_mesh.domain.plan import Plan
from exo_mesh.errors import EngineError, error_from_code
from exo_mesh.node.runner_child import RUNNER_ENVIRONMENT
from exo_mesh.proto import runner_pb2 as pb
from exo_mesh.security.credentials import Credentials
from exo_mesh.transport.plan_codec import plan_to_proto
from exo_mesh.transport.runner_pipe import open_pipe, read_message, socket_pair, write_message
from exo_mesh.transport.tls_codec import tls_to_proto

READY_DEADLINE_S = 60.0


@dataclass(slots=True)
class LocalRunner:
    """One runner child, driven as a node would: over its pipe."""

    process: asyncio.subprocess.Process
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    port: int = 0
    beats: asyncio.Queue[pb.Heartbeat] = field(default_factory=lambda: asyncio.Queue(maxsize=1))

    async def expect(self, kind: str) -> pb.FromRunner:
        """Read until a message of this kind, which must come in time. Raises what the runner reports."""
        async with asyncio.timeout(READY_DEADLINE_S):
            while (message := await read_message(self.reader, pb.FromRunner)) is not None:
                found = message.WhichOneof("message")
                if found == "failed":
                    raise error_from_code(message.failed.code, message.failed.message)
                if found == kind:
                    return message
        raise EngineError("a runner ended before it was ready")

    async def keep_beats(self) -> None:
        """Read heartbeats as they come, and keep the last one only."""
        while (message := await read_message(self.reader, pb.FromRunner)) is not None:
            if message.HasField("heartbeat"):
                if self.beats.full():
                    self.beats.get_nowait()
                self.beats.put_nowait(message.heartbeat)

    async def fresh_beat(self) -> pb.Heartbeat:
        """A heartbeat that was made after this call: the second that comes in."""
        async with asyncio.timeout(READY_DEADLINE_S):
            if not self.beats.empty():
                self.beats.get_nowait()
            await self.beats.get()
            return await self.beats.get()


async def _spawn(
    plan: Plan, index: int, model_dir: Path, options: dict[str, str], cpu: int | None, tls: Credentials | None
) -> LocalRunner:
    ours, theirs = socket_pair()
    command = [sys.executable, "-m", "exo_mesh.runner", "--control-fd", str(theirs.fileno())]
    process = await asyncio.create_subprocess_exec(
        *command, pass_fds=(theirs.fileno(),), env={**os.environ, **RUNNER_ENVIRONMENT}
    )
    theirs.close()
    if cpu is not None and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(process.pid, {cpu})
    runner = LocalRunner(process, *await open_pipe(ours))
    start = pb.StartStage(
        plan=plan_to_proto(plan),
        stage=index,
        model_dir=str(model_dir),
        options=options,
        host="127.0.0.1",
        max_queued=64,
        tls=tls_to_proto(tls),
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
) -> AsyncIterator[list[LocalRunner]]:
    """Start every stage of the plan on loopback, link the ring, wait until all are ready; stop all at the end.

    cpus: stage i is pinned to cpus[i % len] where the system can, so that two stages do not fight for one core.
    tls: what all ends of the hops show; None for plain connections.
    """
    runners: list[LocalRunner] = []
    readers: list[asyncio.Task[None]] = []
    try:
        for index in range(len(plan.stages)):
            cpu = cpus[index % len(cpus)] if cpus else None
            runners.append(await _spawn(plan, index, model_dir, options, cpu, tls))
        for runner in runners:
            runner.port = (await runner.expect("listening")).listening.port
            await runner.expect("ready")
        for runner, following in zip(runners, runners[1:] + runners[:1], strict=True):
            link = pb.LinkNext(endpoint=f"127.0.0.1:{following.port}")
            await write_message(runner.writer, pb.ToRunner(link=link))
        readers = [asyncio.create_task(runner.keep_beats()) for runner in runners]
        yield runners
    finally:
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*(_stop(runner) for runner in runners))


async def _stop(runner: LocalRunner) -> None:
    """Closing the pipe ends a runner; one that does not end is killed."""
    runner.writer.close()
    try:
        async with asyncio.timeout(3):
            await runner.process.wait()
    except TimeoutError:
        runner.process.kill()
        await runner.process.wait()
