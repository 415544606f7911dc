"""The life of a runner process: get a stage from the node, load, listen, work, stop."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
from msgspec.structs import replace

from exo_mesh.domain.footprint import MOST_SEQUENCES
from exo_mesh.domain.runner.reports import (
    EnginePrepared,
    HopBroke,
    PlanChanged,
    RunnerFailed,
    RunnerListening,
    RunnerReady,
)
from exo_mesh.domain.stage import LoadOutcome, StageLoading
from exo_mesh.domain.tensor_group import GroupFigures
from exo_mesh.engine.contract import MachineMemory
from exo_mesh.engine.registry import provider
from exo_mesh.errors import EngineError, MeshError
from exo_mesh.rings.prefix_disk.folder import FileLimits
from exo_mesh.rings.runner.endpoint import Endpoint
from exo_mesh.rings.runner.engine_thread import EngineThread
from exo_mesh.rings.runner.group.ranks import RankFiles
from exo_mesh.rings.runner.inbox import Change
from exo_mesh.rings.runner.node_link import EXIT_ORPHANED, NodeLink
from exo_mesh.rings.runner.scheduling.limits import PREFILL_CHUNK
from exo_mesh.rings.runner.stage_setup import DiskSetup, PreparedEngine, StageSetup
from exo_mesh.rings.runner.worker import Worker
from exo_mesh.security.credentials import Credentials, RenewedCredentials
from exo_mesh.weights.model_files import without_paths
from exo_mesh.wire.data_server import Binding
from exo_mesh.wire.runner_commands import (
    ChangePlan,
    LinkNext,
    LinkRanks,
    OpenHop,
    PrefixDisk,
    Prepare,
    Pressure,
    StartStage,
    ToRunner,
)
from exo_mesh.wire.runner_pipe import receive_command, send_report

START_DEADLINE_S = 20.0
"""Seconds from the start of the process to its StartStage: the node sends it at once."""

EXIT_STOPPED, EXIT_FAILED = 0, 1

_log = logging.getLogger(__name__)


def run_process(control_fd: int) -> int:
    """Run the stage that the node asks for over the inherited pipe; returns the exit code."""
    pipe = socket.socket(fileno=control_fd)
    pipe.settimeout(START_DEADLINE_S)
    first = receive_command(pipe)
    prepared: PreparedEngine | None = None
    if isinstance(first, Prepare):
        prepared = _prepare(pipe, first.engine)
        if prepared is None:
            return EXIT_FAILED
        pipe.settimeout(None)  # until there is a stage for it, or its node is gone
        first = receive_command(pipe)
    if not isinstance(first, StartStage):
        return EXIT_ORPHANED
    pipe.settimeout(None)  # from here on `select` waits for data
    factory: Callable[[], asyncio.AbstractEventLoop] | None = None
    if sys.platform != "win32":
        import uvloop  # halves the cost of a hop

        factory = uvloop.new_event_loop
    if first.served is not None:
        from exo_mesh.rings.runner.whole.process import serve_whole

        with asyncio.Runner(loop_factory=factory) as runner:
            return runner.run(serve_whole(pipe, first))
    thread = EngineThread()
    return thread.run(_serve(pipe, first, thread, prepared), factory)


def _prepare(pipe: socket.socket, engine: str) -> PreparedEngine | None:
    """Import the library of this engine for a later stage; None if that fails, which is reported to the node."""
    begin = time.monotonic()
    try:
        made = provider(engine).create()
    except MeshError as exc:
        send_report(pipe, RunnerFailed(exc.code, str(exc)))
        return None
    memory_bytes = psutil.Process().memory_info().rss
    send_report(pipe, EnginePrepared(time.monotonic() - begin, memory_bytes))
    return PreparedEngine(engine, made)


async def _serve(
    pipe: socket.socket, start: StartStage, thread: EngineThread, prepared: PreparedEngine | None = None
) -> int:
    """Load, listen, work. Every failure is reported to the node before the process ends."""
    loop, stopped = asyncio.get_running_loop(), asyncio.Event()
    setup = _setup(start)

    def used() -> None:
        node_link.beat_soon()  # the node then probes its peers by calls, from the first frame on

    worker = Worker(setup, thread, prepared, used, lambda: _call(loop, endpoint.want_lap))
    credentials = RenewedCredentials(start.tls) if start.tls is not None else None
    endpoint = Endpoint(setup, worker, credentials, lambda why: node_link.report(HopBroke(why)))

    def change(wanted: ChangePlan) -> None:
        def done(resumed: int) -> None:
            node_link.report(PlanChanged(wanted.plan.ballot, resumed))

        endpoint.change(Change(replace(setup, plan=wanted.plan, index=wanted.stage), wanted.keep_kv_from, done))

    def obey(command: ToRunner) -> None:
        match command:
            case LinkNext(following, keep_stream):
                loop.call_soon_threadsafe(endpoint.link_to, following, keep_stream)
            case ChangePlan():
                loop.call_soon_threadsafe(change, command)
            case LinkRanks(endpoints):
                loop.call_soon_threadsafe(endpoint.ranks_at(endpoints).link_to, endpoints)
            case OpenHop():
                loop.call_soon_threadsafe(endpoint.open_hop)
            case Credentials() if credentials is not None:
                credentials.replace(command)
            case Pressure(level, free_bytes):
                worker.press(level, free_bytes)

    files = RankFiles()
    node_link = NodeLink(pipe, endpoint.heartbeat, obey, lambda: _call(loop, stopped.set), files.remove)
    node_link.start()
    try:
        if setup.rank is not None:
            files.write(setup.rank)
        _load(worker, node_link, files)
        await _listen(worker, endpoint, node_link, Binding(start.host, start.port_first, start.port_last))
        await _until_first(endpoint.run(), stopped.wait())
    except MeshError as exc:
        return _failed(node_link, exc.code, without_paths(str(exc), setup.model_dir))
    except Exception as exc:  # noqa: BLE001 - last handler of the process: the node must get every error
        _log.exception("the stage failed; the runner ends")
        return _failed(node_link, EngineError.code, without_paths(f"{type(exc).__name__}: {exc}", setup.model_dir))
    await endpoint.close()
    await worker.close()
    return EXIT_STOPPED


def _setup(start: StartStage) -> StageSetup:
    return StageSetup(
        plan=start.plan,
        index=start.stage,
        model_dir=Path(start.model_dir),
        options=dict(start.options),
        max_queued=start.max_queued,
        rank=start.rank,
        warms_up=not start.skip_warmup,
        memory=MachineMemory(start.total_bytes, start.available_bytes) if start.total_bytes else None,
        max_running=start.max_running or MOST_SEQUENCES,
        prefill_chunk=start.prefill_chunk or PREFILL_CHUNK,
        prefix_bytes=start.prefix_bytes,
        draft=start.draft or "off",
        disk=None if start.prefix_disk is None else _disk_setup(start.prefix_disk),
    )


def _disk_setup(wanted: PrefixDisk) -> DiskSetup:
    return DiskSetup(Path(wanted.directory), FileLimits(wanted.most_bytes, wanted.days), wanted.secret)


def _load(worker: Worker, node_link: NodeLink, files: RankFiles) -> None:
    """Load before the endpoint opens: loading blocks the loop, and a caller is refused rather than left waiting."""

    def progress(done: int, total: int) -> None:
        files.remove()  # the ranks have met
        node_link.report(StageLoading(done, total))

    try:
        worker.load(progress)
    finally:
        files.remove()
    gc.collect()
    gc.freeze()  # the libraries' objects live for ever; without this each full collection scans them for 0.1 s


async def _listen(worker: Worker, endpoint: Endpoint, node_link: NodeLink, binding: Binding) -> None:
    port = await endpoint.listen(binding)
    node_link.report(RunnerListening(port, os.getpid()))
    assert worker.engine is not None, "it has been loaded"
    declared, check = worker.engine.capabilities, worker.check
    group = None if check is None else GroupFigures(check, worker.deadline_s)
    memory_bytes = worker.engine.memory_bytes()
    loaded = LoadOutcome(memory_bytes, worker.load_s, declared.inputs, declared.outputs, group)
    node_link.report(RunnerReady(loaded, declared.cuts_anywhere))


async def _until_first(*parts: object) -> None:
    """Run until one part ends; cancel the others; raise the error of the part that ended, if it had one."""
    tasks = [asyncio.ensure_future(part) for part in parts]  # type: ignore[call-overload]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            _raise_single(task.exception())
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


def _raise_single(error: BaseException | None) -> None:
    """Raise the error of a task group, without the group if it holds one error."""
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    if error is not None:
        raise error


def _failed(node_link: NodeLink, code: str, message: str) -> int:
    _log.error("%s: %s", code, message)
    node_link.report(RunnerFailed(code, message))
    return EXIT_FAILED


def _call(loop: asyncio.AbstractEventLoop, function: Callable[[], None]) -> None:
    with contextlib.suppress(RuntimeError):  # the loop has closed: the stop came late
        loop.call_soon_threadsafe(function)
