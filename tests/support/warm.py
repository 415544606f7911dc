"""Starts Python children of the tests by forking a warm interpreter, which has imported what they import.

A node that a test runs in its own process starts its runners and template renderers with `python -m MODULE`. Most of
their CPU time is imports: 0.4 s for a runner, against 0.03 s for a fork. So the first such child of a test process
starts a *warm* process with the child's environment, and the child and all later ones are forks of the warm process. A
fork becomes a child of the test process, with the arguments, environment, files and session that it was to have, and
then runs MODULE as `python -m MODULE` does. Children of real nodes, all other commands, and children that cannot be
forked start as always. Only on Linux; EXO_MESH_COLD_TESTS=1 turns it off.
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
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

WARM = {
    "exo_mesh.rings.runner": ("exo_mesh.rings.runner.process", "exo_mesh_dummy", "uvloop"),
    "exo_mesh.text.template_child": ("exo_mesh.text.template_child",),
    "exo_mesh.models.fetcher": ("exo_mesh.models.fetcher.service", "exo_mesh.models.fetcher.peer_source"),
    "exo_mesh.rings.runner.asking.survey": ("exo_mesh.rings.runner.asking.survey",),
    "exo_mesh.rings.runner.asking.selftest": ("exo_mesh.rings.runner.asking.selftest",),
    "exo_mesh.rings.runner.asking.layer_speed": ("exo_mesh.rings.runner.asking.layer_speed",),
    "exo_mesh.weights.card_child": ("exo_mesh.weights.card_child",),
    "exo_mesh.weights.gguf_views": ("exo_mesh.weights.gguf_views",),
    "tests.support.fake_rkllama": ("tests.support.fake_rkllama",),
    "tests.support.fake_openai": ("tests.support.fake_openai",),
}
"""What the warm process imports, by the module that its forks run. Each module has a warm process of its own."""

READ_AT_START = (
    *("PYTHON", "LC_", "LANG", "LD_", "MALLOC_", "GLIBC_"),
    *("OMP_", "GOMP_", "KMP_", "OPENBLAS_", "MKL_", "GRPC_"),
)
"""How variables begin that an interpreter or a library reads when it starts; forks of a warm process share them."""

READ_BY_IMPORTS = {"exo_mesh.models.fetcher": ("HF_", "HUGGING_FACE_", "XDG_", "HOME")}
"""The same of what a module imports: huggingface_hub keeps the address and the folders that it finds there."""

MOST_WARM = 8
"""Most warm processes at a time; of more, the oldest ends."""

ROOT = Path(__file__).parents[2]
PYTHON = sys.executable  # as it is now: tests set another one to see what happens then
COLD = "EXO_MESH_COLD_TESTS"
ANSWER_S = 60.0
"""Longest wait for the imports of a warm process, and for a fork."""

MOST_MESSAGE_BYTES = 2**18
MOST_FILES = 16
FIRST_FREE_FD = 512
"""Files of a fork are moved to this number or above before they get the numbers that they are to have."""

MOST_COMMAND_BYTES = 4096
_PR_SET_CHILD_SUBREAPER = 36
_ARG_START = 47
"""Index of arg_start in /proc/self/stat, counted from 0; proc(5) has it as field 48."""

_cold_fork_exec = getattr(subprocess, "_fork_exec", None)
_Key = tuple[str, frozenset[tuple[str, str]]]
_warm: dict[_Key, WarmProcess] = {}
_lock = threading.Lock()
"""Held while a warm process starts or forks: each answer belongs to the last message."""

_AS_USUAL = (True, -1, None, None, None, -1, None)
"""restore_signals, process_group, gid, groups, uid, umask and preexec_fn of a child for which none was given."""


def install() -> None:
    """Let this process start the children in `WARM` by forks. A second call does nothing."""
    if sys.platform == "linux" and _cold_fork_exec is not None and not os.environ.get(COLD):
        subprocess._fork_exec = _fork_exec  # type: ignore[attr-defined]


def end() -> None:
    """End the warm processes of this process. Their forks go on."""
    with _lock:
        while _warm:
            _warm.popitem()[1].close()


def _fork_exec(*call: Any) -> int:
    """Stands in for `_posixsubprocess.fork_exec`, whose first arguments are the same in Python 3.11 to 3.14."""
    if (start := _start(call)) is not None and (pid := _fork(start, _files(call))):
        return pid
    return int(_cold_fork_exec(*call))  # type: ignore[misc]


def _start(call: tuple[Any, ...]) -> dict[str, Any] | None:
    """The command, folder, environment and session of the child; None if no fork would be what the command is."""
    arguments, programs, close_fds, _, cwd, environment = call[:6]
    restore_signals, session, *others = call[14:22]
    words = [os.fsdecode(word) for word in arguments]
    folder = os.fsdecode(cwd or os.getcwd())
    if not _can_be_warm(words) or [os.fsdecode(one) for one in programs] != [PYTHON]:
        return None
    if not close_fds or (restore_signals, *others) != _AS_USUAL or not os.access(folder, os.X_OK):
        return None
    environ = dict(os.environ)
    if environment is not None:
        environ = dict(os.fsdecode(item).partition("=")[::2] for item in environment)
    return {"argv": words[2:], "command": words, "environ": environ, "cwd": folder, "session": bool(session)}


def _files(call: tuple[Any, ...]) -> dict[int, int]:
    """The files of the child, numbers there by numbers here; what is not redirected is as it is here."""
    keep, errpipe = call[3], call[13]
    files = {number: number for number in (0, 1, 2, *keep) if number != errpipe}
    return files | {target: source for target, source in ((0, call[6]), (1, call[9]), (2, call[11])) if source != -1}


def _can_be_warm(words: list[str]) -> bool:
    """Whether a fork can show this command, which it splits at its spaces."""
    if words[:2] != [PYTHON, "-m"] or len(words) < 3 or words[2] not in WARM:
        return False
    return not any(" " in word for word in words) and len(" ".join(words)) < MOST_COMMAND_BYTES


def _key(module: str, environ: Mapping[str, str]) -> _Key:
    shared = READ_AT_START + READ_BY_IMPORTS.get(module, ())
    return module, frozenset(item for item in environ.items() if item[0].startswith(shared))


def _fork(start: dict[str, Any], files: dict[int, int]) -> int:
    """Fork a warm process, which is started if there is none yet; 0 if that fails."""
    module, environ = start["argv"][0], start["environ"]
    key = _key(module, environ)
    with _lock:
        try:
            if key not in _warm or not _warm[key].runs:
                _end_oldest(key)
                _warm[key] = WarmProcess(module, environ)
            return _warm[key].fork(start, files)
        except (OSError, ValueError):
            if key in _warm:
                _warm.pop(key).close()
            return 0


def _end_oldest(key: _Key) -> None:
    """Make room for the warm process of this key."""
    while key in _warm or len(_warm) >= MOST_WARM:
        _warm.pop(key if key in _warm else next(iter(_warm))).close()


class WarmProcess:
    """The warm process of one module, seen from the test process that owns it. It ends with its socket."""

    def __init__(self, module: str, environ: Mapping[str, str]) -> None:
        """Waits for its imports. Raises OSError if it ends before that."""
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.settimeout(ANSWER_S)
        # the padding makes room for the commands that forks show; no word is MODULE, by which tests find the forks
        order = f"{theirs.fileno()}:{module}:{','.join(WARM[module])}"
        command = [PYTHON, "-c", _PROGRAM, order, "-" * MOST_COMMAND_BYTES]
        with theirs:
            self._process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=environ,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        try:
            self._answer()
        except OSError:
            self.close()
            raise

    @property
    def runs(self) -> bool:
        return self._process.poll() is None

    def close(self) -> None:
        """End the process, and wait for that."""
        self._socket.close()
        self._process.kill()
        self._process.wait(ANSWER_S)

    def fork(self, start: dict[str, Any], files: dict[int, int]) -> int:
        """Start a fork with these files, numbers there by numbers here; returns its pid. Raises OSError."""
        message = json.dumps({**start, "targets": list(files)}).encode("utf-8", "surrogateescape")
        if len(message) > MOST_MESSAGE_BYTES or len(files) > MOST_FILES:
            raise OSError("the message is too long")
        _become_subreaper(True)
        try:
            socket.send_fds(self._socket, [message], list(files.values()))
            return int(self._answer())
        finally:
            _become_subreaper(False)

    def _answer(self) -> bytes:
        if not (answer := self._socket.recv(64)):
            raise OSError("the warm process has ended")
        return answer


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
    orders.send(b"ready")
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
            if not os.read(go_reader, 1):  # the warm process ended before it answered
                os._exit(1)
            orders.close()
            _become(json.loads(message.decode("utf-8", "surrogateescape")), files)
            runpy.run_module(module, run_name="__main__", alter_sys=True)
            sys.exit(0)
        for file in files:
            os.close(file)
        os.waitpid(middle, 0)
        orders.send(os.read(pid_reader, 64))
        os.write(go_writer, b"1")
        for end in (go_writer, go_reader, pid_reader, pid_writer):
            os.close(end)


def _become(start: dict[str, Any], files: list[int]) -> None:
    """Turn this fork into what the message describes: its files, session, folder, environment and arguments."""
    import fcntl

    free = max(FIRST_FREE_FD, *(target + 1 for target in start["targets"]))
    safe = [fcntl.fcntl(file, fcntl.F_DUPFD, free) for file in files]
    os.closerange(3, free)
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
