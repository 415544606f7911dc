"""The runner process: a compute thread (the main one) and an I/O thread, started and stopped by the node's pipe."""

from __future__ import annotations

import asyncio
import logging
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from exo_mesh.domain.frame import Frame
from exo_mesh.errors import EngineError, MeshError, StageLostError, TransportError
from exo_mesh.proto import runner_pb2 as pb
from exo_mesh.runner.endpoint import Binding, Endpoint
from exo_mesh.runner.worker import StageSetup, Stop, Worker
from exo_mesh.transport.plan_codec import plan_from_proto
from exo_mesh.transport.runner_pipe import open_pipe_fd, read_message, write_message

HEARTBEAT_S = 0.5
START_DEADLINE_S = 20.0
"""From the start of the process to its StartStage: the node sends it at once."""

STOP_DEADLINE_S = 1.5
"""From StopStage to the end of the process, whatever the engine is doing; the node kills after 2 s."""

EXIT_ORPHANED, EXIT_FAILED = 3, 1

_log = logging.getLogger(__name__)


class RunnerProcess:
    """Glue between the two threads. The I/O thread starts first and hands the worker over when a stage is to start."""

    def __init__(self, control_fd: int) -> None:
        self._control_fd = control_fd
        self._workers: queue.SimpleQueue[Worker] = queue.SimpleQueue()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._outbox: asyncio.Queue[pb.FromRunner] | None = None
        self._finished = threading.Event()

    def run(self) -> int:
        """Run until stopped; answers the exit code."""
        threading.Thread(target=self._io_thread, name="io", daemon=True).start()
        worker = self._workers.get()
        code = self._compute(worker)
        self._finished.wait(STOP_DEADLINE_S)  # let the last report leave
        return code

    def _compute(self, worker: Worker) -> int:
        start = time.monotonic()
        try:
            memory = worker.load(self._report_loading)
            self._post(pb.FromRunner(ready=pb.Ready(memory_bytes=memory, load_s=time.monotonic() - start)))
            worker.run()
        except MeshError as exc:
            return self._failed(exc.code, str(exc))
        except Exception as exc:
            _log.exception("the stage failed")
            return self._failed(EngineError.code, f"{type(exc).__name__}: {exc}")
        self._post(pb.FromRunner())  # an empty message ends the I/O thread
        return 0

    def _failed(self, code: str, message: str) -> int:
        _log.error("%s: %s", code, message)
        self._post(pb.FromRunner(failed=pb.Failed(code=code, message=message)))
        return EXIT_FAILED

    def _report_loading(self, done: int, total: int) -> None:
        self._post(pb.FromRunner(loading=pb.Loading(done=done, total=total)))

    def _post(self, message: pb.FromRunner) -> None:
        """To the node, from the compute thread."""
        assert self._loop is not None and self._outbox is not None, "the I/O thread made both before the worker"
        self._loop.call_soon_threadsafe(self._outbox.put_nowait, message)

    def _io_thread(self) -> None:
        try:
            _run_on_fast_loop(self._io)
        except Exception:
            _log.exception("the I/O thread failed")
            os._exit(EXIT_FAILED)
        self._finished.set()
        time.sleep(STOP_DEADLINE_S)  # the compute thread ends the process; if it cannot, this one does
        os._exit(EXIT_FAILED)

    async def _io(self) -> None:
        self._loop, self._outbox = asyncio.get_running_loop(), asyncio.Queue()
        reader, writer = await open_pipe_fd(self._control_fd)
        async with asyncio.timeout(START_DEADLINE_S):
            first = await read_message(reader, pb.ToRunner)
        if first is None or not first.HasField("start"):
            os._exit(EXIT_ORPHANED)
        try:
            endpoint = await self._start(first.start, writer)
        except (TransportError, ValueError) as exc:
            await write_message(writer, pb.FromRunner(failed=pb.Failed(code=EngineError.code, message=str(exc))))
            os._exit(EXIT_FAILED)
        tasks = [
            asyncio.create_task(part)
            for part in (
                self._write_reports(writer),
                self._beat(endpoint, writer),
                self._obey(reader, endpoint),
                self._watch_link(endpoint),
            )
        ]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                if task.done():
                    task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            endpoint.worker.inbox.put(Stop())
            await endpoint.close()

    async def _start(self, start: pb.StartStage, writer: asyncio.StreamWriter) -> Endpoint:
        setup = StageSetup(
            plan=plan_from_proto(start.plan),
            index=start.stage,
            model_dir=Path(start.model_dir),
            options=dict(start.options),
            max_queued=start.max_queued,
        )

        def make_worker(send: Callable[[Frame], None]) -> Worker:
            return Worker(setup, send)

        endpoint = Endpoint(setup, make_worker)
        port = await endpoint.listen(Binding(start.host, start.port_first, start.port_last))
        await write_message(writer, pb.FromRunner(listening=pb.Listening(port=port, pid=os.getpid())))
        self._workers.put(endpoint.worker)
        return endpoint

    async def _write_reports(self, writer: asyncio.StreamWriter) -> None:
        """Pass on what the compute thread reports; ends after the last report."""
        assert self._outbox is not None
        while True:
            message = await self._outbox.get()
            if message.WhichOneof("message") is None:
                return
            await write_message(writer, message)
            if message.HasField("failed"):
                return

    async def _beat(self, endpoint: Endpoint, writer: asyncio.StreamWriter) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            try:
                await write_message(writer, pb.FromRunner(heartbeat=endpoint.heartbeat()))
            except TransportError:
                os._exit(EXIT_ORPHANED)

    async def _obey(self, reader: asyncio.StreamReader, endpoint: Endpoint) -> None:
        """Do what the node says; without a node, end at once: nobody would ever stop this process."""
        while (message := await read_message(reader, pb.ToRunner)) is not None:
            match message.WhichOneof("message"):
                case "link":
                    endpoint.link_to(message.link.endpoint)
                case "stop":
                    endpoint.worker.inbox.put(Stop())
                    asyncio.get_running_loop().call_later(STOP_DEADLINE_S, os._exit, 0)
                case other:
                    _log.warning("ignored a message %r from the node", other)
        os._exit(EXIT_ORPHANED)

    async def _watch_link(self, endpoint: Endpoint) -> None:
        """A hop that is lost ends this stage, with a report."""
        await endpoint.run_link()  # returns at once in a ring of one
        self._failed(StageLostError.code, await endpoint.lost)
        await asyncio.Event().wait()  # _write_reports ends the process once the report has left


def _run_on_fast_loop(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """uvloop where it exists: it halves the cost of a hop."""
    factory: Callable[[], asyncio.AbstractEventLoop] | None = None
    if sys.platform != "win32":
        import uvloop

        factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(main())
