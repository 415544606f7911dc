"""One runner child: started, watched and ended by the node."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import signal
import socket
import sys
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from exo_mesh.config import SECRET_VARIABLE
from exo_mesh.domain.wiring_rules import MLX_VARIABLES
from exo_mesh.errors import DeadlineError, EngineError, MeshError, StageLostError, TransportError
from exo_mesh.node.stage_status import StatusBoard
from exo_mesh.proto import control_pb2, runner_pb2
from exo_mesh.transport import runner_pipe
from exo_mesh.transport.channel_options import bracketed

RUNNER_COMMAND: tuple[str, ...] = (sys.executable, "-m", "exo_mesh.runner")

RUNNER_ENVIRONMENT = {
    # glibc maps and faults in fresh pages for every large message unless told otherwise: half of the cost of a
    # 16 MiB hop, measured.
    "MALLOC_MMAP_THRESHOLD_": "1073741824",
    "MALLOC_TRIM_THRESHOLD_": "17179869184",
    "MALLOC_TOP_PAD_": "268435456",
}

MAX_LINE_BYTES = 2000
"""Longer lines of a runner's stderr are cut; a native library may write megabytes without a line end."""

OnBeat = Callable[[runner_pb2.Heartbeat], None]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Limits:
    """Seconds. first_message_s: process start to its first report (imports of grpc and numpy on a slow board).
    silence_s: between any two reports afterwards; a heartbeat comes every 0.5 s. polite_s + terminate_s + a moment for
    the kernel is the longest a stop takes."""

    first_message_s: float = 20.0
    silence_s: float = 10.0
    load_base_s: float = 120.0
    load_bytes_per_s: float = 50e6
    polite_s: float = 2.0
    terminate_s: float = 1.0

    def load_s(self, reserve_bytes: int) -> float:
        """How long a stage of this size may take from its start to ready: a hard disk reads 50 MB/s."""
        return self.load_base_s + reserve_bytes / self.load_bytes_per_s


class Runner:
    """Runs once. `board` has what is known; `beat` is the last heartbeat. `run` returns when the process is gone."""

    def __init__(
        self,
        label: str,
        start: runner_pb2.StartStage,
        host: str,
        *,
        limits: Limits = Limits(),
        command: Sequence[str] = RUNNER_COMMAND,
        environment: Mapping[str, str] = os.environ,
    ) -> None:
        self.label = label
        self.board = StatusBoard()
        self.beat: runner_pb2.Heartbeat | None = None
        self.pid = 0
        self._heard_at = 0.0
        self._start = start
        self._host = host
        self._limits = limits
        self._command = command
        self._environment = environment
        self._writer: asyncio.StreamWriter | None = None
        self._stopping = asyncio.Event()
        self._gone = asyncio.Event()
        self._last_lines: deque[str] = deque(maxlen=5)

    async def run(self, on_beat: OnBeat = lambda beat: None) -> None:
        """Start the process, follow it, and see it off. Never raises a MeshError: failures go to the board."""
        try:
            await self._run(on_beat)
        except MeshError as exc:
            self.board.fail(exc.code, str(exc))
        except OSError as exc:
            self.board.fail(EngineError.code, f"the runner of {self.label} cannot be started: {exc}")
        finally:
            self._gone.set()

    @property
    def silent_s(self) -> float:
        """How long ago its last report came; infinite before the first."""
        return asyncio.get_running_loop().time() - self._heard_at if self._heard_at else math.inf

    async def link(self, endpoint: str, *, keep_stream: bool = False) -> None:
        """Tell the stage where the next one listens. Raises StageLostError if it is gone.

        keep_stream: it is the same stage by another way, for the next dial; see RingLink.set_endpoint.
        """
        await self._tell(runner_pb2.ToRunner(link=runner_pb2.LinkNext(endpoint=endpoint, keep_stream=keep_stream)))

    async def link_ranks(self, endpoints: Sequence[str]) -> None:
        """Tell the leader of a tensor group where ranks 1 to N-1 listen. Raises StageLostError if it is gone."""
        await self._tell(runner_pb2.ToRunner(ranks=runner_pb2.LinkRanks(endpoints=endpoints)))

    async def show(self, tls: runner_pb2.TlsCredentials) -> None:
        """Give the stage another certificate for the connections from now on. Raises StageLostError if it is gone."""
        self._start.tls.CopyFrom(tls)  # in case the process has not been told to start yet
        await self._tell(runner_pb2.ToRunner(tls=tls))

    async def press(self, level: int) -> None:
        """Tell the stage how short of memory the machine is; one that is gone need not know."""
        with contextlib.suppress(StageLostError):
            await self._tell(runner_pb2.ToRunner(pressure=runner_pb2.Pressure(level=level)))

    async def _tell(self, message: runner_pb2.ToRunner) -> None:
        if self._writer is None or self._gone.is_set():
            raise StageLostError(f"the runner of {self.label} is not running")
        try:
            await runner_pipe.write_message(self._writer, message)
        except TransportError as exc:
            raise StageLostError(f"the runner of {self.label} is gone") from exc

    async def stop(self) -> None:
        """End the process within 4 s, politely first; `run` then returns. Returns when it is gone."""
        self._stopping.set()
        await self._gone.wait()

    async def _run(self, on_beat: OnBeat) -> None:
        ours, theirs = runner_pipe.socket_pair()
        try:
            process = await asyncio.create_subprocess_exec(
                *self._command,
                "--control-fd",
                str(theirs.fileno()),
                pass_fds=(theirs.fileno(),),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                env={**_for_runner(self._environment), **RUNNER_ENVIRONMENT},
                start_new_session=True,
            )
        except OSError:
            ours.close()
            raise
        finally:
            theirs.close()
        self.pid = process.pid
        output = asyncio.create_task(self._log_output(process), name=f"output of {self.label}")
        try:
            await self._talk(ours, process, on_beat)
        finally:
            await _shielded(self._see_off(process, output))

    async def _talk(self, ours: socket.socket, process: asyncio.subprocess.Process, on_beat: OnBeat) -> None:
        reader, self._writer = await runner_pipe.open_pipe(ours)
        await runner_pipe.write_message(self._writer, runner_pb2.ToRunner(start=self._start))
        listener = asyncio.create_task(self._listen(reader, on_beat), name=f"reports of {self.label}")
        stopped = asyncio.create_task(self._stopping.wait(), name=f"stop of {self.label}")
        try:
            await asyncio.wait((listener, stopped), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (listener, stopped):
                task.cancel()
            results = await asyncio.gather(listener, stopped, return_exceptions=True)
        if self._stopping.is_set():
            self.board.fail(StageLostError.code, f"{self.label} was stopped")
        elif isinstance(results[0], MeshError):
            raise results[0]
        elif self.board.failed is None:
            await _ended(process, 0.5)
            raise StageLostError(self._post_mortem(process.returncode))

    async def _listen(self, reader: asyncio.StreamReader, on_beat: OnBeat) -> None:
        """Follow the reports until the process is gone. Raises DeadlineError when one does not come in time."""
        loop = asyncio.get_running_loop()
        load_deadline = loop.time() + self._limits.load_s(self._stage_bytes)
        patience_s = self._limits.first_message_s
        while True:
            try:
                async with asyncio.timeout(patience_s):
                    report = await runner_pipe.read_message(reader, runner_pb2.FromRunner)
            except TimeoutError as exc:
                raise DeadlineError(f"the runner of {self.label} has been silent for {patience_s:.0f} s") from exc
            if report is None:
                return
            self._take(report, on_beat)
            if not self.board.ready and loop.time() > load_deadline:
                raise DeadlineError(f"{self.label} was not loaded after {self._limits.load_s(self._stage_bytes):.0f} s")
            patience_s = self._limits.silence_s

    @property
    def _stage_bytes(self) -> int:
        return self._start.plan.stages[self._start.stage].reserve_bytes

    def _take(self, report: runner_pb2.FromRunner, on_beat: OnBeat) -> None:
        self._heard_at = asyncio.get_running_loop().time()
        status = control_pb2.StageStatus()
        match report.WhichOneof("message"):
            case "listening":
                status.listening.endpoint = f"{bracketed(self._host)}:{report.listening.port}"
                status.listening.pid = report.listening.pid
            case "loading":
                status.loading.done, status.loading.total = report.loading.done, report.loading.total
            case "ready":
                ready = report.ready
                status.ready.memory_bytes, status.ready.load_s = ready.memory_bytes, ready.load_s
                status.ready.inputs.extend(ready.inputs)
                status.ready.outputs.extend(ready.outputs)
                if ready.HasField("group"):
                    status.ready.group.CopyFrom(ready.group)
            case "heartbeat":
                self.beat = report.heartbeat
                on_beat(report.heartbeat)
            case "failed":
                status.failed.code, status.failed.message = report.failed.code, report.failed.message
        self.board.publish(status)

    def _post_mortem(self, returncode: int | None) -> str:
        if returncode is not None and returncode < 0:
            how = f"was killed by {signal.Signals(-returncode).name}"
        else:
            how = f"ended with exit code {returncode}"
        last = f"; its last words: {self._last_lines[-1]}" if self._last_lines else ""
        return f"the runner of {self.label} {how}{last}"

    async def _see_off(self, process: asyncio.subprocess.Process, output: asyncio.Task[None]) -> None:
        limits = self._limits
        if process.returncode is None and self._writer is not None and self._stopping.is_set():
            with contextlib.suppress(TransportError, TimeoutError):
                async with asyncio.timeout(0.5):
                    await runner_pipe.write_message(self._writer, runner_pb2.ToRunner(stop=runner_pb2.StopStage()))
            await _ended(process, limits.polite_s)
        for sign, patience_s in ((signal.SIGTERM, limits.terminate_s), (signal.SIGKILL, limits.terminate_s)):
            if process.returncode is None:
                _signal_group(process.pid, sign)
                await _ended(process, patience_s)
        # what the runner itself started ends with it
        _signal_group(process.pid, signal.SIGKILL)
        if self._writer is not None:
            self._writer.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.5):
                await output

    async def _log_output(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None, "created with a pipe"
        rest = b""
        while chunk := await process.stdout.read(65536):
            *lines, rest = (rest + chunk).split(b"\n")
            for line in [*lines, *([rest] if len(rest) > MAX_LINE_BYTES else [])]:
                self._log_line(line)
            rest = b"" if len(rest) > MAX_LINE_BYTES else rest
        self._log_line(rest)

    def _log_line(self, line: bytes) -> None:
        text = line[:MAX_LINE_BYTES].decode(errors="replace").rstrip()
        if text:
            self._last_lines.append(text)
            _log.info("runner %s: %s", self.label, text)


def _for_runner(environment: Mapping[str, str]) -> dict[str, str]:
    """A runner gets a certificate over its pipe, and has no use for what made it; nor for the rank of a node that was
    started by `mlx.launch`."""
    return {name: value for name, value in environment.items() if name not in (SECRET_VARIABLE, *MLX_VARIABLES)}


async def _ended(process: asyncio.subprocess.Process, patience_s: float) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(patience_s):
            await process.wait()


def _signal_group(pid: int, sign: signal.Signals) -> None:
    """To the runner's process group: it is its leader, so this reaches what it started, too."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, sign)


async def _shielded(work: Coroutine[Any, Any, None]) -> None:
    """Finish `work` even when this task is cancelled meanwhile; the cancellation goes on afterwards."""
    task = asyncio.create_task(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError as exc:
            cancelled = exc
    if cancelled is not None:
        raise cancelled
    task.result()
