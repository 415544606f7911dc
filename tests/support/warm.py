"""Starts Python children of the tests by forking a warm interpreter, which has imported what they import.

A node that a test runs in its own process starts its runners and template renderers with `python -m MODULE`. Most of
their CPU time is imports: 0.4 s for a runner, against 0.03 s for a fork. So the first such child of a test process
starts a *warm* process, and each later one is a fork of it. The fork becomes a child of the test process, with the
arguments, environment, files and session that it was to have, and then runs MODULE as `python -m MODULE` does.
Children of real nodes, and all other commands, start as always. Only on Linux; EXO_MESH_COLD_TESTS=1 turns it off.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

WARM = {
    "exo_mesh.runner": ("exo_mesh.runner.process", "exo_mesh_dummy", "uvloop"),
    "exo_mesh.text.template_child": ("exo_mesh.text.template_child",),
    "tests.support.fake_rkllama": ("tests.support.fake_rkllama",),
    "tests.support.fake_openai": ("tests.support.fake_openai",),
}
"""What the warm process imports, by the module that its forks run. Each module has a warm process of its own."""

ROOT = Path(__file__).parents[2]
PYTHON = sys.executable  # as it is now: tests set another one to see what happens then
COLD = "EXO_MESH_COLD_TESTS"
ANSWER_S = 60.0
"""Longest wait for a fork; the first one waits for the imports."""

MOST_MESSAGE_BYTES = 2**18
MOST_FILES = 16
FIRST_FREE_FD = 512
"""Files of a fork are moved above this number before they get the numbers that they are to have."""

MOST_COMMAND_BYTES = 4096
_PR_SET_CHILD_SUBREAPER = 36
_ARG_START = 47
"""Index of arg_start in /proc/self/stat, counted from 0; proc(5) has it as field 48."""

_cold_fork_exec = getattr(subprocess, "_fork_exec", None)
_warm: dict[str, WarmProcess] = {}


def install() -> None:
    """Let this process start the children in `WARM` by forks. A second call does nothing."""
    if sys.platform == "linux" and _cold_fork_exec is not None and not os.environ.get(COLD):
        subprocess._fork_exec = _fork_exec  # type: ignore[attr-defined]


def end() -> None:
    """End the warm processes of this process. Their forks go on."""
    while _warm:
        _warm.popitem()[1].close()


def _fork_exec(*call: Any) -> int:
    """Stands in for `_posixsubprocess.fork_exec`, whose first arguments are the same in Python 3.11 to 3.14."""
    (arguments, _, _, keep, cwd, environment, p2cread, _, _, c2pwrite, _, errwrite, _, errpipe, _, session) = call[:16]
    words = [os.fsdecode(word) for word in arguments]
    environ = dict(os.environ)
    if environment is not None:
        environ = dict(os.fsdecode(item).partition("=")[::2] for item in environment)
    if not _can_be_warm(words, environ):
        return int(_cold_fork_exec(*call))  # type: ignore[misc]
    files = {number: number for number in keep if number != errpipe}
    files |= {target: source for target, source in ((0, p2cread), (1, c2pwrite), (2, errwrite)) if source != -1}
    module = words[2]
    if module not in _warm or not _warm[module].runs:
        _warm[module] = WarmProcess(module)
    start = {"argv": words[2:], "command": words, "environ": environ, "cwd": os.fsdecode(cwd or os.getcwd())}
    return _warm[module].fork({**start, "session": bool(session)}, files)


def _can_be_warm(words: list[str], environ: dict[str, str]) -> bool:
    """Whether a fork would be what the command is: some variables are read when an interpreter starts, and the command
    that a fork shows is split at its spaces."""
    if words[:2] != [PYTHON, "-m"] or len(words) < 3 or words[2] not in WARM:
        return False
    if any(" " in word for word in words) or len(" ".join(words)) >= MOST_COMMAND_BYTES:
        return False
    read_at_start = {name for name in {*environ, *os.environ} if name.startswith(("PYTHON", "LC_", "LANG", "LD_"))}
    return all(environ.get(name) == os.environ.get(name) for name in read_at_start)


class WarmProcess:
    """The warm process of one module, seen from the test process that owns it. It ends with its socket."""

    def __init__(self, module: str) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.settimeout(ANSWER_S)
        # the padding makes room for the commands that forks show; no word is MODULE, by which tests find the forks
        order = f"{theirs.fileno()}:{module}:{','.join(WARM[module])}"
        command = [PYTHON, "-c", _PROGRAM, order, "-" * MOST_COMMAND_BYTES]
        self._process = subprocess.Popen(
            command, cwd=ROOT, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, start_new_session=True
        )
        theirs.close()

    @property
    def runs(self) -> bool:
        return self._process.poll() is None

    def close(self) -> None:
        """Let the process end, and wait for that."""
        self._socket.close()
        self._process.wait(ANSWER_S)

    def fork(self, start: dict[str, Any], files: dict[int, int]) -> int:
        """Start a fork with these files, numbers there by numbers here; returns its pid. Raises OSError."""
        message = json.dumps({**start, "targets": list(files)}).encode("utf-8", "surrogateescape")
        _become_subreaper(True)
        try:
            socket.send_fds(self._socket, [message], list(files.values()))
            return int(self._socket.recv(64))
        finally:
            _become_subreaper(False)


def _become_subreaper(wanted: bool) -> None:
    """While this holds, a grandchild whose parent ends becomes a child of this process."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, int(wanted), 0, 0, 0)


_PROGRAM = "from tests.support import warm; import sys; warm.serve(*sys.argv[1].split(':'))"


def serve(fd: str, module: str, imports: str) -> None:
    """The warm process: imports, then forks for each message until its socket closes; returns in no fork."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for name in imports.split(","):
        importlib.import_module(name)
    sys.modules.pop(module, None)  # the fork runs it as __main__
    orders = socket.socket(fileno=int(fd))
    while True:
        message, files, _, _ = socket.recv_fds(orders, MOST_MESSAGE_BYTES, MOST_FILES)
        if not message:
            return
        go_reader, go_writer = os.pipe()
        pid_reader, pid_writer = os.pipe()
        middle = os.fork()
        if middle == 0:
            if pid := os.fork():  # the parent of the fork ends at once: the test process becomes its parent
                os.write(pid_writer, b"%d" % pid)
                os._exit(0)
            os.close(go_writer)
            os.read(go_reader, 1)
            orders.close()
            _become(json.loads(message.decode("utf-8", "surrogateescape")), files)
            runpy.run_module(module, run_name="__main__", alter_sys=True)
            sys.exit(0)
        for file in files:
            os.close(file)
        os.waitpid(middle, 0)
        orders.send(os.read(pid_reader, 64))
        for end in (go_writer, go_reader, pid_reader, pid_writer):
            os.close(end)


def _become(start: dict[str, Any], files: list[int]) -> None:
    """Turn this fork into what the message describes: its files, session, folder, environment and arguments."""
    import fcntl

    safe = [fcntl.fcntl(file, fcntl.F_DUPFD, FIRST_FREE_FD) for file in files]
    os.closerange(3, FIRST_FREE_FD)
    for source, target in zip(safe, start["targets"], strict=True):
        os.dup2(source, target)
        os.close(source)
    if start["session"]:
        os.setsid()
    os.chdir(start["cwd"])
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)  # as in an interpreter that starts
    os.environ.clear()
    os.environ.update(start["environ"])
    sys.argv[:] = start["argv"]
    sys.path[0] = start["cwd"]
    _show_command(start["command"])


def _show_command(words: list[str]) -> None:
    """Let `ps` show these words. Where the last byte of its room is not 0, the kernel reads up to the first 0."""
    stat = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    begin, end = int(stat[_ARG_START - 2]), int(stat[_ARG_START - 1])
    text = " ".join(words).encode("utf-8", "surrogateescape")
    with open("/proc/self/mem", "r+b", buffering=0) as memory:
        memory.seek(begin)
        memory.write(text.ljust(end - begin - 1, b"\0") + b"-")
