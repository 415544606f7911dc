"""The life of a runner process with a whole-model engine: load, listen, serve, watch the engine, stop."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress

from exo_mesh.domain.runner.heartbeat import Heartbeat
from exo_mesh.domain.runner.reports import FromRunner, PlanChanged, RunnerFailed, RunnerListening, RunnerReady
from exo_mesh.domain.stage import LoadOutcome, StageLoading
from exo_mesh.engine.registry import load_registry
from exo_mesh.engine.whole import WholeLoadRequest, WholeModelEngine, WholeModelProvider
from exo_mesh.errors import EngineError, MeshError, StageLostError
from exo_mesh.rings.runner.node_link import NodeLink
from exo_mesh.rings.runner.whole.calls import WholeDriverService
from exo_mesh.rings.runner.whole.driver import WholeDriver
from exo_mesh.security.credentials import Credentials, RenewedCredentials
from exo_mesh.wire.data_server import Binding, DataServer
from exo_mesh.wire.incoming import MAX_BYTES
from exo_mesh.wire.runner_commands import ChangePlan, StartStage, ToRunner

LOAD_S = 600.0
"""Deadline of a load: a server may first read tens of gigabytes from a slow disk."""

CHECK_EVERY_S = 2.0
CHECK_S = 5.0
FAILED_CHECKS = 2
"""An engine whose check fails so many times in a row is lost: a busy server may miss one check."""

CLOSE_S = 1.0

EXIT_STOPPED, EXIT_FAILED = 0, 1

_log = logging.getLogger(__name__)


class WholeRunner:
    """One whole-model instance in its process. Made and used on the event loop; `heartbeat` is called from any thread.
    report: sends a message to the node. on_use: see RingRest."""

    def __init__(self, start: StartStage, report: Callable[[FromRunner], None], on_use: Callable[[], None]) -> None:
        self._start = start
        self._report = report
        self._on_use = on_use
        self._plan = start.plan
        self._stopped = asyncio.Event()
        self._server: DataServer | None = None
        self._credentials = RenewedCredentials(start.tls) if start.tls is not None else None
        self._loop = asyncio.get_running_loop()
        self._loading = 0
        self.engine: WholeModelEngine | None = None
        self.driver: WholeDriver | None = None
        self.load_s = 0.0

    async def load(self) -> None:
        """Make the model ready. Raises the error of the engine, or EngineError after LOAD_S."""
        began = time.monotonic()
        provider = _provider(self._plan.stages[0].engine)
        engine = provider.create()

        def progress(done: int, total: int) -> None:
            self._loading += 1
            self._report(StageLoading(done, total))

        assert self._start.served is not None, "see run_process"
        request = WholeLoadRequest(self._start.served, dict(self._start.options))
        progress(0, 1)
        try:
            async with asyncio.timeout(LOAD_S):
                await engine.load(request, progress)
        except TimeoutError as exc:
            raise EngineError(f"{request.model.server} has not made the model ready within {LOAD_S:.0f} s") from exc
        self.engine, self.load_s = engine, time.monotonic() - began
        self.driver = WholeDriver(self._plan, engine, self._start.max_queued, self._on_use)
        gc.collect()
        gc.freeze()

    async def listen(self) -> int:
        """Start the server; returns the port. Raises TransportError if no port of the range is free."""
        assert self.driver is not None, "loaded"
        # a prompt as text has about 4 bytes per token, and JSON may escape each of them
        most = MAX_BYTES + 32 * self._plan.context_limit
        self._server = DataServer(lambda method, data: most, WholeDriverService(self.driver).answers())
        binding = Binding(self._start.host, self._start.port_first, self._start.port_last)
        return await self._server.listen(binding, self._credentials)

    async def watch(self) -> None:
        """Check the engine until the node asks for a stop. Raises StageLostError when the engine cannot serve any
        more."""
        assert self.engine is not None, "loaded"
        failures = 0
        while not self._stopped.is_set():
            try:
                async with asyncio.timeout(CHECK_S):
                    await self.engine.check()
                failures = 0
            except (MeshError, TimeoutError) as exc:
                failures += 1
                reason = str(exc) or f"it has not answered a check within {CHECK_S:g} s"
                if failures >= FAILED_CHECKS:
                    raise StageLostError(f"{self._plan.model} is not served any more: {reason}") from exc
            with suppress(TimeoutError):
                async with asyncio.timeout(CHECK_EVERY_S):
                    await self._stopped.wait()

    def obey(self, command: ToRunner) -> None:
        """Take a command of the node; called in another thread."""
        if isinstance(command, ChangePlan):
            self._on_loop(self._change, command)
        elif isinstance(command, Credentials) and self._credentials is not None:
            self._credentials.replace(command)
        # there is no next stage to link to, and no KV of ours that memory pressure could shrink

    def _change(self, wanted: ChangePlan) -> None:
        """Continue under another ballot; running calls go on, and their callers see the new ballot."""
        self._plan = wanted.plan
        resumed = 0
        if self.driver is not None:
            self.driver.change(self._plan)
            resumed = self.driver.slots.num_running
        self._report(PlanChanged(self._plan.ballot, resumed))

    def stop(self) -> None:
        """End `watch`; called in another thread."""
        self._on_loop(self._stopped.set)

    def _on_loop(self, function: object, *arguments: object) -> None:
        with suppress(RuntimeError):  # the loop has closed: the command came late
            self._loop.call_soon_threadsafe(function, *arguments)  # type: ignore[arg-type]

    async def close(self) -> None:
        """End the server and the engine, each within CLOSE_S."""
        if self._server is not None:
            await self._server.close()
        if self.engine is not None:
            try:
                async with asyncio.timeout(CLOSE_S):
                    await self.engine.close()
            except (TimeoutError, MeshError) as exc:
                _log.warning("the engine did not close: %s", exc or "no answer")

    def heartbeat(self) -> Heartbeat:
        """The counters of this moment. A piece of text counts as a token and as a decode frame."""
        beat = Heartbeat(linked=True, progress=self._loading)
        driver, engine = self.driver, self.engine
        if driver is None or engine is None:
            return beat
        counters, slots = driver.counters, driver.slots
        beat.progress += counters.events
        beat.frames_in = beat.laps = beat.decode_frames = counters.events
        beat.tokens, beat.prompts, beat.prefill_tokens = counters.tokens, counters.prompts, counters.prompt_tokens
        beat.busy_s = counters.busy_s
        beat.memory_bytes = engine.memory_bytes()
        beat.queued, beat.running, beat.oldest_wait_s = slots.num_waiting, slots.num_running, slots.oldest_wait_s
        beat.sequences, beat.slots = slots.num_running, slots.num_slots
        beat.is_idle = driver.rest.is_idle
        beat.queue_waits = driver.queue_waits.snapshot()
        return beat


async def serve_whole(pipe: socket.socket, start: StartStage) -> int:
    """Load, listen, serve; returns the exit code. Every failure is reported to the node before the process ends."""

    def report(news: FromRunner) -> None:
        link.report(news)

    def used() -> None:
        link.beat_soon()  # the node then probes its peers by calls, as for a ring

    runner = WholeRunner(start, report, used)
    link = NodeLink(pipe, runner.heartbeat, runner.obey, runner.stop)
    link.start()
    try:
        await runner.load()
        port = await runner.listen()
        link.report(RunnerListening(port, os.getpid()))
        assert runner.engine is not None, "loaded"
        link.report(RunnerReady(LoadOutcome(runner.engine.memory_bytes(), runner.load_s), rolls_back=True))
        await runner.watch()
    except MeshError as exc:
        return await _failed(runner, link, exc.code, str(exc))
    except Exception as exc:  # noqa: BLE001 - last handler of the process: the node must get every error
        _log.exception("the whole-model engine failed; the runner ends")
        return await _failed(runner, link, EngineError.code, f"{type(exc).__name__}: {exc}")
    await runner.close()
    return EXIT_STOPPED


async def _failed(runner: WholeRunner, link: NodeLink, code: str, message: str) -> int:
    _log.error("%s: %s", code, message)
    link.report(RunnerFailed(code, message))
    await runner.close()
    return EXIT_FAILED


def _provider(name: str) -> WholeModelProvider:
    found = load_registry().provider(name)
    if found.kind != "whole-model":
        raise EngineError(f"engine {name} runs layer ranges; it cannot serve a whole model by itself")
    return found  # type: ignore[return-value]
