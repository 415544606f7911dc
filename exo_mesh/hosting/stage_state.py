"""A stage on this machine: what its process is told, whether it is well, and what another plan may go on with."""

from __future__ import annotations

import asyncio
from pathlib import Path

from exo_mesh.domain.plan import Plan
from exo_mesh.domain.tensor_group import RankWiring
from exo_mesh.hosting.reservations import Lease
from exo_mesh.hosting.supervisor import Runner
from exo_mesh.machine.memory import MemoryReading
from exo_mesh.proto import runner_pb2
from exo_mesh.security.credentials import CredentialSource
from exo_mesh.settings.config import Settings
from exo_mesh.transport.plan_codec import plan_to_proto, rank_to_proto
from exo_mesh.transport.tls_codec import tls_to_proto

SILENT_S = 2.0
"""A runner reports twice a second. One that has missed four reports is not killed for it (see Limits.silence_s), but
who asks whether it runs, because a connection to it broke, is told no."""

LISTEN_S = 0.6
"""... unless it reports within this: it may be this node that stood still, and has not read the reports yet."""


def start_message(
    lease: Lease,
    model_dir: Path,
    settings: Settings,
    credentials: CredentialSource | None,
    wiring: RankWiring | None = None,
    memory: MemoryReading | None = None,
) -> runner_pb2.StartStage:
    """What a runner is told when it starts. wiring: of the rank of a tensor group that it is to be. memory: of this
    machine, now."""
    first, last = settings.data_ports or (0, 0)
    return runner_pb2.StartStage(
        plan=plan_to_proto(lease.plan),
        stage=lease.index,
        model_dir=str(model_dir),
        options=settings.engine_options,
        host=settings.host,
        port_first=first,
        port_last=last,
        max_queued=settings.max_queued,
        tls=tls_to_proto(credentials.current if credentials else None),
        rank=None if wiring is None else rank_to_proto(wiring),
        total_bytes=0 if memory is None else memory.total_bytes,
        available_bytes=0 if memory is None else memory.available_bytes,
    )


def is_well(runner: Runner) -> bool:
    """Is it loaded, and does it report?"""
    return runner.board.ready and runner.board.failed is None and runner.silent_s <= SILENT_S


async def why_unwell(runner: Runner) -> str:
    """ "" if it is well, for which it may take a moment to report."""
    if (failed := runner.board.failed) is not None:
        return failed.message
    if not runner.board.ready:
        return f"{runner.label} is not loaded"
    if runner.silent_s > SILENT_S:
        await asyncio.sleep(LISTEN_S)
    return f"{runner.label} has been silent for {runner.silent_s:.0f} s" if runner.silent_s > SILENT_S else ""


def goes_on(started: Lease, plan: Plan, index: int) -> bool:
    """May a process that was started for one plan go on as stage `index` of another, with its weights?"""
    old, new = started.plan, plan
    alone = started.stage.group is None and plan.stages[index].group is None  # a group meets once per process
    return (
        alone
        and (started.stage.engine, started.stage.shard) == (new.stages[index].engine, new.stages[index].shard)
        and (old.model, old.model_digest) == (new.model, new.model_digest)
        and (old.context_limit, old.activation_dtype) == (new.context_limit, new.activation_dtype)
    )
