"""The pipe to the node, in a thread of its own: heartbeats, reports and commands, even while the engine is busy."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import threading
import time
from collections.abc import Callable
from typing import NoReturn

from exo_mesh.domain.runner.heartbeat import Heartbeat
from exo_mesh.domain.runner.reports import FromRunner, RunnerFailed
from exo_mesh.errors import MeshError, TransportError
from exo_mesh.wire.runner_commands import StopStage, ToRunner
from exo_mesh.wire.runner_pipe import receive_command, send_report

HEARTBEAT_S = 0.5

STOP_DEADLINE_S = 1.5
"""Seconds from StopStage to the end of the process, even while the engine is busy; the node kills it after 2 s."""

MANY_BEATS = 4096
"""Calls of `beat_soon` that one heartbeat answers."""

EXIT_ORPHANED, EXIT_NO_PULSE = 3, 4

_log = logging.getLogger(__name__)


class NodeLink:
    """Owns the runner's end of the pipe. Ends the process when the node is gone, when a stop takes too long, and when
    `heartbeat` raises; a MeshError from `heartbeat` is reported first.

    `report` may be called from any thread. `on_command` is called in this thread with every command but StopStage, and
    `on_stop` once with StopStage. `before_exit` is called just before this class ends the process.
    """

    def __init__(
        self,
        pipe: socket.socket,
        heartbeat: Callable[[], Heartbeat],
        on_command: Callable[[ToRunner], None],
        on_stop: Callable[[], None],
        before_exit: Callable[[], None] = lambda: None,
    ) -> None:
        self._pipe = pipe
        self._heartbeat = heartbeat
        self._on_command = on_command
        self._on_stop = on_stop
        self._before_exit = before_exit
        self._sending = threading.Lock()
        self._woken, self._waker = socket.socketpair()
        self._waker.setblocking(False)

    def start(self) -> None:
        threading.Thread(target=self._run, name="node_link", daemon=True).start()

    def beat_soon(self) -> None:
        """Let the thread send a heartbeat now. From any thread; never waits, even if the node does not read."""
        with contextlib.suppress(BlockingIOError):  # it is awake, or waits for the node
            self._waker.send(b"\0")

    def report(self, report: FromRunner) -> None:
        """Send one report to the node; end the process if the node is gone."""
        try:
            with self._sending:
                send_report(self._pipe, report)
        except TransportError:
            self._exit(EXIT_ORPHANED)

    def _run(self) -> None:
        try:
            self._beat()
        except MeshError as exc:
            self.report(RunnerFailed(exc.code, str(exc)))
        except Exception:  # noqa: BLE001 - logged, and then the process ends
            _log.exception("the heartbeat failed; the runner ends")
        self._exit(EXIT_NO_PULSE)  # without this thread nothing would end the process when its node dies

    def _exit(self, code: int) -> NoReturn:
        self._before_exit()
        os._exit(code)

    def _beat(self) -> None:
        due = time.monotonic() + HEARTBEAT_S
        while True:
            sources = [self._pipe, self._woken]
            readable, _, _ = select.select(sources, [], [], max(0.0, due - time.monotonic()))
            if self._pipe in readable:
                self._command()
            if self._woken in readable:
                self._woken.recv(MANY_BEATS)
                due = time.monotonic()
            if time.monotonic() >= due:
                due = time.monotonic() + HEARTBEAT_S
                self.report(self._heartbeat())

    def _command(self) -> None:
        command = receive_command(self._pipe)
        if command is None:
            self._exit(EXIT_ORPHANED)  # without a node, nobody would ever stop this process
        if isinstance(command, StopStage):
            timer = threading.Timer(STOP_DEADLINE_S, self._exit, (0,))
            timer.daemon = True
            timer.start()
            self._on_stop()
        else:
            self._on_command(command)
