"""Run a node on this machine until Ctrl-C or SIGTERM. It needs no arguments and no configuration.

Streams that are under way may finish first (--stop-grace); a second Ctrl-C ends them.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from exo_mesh.base.authorities import authorities_unread
from exo_mesh.base.gc_pauses import gc_pauses, rare_full_collections
from exo_mesh.base.telemetry.line_writer import RotatingFile
from exo_mesh.base.telemetry.node_logs import BOTH, JSON, NodeLogs
from exo_mesh.cli import exit_codes
from exo_mesh.cli.parser import add_node_flags, node_flags
from exo_mesh.cli.screen import ConsoleScreen, JsonScreen, Screen
from exo_mesh.engine import floors
from exo_mesh.errors import InputError
from exo_mesh.machine import open_files
from exo_mesh.machine.allocator import use_one_arena
from exo_mesh.machine.first_process import leave_first_process
from exo_mesh.machine.systemd import Notifier, supervised, take_notifier
from exo_mesh.settings.config import ConfigError, LoadedSettings, Settings
from exo_mesh.settings.home import PRIVATE_UMASK, make_private
from exo_mesh.settings.loading import load_settings
from exo_mesh.wire.channel_options import QUICK_POLLING

STOP_DEADLINE_S = 4.5
"""Once the streams have finished, the process ends within 5 s even if a part of the node hangs."""

SWITCH_S = 0.0005
"""Longest time that a thread runs Python code while the event loop waits for the interpreter. An answer takes several
turns of the loop, and with Python's default of 5 ms each would wait that long while a thread reads a large body."""

OFFLINE_ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
"""Keeps the engines' libraries from downloading: runners inherit it. The node itself then fetches from peers only."""


if TYPE_CHECKING:
    from exo_mesh.cli.wiring import RunningNode


_log = logging.getLogger(__name__)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds a flag for each setting of a node, and `--until-stdin-closes`."""
    parser.add_argument(
        "--until-stdin-closes",
        action="store_true",
        help="stop when standard input closes (for programs that start a node)",
    )
    add_node_flags(parser)


def run(args: argparse.Namespace) -> NoReturn:
    """Runs the node, then ends the process. Raises MeshErrors if the node cannot start."""
    loaded = load_settings(node_flags(args), os.environ)
    _require_versions()
    use_one_arena()
    leave_first_process()
    environ = dict(os.environ)  # a restart uses the environment from before the changes below
    os.umask(PRIVATE_UMASK)
    make_private(loaded.settings.home)
    logs = _begin_logging(loaded.settings)
    for warning in loaded.warnings:
        _log.warning("%s", warning)
    if loaded.settings.offline:
        os.environ.update(OFFLINE_ENVIRONMENT)
    for name, value in QUICK_POLLING.items():
        os.environ.setdefault(name, value)
    _log.debug("raised the limit of open files to %d", open_files.raise_limit())
    notifier = take_notifier(os.environ, os.getpid())
    screen = _screen(loaded.settings.log_format, logs)
    deadline = threading.Timer(STOP_DEADLINE_S, _end_now, ["a part of the node did not stop in time"])
    deadline.daemon = True
    try:
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            serving = _serve(loaded, logs, screen, notifier, deadline, watch_stdin=args.until_stdin_closes)
            comes_back = runner.run(serving)
    finally:
        deadline.cancel()
    if comes_back:
        _begin_again(environ)
    _leave()


def _begin_logging(settings: Settings) -> NodeLogs:
    """Sets logging up as the settings say; before, as in other verbs, only errors are logged."""
    file = None
    if settings.log_file.strip().lower() != "none":
        path = settings.home / Path(settings.log_file).expanduser()
        file = RotatingFile(path, settings.log_file_max_bytes, settings.log_files, settings.log_retention_days)
    return NodeLogs(settings.log_format, settings.log_level, file)


def _screen(log_format: str, logs: NodeLogs) -> Screen:
    """The start and stop messages: as JSON if the log is JSON, else as text for people."""
    if log_format == JSON:
        return JsonScreen(logs.event)
    return ConsoleScreen(logs.text_file() if log_format == BOTH else None)


def _require_versions() -> None:
    """Raises ConfigError if a library is too old for this version. Runs before the library is imported, because gRPC's
    generated code raises an error of its own at import."""
    if old := floors.too_old():
        raise ConfigError(f"{old}: {floors.upgrade()}")


async def _serve(
    loaded: LoadedSettings,
    logs: NodeLogs,
    screen: Screen,
    notifier: Notifier,
    deadline: threading.Timer,
    *,
    watch_stdin: bool,
) -> bool:
    """Serves until the stop signal; returns whether the node is to be restarted.

    deadline: starts when the streams have finished. Its thread ends the process even if the event loop is blocked, or
    waits for its worker threads while it closes.
    """
    with gc_pauses(), authorities_unread():  # imports gRPC and aiohttp, which `exo-mesh serve --help` does not need
        from exo_mesh.cli.wiring import RunningNode
        from exo_mesh.wire.channels import keep_poller

    rare_full_collections()
    sys.setswitchinterval(SWITCH_S)
    await keep_poller()
    stop = _StopSignal(screen)
    stop.listen(watch_stdin=watch_stdin)
    node = RunningNode(loaded, logs)
    try:
        if await _unless_stopped(node.start(), stop):
            screen.started(node.facts())
            async with supervised(notifier, node.status_line, lambda: stop.comes_back):
                await _until_asked(stop, node)
                await stop.unless_hurried(node.finish())
    except InputError as exc:
        raise exc if isinstance(exc, ConfigError) else ConfigError(str(exc), param=exc.param) from exc
    finally:
        deadline.start()
        await node.stop()
    return stop.comes_back


async def _until_asked(stop: _StopSignal, node: RunningNode) -> None:
    """Waits for a signal, or for a request over the network to stop or restart."""
    asked = asyncio.ensure_future(node.asked_to_stop())
    signalled = asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait((asked, signalled), return_when=asyncio.FIRST_COMPLETED)
        if not signalled.done():
            stop.ask(asked.result())
    finally:
        asked.cancel()
        signalled.cancel()
        await asyncio.gather(asked, signalled, return_exceptions=True)


async def _unless_stopped(work: Coroutine[Any, Any, None], stop: _StopSignal) -> bool:
    """Runs `work` to its end and returns True; if the stop signal comes first, cancels `work` and returns False."""
    working, stopping = asyncio.ensure_future(work), asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait((working, stopping), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            working.result()
            return True
        return False
    finally:
        working.cancel()
        stopping.cancel()
        await asyncio.gather(working, stopping, return_exceptions=True)


def _end_now(why: str) -> None:
    """Ends the process without cleaning up. Runners notice that their pipe closes, and exit."""
    late = threading.Timer(1.0, os._exit, [exit_codes.FAILED])
    late.daemon = True
    late.start()  # the print below blocks if nobody reads our output any more
    print(f"exo-mesh: {why}; exiting at once", file=sys.stderr, flush=True)
    for handler in logging.getLogger().handlers:
        handler.close()  # writes the queued lines, within a time limit
    os._exit(exit_codes.FAILED)


def _leave() -> NoReturn:
    """Ends the process of a node that has stopped, without the interpreter's own clean-up.

    That clean-up takes 0.2 s, has nothing left to do, and may wait without limit for threads and exit handlers of
    libraries.
    """
    _flush()
    os._exit(exit_codes.OK)


def _flush() -> None:
    """Writes queued log lines and output; ignores errors of a reader that has gone."""
    logging.shutdown()
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()


def _begin_again(environ: Mapping[str, str]) -> NoReturn:
    """Runs the same command again in this process, so that its supervisor keeps the process id."""
    _flush()
    os.execve(sys.executable, sys.orig_argv, environ)


class _StopSignal:
    """Collects requests to stop: SIGINT, SIGTERM or SIGHUP, the end of standard input, or a caller of the API.

    A second signal, or the end of standard input, ends the wait for streams; one more signal ends the process.
    comes_back: whether the node is to be restarted.
    """

    def __init__(self, screen: Screen) -> None:
        self._screen = screen
        self._event = asyncio.Event()
        self._hurry = asyncio.Event()
        self._is_waiting = False
        self._signalled = False
        self.comes_back = False

    async def unless_hurried(self, finishing: Coroutine[Any, Any, None]) -> None:
        """Runs `finishing` to its end, or cancels it at a second signal."""
        working, hurrying = asyncio.ensure_future(finishing), asyncio.ensure_future(self._hurry.wait())
        self._is_waiting = True
        try:
            await asyncio.wait((working, hurrying), return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                working.result()
        finally:
            self._is_waiting = False
            working.cancel()
            hurrying.cancel()
            await asyncio.gather(working, hurrying, return_exceptions=True)

    def ask(self, what: str) -> None:
        """Handles "stop" or "restart" from a caller of the API."""
        self.comes_back = what == "restart"
        self._stop(f"{what} requested over the API")

    async def wait(self) -> None:
        await self._event.wait()

    def listen(self, *, watch_stdin: bool) -> None:
        """Installs the signal handlers of this process; watch_stdin: also stop at the end of standard input."""
        loop = asyncio.get_running_loop()
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(signum, self._on_signal, signum)
        if watch_stdin:
            threading.Thread(target=self._await_end_of_stdin, args=(loop,), name="stdin", daemon=True).start()

    def _on_signal(self, signum: int) -> None:
        # a parent process may both close our standard input and send a signal: that counts as one request to stop
        name = signal.Signals(signum).name
        self.comes_back = False
        if self._is_waiting and self._event.is_set() and not self._hurry.is_set():
            self._hurry.set()
        elif self._signalled:
            _end_now(name)
        self._signalled = True
        self._stop(name)

    def _await_end_of_stdin(self, loop: asyncio.AbstractEventLoop) -> None:
        # os.read instead of sys.stdin, whose buffer this thread would still hold locked when the interpreter ends
        while os.read(0, 4096):
            pass
        if not loop.is_closed():
            loop.call_soon_threadsafe(self._at_end_of_stdin)

    def _at_end_of_stdin(self) -> None:
        self._hurry.set()  # the process that started us has gone, or waits for us to end
        self._stop("standard input has closed")

    def _stop(self, reason: str) -> None:
        if not self._event.is_set():
            self._event.set()
            self._screen.stopping(reason)


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    """Returns uvloop if it is installed: gRPC round trips are three times as fast on it."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory
