"""Decides about a stage on this machine: its start message, its place in the ring, whether it is healthy, and whether
it may continue under another plan."""

from __future__ import annotations

import asyncio
from pathlib import Path

from exo_mesh.base.telemetry.stage_metrics import StageSeat
from exo_mesh.domain.plan import Plan
from exo_mesh.domain.runner.heartbeat import Heartbeat
from exo_mesh.domain.tensor_group import RankWiring
from exo_mesh.machine.memory import MemoryReading
from exo_mesh.rings.hosting.reservations import Lease
from exo_mesh.rings.hosting.status_board import StageBeat
from exo_mesh.rings.hosting.supervisor import Runner
from exo_mesh.security.credentials import CredentialSource
from exo_mesh.settings.config import Settings
from exo_mesh.wire.runner_commands import PrefixDisk, StartStage

SILENT_S = 2.0
"""Seconds of silence after which a runner counts as not running for callers that ask because a connection to it broke.
It reports twice a second; it is not killed for missing four reports (see Limits.silence_s)."""

LISTEN_S = 0.6
"""Extra seconds for a report to arrive: this node may have been suspended itself, and not have read the reports yet."""


def start_message(
    lease: Lease,
    model_dir: Path,
    settings: Settings,
    credentials: CredentialSource | None,
    wiring: RankWiring | None = None,
    memory: MemoryReading | None = None,
) -> StartStage:
    """The message that starts a runner. wiring: of its rank, in a tensor group. memory: of this machine, now."""
    first, last = settings.data_ports or (0, 0)
    return StartStage(
        plan=lease.plan,
        stage=lease.index,
        model_dir=str(model_dir),
        options=settings.engine_options,
        host=settings.host,
        port_first=first,
        port_last=last,
        max_queued=settings.max_queued,
        max_running=1 if settings.no_batch else settings.max_batch_size,
        prefill_chunk=settings.prefill_chunk,
        draft=settings.draft,
        prefix_bytes=settings.prefix_cache_bytes,
        prefix_disk=_prefix_disk(settings),
        skip_warmup=settings.skip_warmup,
        tls=credentials.current if credentials else None,
        rank=wiring,
        total_bytes=0 if memory is None else memory.total_bytes,
        available_bytes=0 if memory is None else memory.available_bytes,
    )


def _prefix_disk(settings: Settings) -> PrefixDisk | None:
    """Where a runner keeps KV in files; None: nowhere."""
    if settings.prefix_disk is None or not settings.prefix_cache_bytes:
        return None
    secret = b""
    if settings.secret:
        from exo_mesh.security.keys import prefix_disk_key  # an open mesh avoids this slow import

        secret = prefix_disk_key(settings.secret)
    return PrefixDisk(str(settings.prefix_disk), settings.prefix_disk_max_bytes, settings.prefix_disk_days, secret)


def is_well(runner: Runner) -> bool:
    """Whether a runner is loaded and reports."""
    return runner.board.ready and runner.board.failed is None and runner.silent_s <= SILENT_S


async def why_unwell(runner: Runner) -> str:
    """The reason why a runner is not healthy, or ""; may wait a moment for a report."""
    if (failed := runner.board.failed) is not None:
        return failed.message
    if not runner.board.ready:
        return f"{runner.label} is not loaded"
    if runner.silent_s > SILENT_S:
        await asyncio.sleep(LISTEN_S)
    return f"{runner.label} has been silent for {runner.silent_s:.0f} s" if runner.silent_s > SILENT_S else ""


def goes_on(started: Lease, plan: Plan, index: int) -> bool:
    """Whether a process that was started for one plan may continue as stage `index` of another, with its weights."""
    old, new = started.plan, plan
    alone = started.stage.group is None and plan.stages[index].group is None  # a group meets once per process
    return (
        alone
        and (started.stage.engine, started.stage.shard) == (new.stages[index].engine, new.stages[index].shard)
        and (old.model, old.model_digest) == (new.model, new.model_digest)
        and (old.context_limit, old.activation_dtype) == (new.context_limit, new.activation_dtype)
    )


def beat_of(lease: Lease, runner: Runner, own_id: str) -> StageBeat:
    """The last heartbeat of a lease's runner, with its place."""
    stage, beat = lease.stage, runner.beat or Heartbeat()  # no heartbeat has come yet
    return StageBeat(
        lease.plan.instance_id,
        lease.index,
        stage.shard.is_last and stage.peer_id == own_id,
        beat,
        stage.peers.index(own_id),
        len(stage.peers),
        runner.board.kv_heads,
    )


def seat_of(lease: Lease, own_id: str) -> StageSeat:
    """The place of a lease's runner in its ring, for the metrics."""
    plan, stage = lease.plan, lease.stage
    rank = stage.peers.index(own_id)
    passes_on = len(plan.stages) > 1 and rank == 0
    return StageSeat(
        model=plan.model,
        instance_id=plan.instance_id,
        stage=lease.index,
        layers=(stage.shard.start, stage.shard.stop),
        engine=stage.engine,
        rank=rank,
        epoch=lease.ballot.counter,
        next_peer=plan.stages[(lease.index + 1) % len(plan.stages)].peer_id if passes_on else "",
    )
