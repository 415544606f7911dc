"""One runner child: the node starts, watches and ends it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import re
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from msgspec.structs import replace

from exo_mesh.base.printable import reason_of
from exo_mesh.base.tasks import ChangeSignal
from exo_mesh.domain.plan import Plan
from exo_mesh.domain.runner.heartbeat import Heartbeat
from exo_mesh.domain.runner.reports import FromRunner, HopBroke, PlanChanged, RunnerFailed, RunnerListening, RunnerReady
from exo_mesh.domain.runner_limits import DEFAULT_LIMITS, RunnerLimits
from exo_mesh.domain.stage import LoadOutcome, StageHopLost, StageListening, StageLoading, StageReady
from exo_mesh.errors import (
    EngineError,
    MeshError,
    StageLostError,
    TransportError,
)
from exo_mesh.rings.hosting.flight_recorder import FlightLog
from exo_mesh.rings.hosting.out_of_memory import OutOfMemory
from exo_mesh.rings.hosting.pid_files import PidFiles
from exo_mesh.rings.hosting.runner_child import RunnerChild, spawn
from exo_mesh.rings.hosting.runner_exit import (
    REPORTED,
    End,
    StuckError,
    end_process,
    ended,
    exit_of,
    is_stopped,
    post_mortem,
    say_where_it_stands,
    shielded,
)
from exo_mesh.rings.hosting.stage_watch import Phase, StageWatch
from exo_mesh.rings.hosting.status_board import StatusBoard
from exo_mesh.security.credentials import Credentials
from exo_mesh.wire import runner_pipe
from exo_mesh.wire.channel_options import bracketed
from exo_mesh.wire.runner_commands import (
    ChangePlan,
    LinkNext,
    LinkRanks,
    OpenHop,
    Pressure,
    StartStage,
    StopStage,
    ToRunner,
)

RUNNER_COMMAND: tuple[str, ...] = (sys.executable, "-m", "exo_mesh.rings.runner")

MAX_LINE_BYTES = 2000
"""Longer lines of a runner's stderr are cut; a native library may write megabytes without a line end."""

CHANGE_S = 30.0
"""Seconds that a runner may take to change to another plan: it finishes its current frame first, and a chunk of prefill
on a slow board takes seconds."""

FIRST_STEP_S, LISTEN_STEP_S = 0.75, 0.25
"""Silence is counted in these steps: if this node itself was suspended, the runner was not silent. The first one is
longer than the pause between two heartbeats, so that a timer runs out only if one is late."""

DRAIN_S = 0.2
"""Seconds that the last output may take to arrive after the end of the process."""

EXIT_S = 3.0
"""Seconds from the end of its pipe to the end of the process, whose exit code shows the cause. Milliseconds, unless the
machine is overloaded."""

OnBeat = Callable[[Heartbeat], None]
OnEnd = Callable[[End, str], None]
"""Called with how the runner ended, and why; before any other notification, and not if the owner was cancelled."""

_log = logging.getLogger(__name__)


class Runner:
    """One runner process, which runs once. `board` has its status; `beat` is the last heartbeat. `run` returns when the
    process is gone."""

    def __init__(
        self,
        label: str,
        start: StartStage,
        host: str,
        *,
        limits: RunnerLimits = DEFAULT_LIMITS,
        command: Sequence[str] = RUNNER_COMMAND,
        environment: Mapping[str, str] = os.environ,
        spare: RunnerChild | None = None,
        flight: FlightLog | None = None,
        pid_files: PidFiles | None = None,
    ) -> None:
        """spare: a process that waits for a stage, to be used instead of a new one."""
        self._spare = spare
        self.label = label
        self.board = StatusBoard()
        self.beat: Heartbeat | None = None
        self.pid = 0
        self.rolls_back = False
        self.end: End | None = None
        self._on_end: OnEnd = lambda end, why: None
        self.started_s = 0.0
        """Seconds from the start of the process to its first report, once it has come."""
        self.flight = FlightLog(label) if flight is None else flight
        self._pid_files = pid_files
        self._memory = OutOfMemory()
        self._was_killed_for_memory = False
        self._heard_at = 0.0
        self._spawned_at = 0.0
        self._changed_by = math.inf
        self._listening: StageListening | None = None
        self._loaded = LoadOutcome()
        self._ballot = start.plan.ballot
        self._start = start
        self._host = host
        self._limits = limits
        self._command = command
        self._environment = environment
        self._writer: asyncio.StreamWriter | None = None
        self._stopping = asyncio.Event()
        self._gone = asyncio.Event()
        self._last_lines: deque[str] = deque(maxlen=5)
        self._process: asyncio.subprocess.Process | None = None
        self._heard_stacks: StackListener | None = None
        self._stacks_asked = 0

    async def run(self, on_beat: OnBeat = lambda beat: None, on_end: OnEnd = lambda end, why: None) -> None:
        """Start the process, follow it, and end it. Never raises a MeshError: failures go to the board, at once, also
        if the process then has to be killed. `end` says how it ended, once this has returned."""
        self._on_end = on_end
        try:
            await self._run(on_beat)
        except MeshError as exc:
            self._ends(End.CRASHED, exc.code, str(exc))
        except OSError as exc:
            self._ends(End.CRASHED, EngineError.code, f"the runner of {self.label} cannot be started: {reason_of(exc)}")
        finally:
            self.flight.ended = True
            self._gone.set()

    def _crash(self, message: str) -> End:
        """The kind of a crash with this last message."""
        is_oom = self._was_killed_for_memory or OutOfMemory.is_said_by(message)
        return End.OOM if is_oom else End.CRASHED

    def _ends(self, end: End, code: str, message: str) -> None:
        if self.end is None:
            self.end = end
            self.flight.note("end", message, end=str(end), code=code)
            self._on_end(end, message)
        self.board.fail(code, message)

    @property
    def silent_s(self) -> float:
        """Seconds since its last report; infinite before the first."""
        return asyncio.get_running_loop().time() - self._heard_at if self._heard_at else math.inf

    async def stacks(self) -> list[str]:
        """The stacks of all threads of the process: files, lines and names, no values. [] if the process cannot react:
        it has ended, is stopped by a signal, or has not reported yet."""
        if not self._can_be_asked:
            return []
        self._heard_stacks = self._heard_stacks or StackListener()
        self._signal_for_stacks()
        return await self._heard_stacks.listen()

    @property
    def _can_be_asked(self) -> bool:
        """Whether the process can be asked for its stacks: before its first report the signal could end it."""
        return bool(self._process and self._heard_at and not self._gone.is_set() and not is_stopped(self.pid))

    def _signal_for_stacks(self) -> None:
        assert self._process is not None, "see _can_be_asked"
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGUSR1)

    async def link(self, endpoint: str, *, keep_stream: bool = False) -> None:
        """Set where the next stage listens. Raises StageLostError if the runner is gone.

        keep_stream: it is the same stage by another way, for the next dial; see RingLink.set_endpoint.
        """
        await self._tell(LinkNext(endpoint, keep_stream))
        self.flight.note("linked", endpoint)

    async def open_hop(self) -> None:
        """Let a hop that rests connect, and stay open for some seconds; a runner that is gone is ignored."""
        with contextlib.suppress(StageLostError):
            await self._tell(OpenHop())

    def lose_hop(self, reason: str, *, is_out_of_reach: bool = False) -> None:
        """Report that this stage cannot reach the next one; the owner of the ring decides what follows.

        is_out_of_reach: this node cannot reach the node of that stage either.
        """
        self.flight.note("hop lost", reason)
        self.board.publish(StageHopLost(reason, is_out_of_reach))

    async def change(self, plan: Plan, stage: int, keep_kv_from: int) -> None:
        """Let the process continue under another plan, with the layers that it has; see ChangePlan. From now on `board`
        is for that plan, and is not ready before the process reports so. Raises StageLostError if it is gone."""
        old, self.board = self.board, StatusBoard()
        old.fail(StageLostError.code, f"{self.label} continues under ballot {plan.ballot.counter}")
        self._ballot = plan.ballot
        self._changed_by = asyncio.get_running_loop().time() + CHANGE_S
        await self._tell(ChangePlan(plan, stage, keep_kv_from))
        self.flight.note("change of plan", ballot=plan.ballot.counter, stage=stage, keep_kv_from=keep_kv_from)

    async def link_ranks(self, endpoints: Sequence[str]) -> None:
        """Send the leader of a tensor group the endpoints of ranks 1 to N-1. Raises StageLostError if it is gone."""
        await self._tell(LinkRanks(tuple(endpoints)))

    async def show(self, tls: Credentials) -> None:
        """Give the stage another certificate for the connections from now on. Raises StageLostError if it is gone."""
        self._start = replace(self._start, tls=tls)  # in case the process has not received its start message yet
        await self._tell(tls)

    async def press(self, level: int, free_bytes: int) -> None:
        """Send the stage the memory pressure of the machine, and the bytes that its KV may still take; a runner that is
        gone is ignored."""
        self._memory.level = level
        with contextlib.suppress(StageLostError):
            await self._tell(Pressure(level, free_bytes))

    async def _tell(self, command: ToRunner) -> None:
        if self._writer is None or self._gone.is_set():
            raise StageLostError(f"the runner of {self.label} is not running")
        try:
            await runner_pipe.write_command(self._writer, command)
        except TransportError as exc:
            raise StageLostError(f"the runner of {self.label} is gone") from exc

    async def stop(self) -> None:
        """End the process within 4 s, by a message first; `run` then returns. Returns when it is gone."""
        if not self._stopping.is_set():
            self.flight.note("stop asked")
        self._stopping.set()
        await self._gone.wait()

    async def _run(self, on_beat: OnBeat) -> None:
        child = self._spare or await spawn(self._command, self._environment)
        self._process = process = child.process
        self.pid = self.flight.pid = process.pid
        self._spawned_at = time.monotonic()
        self._memory.look(self._spawned_at)
        self.flight.note("spawned", pid=process.pid)
        noting = asyncio.create_task(self._note_pid(process.pid), name=f"pid of {self.label}")
        output = asyncio.create_task(self._log_output(process), name=f"output of {self.label}")
        try:
            await self._talk(child, output, on_beat)
        except StuckError as exc:
            self._ends(exc.end, exc.code, str(exc))
            await say_where_it_stands(process, self.flight)
        except MeshError as exc:
            self._ends(self._crash(str(exc)), exc.code, str(exc))
        finally:
            await shielded(self._see_off(process, output, noting))

    async def _note_pid(self, pid: int) -> None:
        if self._pid_files is not None:
            await asyncio.to_thread(self._pid_files.note, pid, self.label)

    async def _talk(self, child: RunnerChild, output: asyncio.Task[None], on_beat: OnBeat) -> None:
        """Follow the process until it has ended, is stuck, or is to stop. The end is noted, or raised."""
        await child.open()
        process, reader, self._writer = child.process, child.reader, child.writer
        with contextlib.suppress(TransportError):  # it has ended already, and its exit code says more
            await runner_pipe.write_command(self._writer, self._start)
        listener = asyncio.create_task(self._listen(reader, on_beat), name=f"reports of {self.label}")
        stopped = asyncio.create_task(self._stopping.wait(), name=f"stop of {self.label}")
        # not only the end of its pipe: a child of the runner may hold the pipe open
        exited = asyncio.create_task(exit_of(process), name=f"exit of {self.label}")
        try:
            await asyncio.wait((listener, stopped, exited), return_when=asyncio.FIRST_COMPLETED)
            if exited.done() and not self._stopping.is_set():
                # its last report and output say more than its exit code
                await asyncio.wait((listener, output), timeout=DRAIN_S)
        finally:
            for task in (listener, stopped, exited):
                task.cancel()
            results = await asyncio.gather(listener, stopped, exited, return_exceptions=True)
        if self._stopping.is_set():
            self._ends(End.STOPPED, StageLostError.code, f"{self.label} was stopped")
        elif isinstance(results[0], MeshError):
            raise results[0]
        elif self.board.failed is None:
            await ended(process, EXIT_S)
            self._was_killed_for_memory = self._memory.killed(process.returncode)
            fate = post_mortem(process.returncode, self._last_lines, is_oom=self._was_killed_for_memory)
            raise StageLostError(f"the runner of {self.label} {fate}")

    async def _listen(self, reader: asyncio.StreamReader, on_beat: OnBeat) -> None:
        """Follow the reports until the pipe ends. Raises StuckError when the runner makes no progress."""
        loop = asyncio.get_running_loop()
        watch = StageWatch(self._limits, self._stage_bytes)
        last = loop.time()
        reading: asyncio.Task[FromRunner | None] | None = None
        try:
            while True:
                reading = asyncio.ensure_future(runner_pipe.read_report(reader))
                step_s = FIRST_STEP_S
                while not (await asyncio.wait((reading,), timeout=step_s))[0]:
                    self._check(watch, watch.silent(step_s))
                    step_s = LISTEN_STEP_S
                    self._ask_where_it_hangs(watch.stuck_s)
                    if watch.silent_s >= self._limits.stopped_s and is_stopped(self.pid):
                        raise StuckError(f"the runner of {self.label} was stopped by a signal", End.STALLED)
                if (report := reading.result()) is None:
                    return
                gap_s, last = loop.time() - last, loop.time()
                self._take(report, on_beat)
                self._check(watch, watch.heard(report, gap_s))
                self._ask_where_it_hangs(watch.stuck_s)
                if last > self._changed_by:
                    self._check(watch, f"did not change to another plan within {CHANGE_S:.0f} s")
        finally:
            if reading is not None:
                reading.cancel()
                await asyncio.gather(reading, return_exceptions=True)

    def _ask_where_it_hangs(self, stuck_s: float) -> None:
        """With --hang-debug: write the stacks of a runner without progress to the log, once per interval."""
        every_s = self._limits.stacks_every_s
        if not every_s or stuck_s < every_s:
            self._stacks_asked = 0
        elif stuck_s >= every_s * (self._stacks_asked + 1) and self._can_be_asked:
            self._stacks_asked += 1
            _log.warning("runner %s has made no progress for %.0f s; its stacks follow", self.label, stuck_s)
            self.flight.note("stacks", "in the log of the node", stuck_s=round(stuck_s, 1))
            self._signal_for_stacks()

    def _check(self, watch: StageWatch, problem: str) -> None:
        if problem:
            ends = {Phase.STARTING: End.CRASHED, Phase.LOADING: End.WEDGED, Phase.READY: End.STALLED}
            # a rank without progress may wait for another rank; the peer that placed the group counts its failures
            waits = self._start.rank is not None and watch.phase is not Phase.STARTING
            raise StuckError(f"the runner of {self.label} {problem}", End.LOST if waits else ends[watch.phase])

    @property
    def _stage_bytes(self) -> int:
        return self._start.plan.stages[self._start.stage].reserve_bytes

    def _take(self, report: FromRunner, on_beat: OnBeat) -> None:
        if not self._heard_at:
            self.started_s = time.monotonic() - self._spawned_at
            self.flight.note("first report", after_s=round(self.started_s, 3))
        self._heard_at = asyncio.get_running_loop().time()
        match report:
            case RunnerListening(port, pid):
                self.flight.note("listening", port=port)
                self._listening = StageListening(f"{bracketed(self._host)}:{port}", pid)
                self.board.publish(self._listening)
            case StageLoading(done, total):
                self.flight.goes_on("loading", done=done, total=total)
                self.board.publish(report)
            case RunnerReady(loaded, rolls_back):
                self.flight.note("ready", load_s=round(loaded.load_s, 3), memory_bytes=loaded.memory_bytes)
                self._loaded, self.rolls_back = loaded, rolls_back
                self.board.publish(StageReady(loaded))
            case PlanChanged():
                self._go_on(report)
            case HopBroke(message):
                self.lose_hop(message)
            case Heartbeat():
                self.beat = report
                self._memory.look(time.monotonic())
                if self.board.ready:
                    self.flight.beat(report)
                on_beat(report)
            case RunnerFailed(code, message):
                self._ends(REPORTED.get(code) or self._crash(message), code, message)

    def _go_on(self, changed: PlanChanged) -> None:
        """Note that the process works for another plan now; of plans in quick succession only the last one counts."""
        if changed.ballot != self._ballot:
            return
        self._changed_by = math.inf
        self.flight.note("changed", resumed=changed.resumed)
        assert self._listening is not None, "a plan changes only in a loaded runner"
        self.board.publish(self._listening)
        self.board.publish(StageReady(self._loaded, changed.resumed))

    async def _see_off(
        self, process: asyncio.subprocess.Process, output: asyncio.Task[None], noting: asyncio.Task[None]
    ) -> None:
        ask = self._ask_to_stop if self._stopping.is_set() and self._writer is not None else None
        has_ended = await end_process(process, self._limits, self.flight, ask)
        await noting
        if has_ended:
            if self._pid_files is not None:
                self._pid_files.forget(process.pid)
        else:
            _log.error("runner %s (pid %d) has not ended after SIGKILL: a device driver holds it", self.label, self.pid)
        if self._writer is not None:
            self._writer.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.5):
                await output

    async def _ask_to_stop(self) -> None:
        assert self._writer is not None
        with contextlib.suppress(TransportError, TimeoutError):
            async with asyncio.timeout(0.5):
                await runner_pipe.write_command(self._writer, StopStage())

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
            if self._heard_stacks is not None:
                self._heard_stacks.hear(text)
            _log.info("runner %s: %s", self.label, text)


STACK_QUIET_S = 0.15
"""Seconds without a line after which the stacks are complete: faulthandler writes all threads within milliseconds."""

STACK_WAIT_S = 1.0
"""Seconds to wait for the first line: the kernel may take some time to run a starved process."""

MAX_STACK_LINES = 2000

_STACK = re.compile(r"(Current thread|Thread) 0x[0-9a-f]+ .*:$|  File \".*\", line \d+ in \S+$|  <.*>$|  \.\.\.$")
"""The lines that faulthandler writes (CPython, Python/traceback.c). Any other line of a runner is ignored."""


class StackListener:
    """Reads every line that a runner prints. One `listen` at a time; a second one waits for lines of its own."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._heard = ChangeSignal()

    def hear(self, line: str) -> None:
        if _STACK.match(line) and len(self._lines) < MAX_STACK_LINES:
            self._lines.append(line)
            self._heard.beat()

    async def listen(self) -> list[str]:
        """The lines of the stacks that come now; [] if none come."""
        lines: list[str] = []
        self._lines = lines
        if await self._heard.wait(STACK_WAIT_S):
            while await self._heard.wait(STACK_QUIET_S):
                pass
        return lines
