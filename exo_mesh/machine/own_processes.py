"""Lists the exo-mesh processes of this machine, and ends them: also leftovers whose node is gone."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import msgspec
import psutil
from msgspec.structs import replace

HOME_VARIABLE = "EXO_MESH_HOME"
_DATA_VARIABLE = "XDG_DATA_HOME"
KILL_WAIT_S = 5.0
"""A killed process is gone at once, unless it is stuck in a driver."""

_NODE_MODULE = "exo_mesh.cli.main"
_CHILD_MODULES = ("exo_mesh.rings.runner", "exo_mesh.text.", "exo_mesh.models.fetcher")
_NODE_VERBS = ("serve", "demo")


class OwnProcess(msgspec.Struct, frozen=True):
    """One process. kind: "node", "runner" or "helper". home: of its node, "" if unknown.

    leftover: it is a child of a node that has gone.
    """

    pid: int
    parent_pid: int
    kind: str
    home: str
    rss_bytes: int
    leftover: bool = False


def kind_of(cmdline: Sequence[str]) -> str:
    """Returns what a command line runs: "node", "runner" or "helper"; "" if it is not a process of a node. Pure."""
    words = list(cmdline)
    program = Path(words[0]).name.lower() if words else ""
    if program == "exo-mesh":
        return _node_kind(words[1:])
    if not program.startswith("python"):
        return ""
    options = next((index for index, word in enumerate(words[1:], 1) if word == "-m" or word[:1] != "-"), len(words))
    target, *rest = words[options:] or [""]
    if target == "-m" and rest:
        target, *rest = rest
        if target.startswith(_CHILD_MODULES):
            return "runner" if target == "exo_mesh.rings.runner" else "helper"
        return _node_kind(rest) if target == _NODE_MODULE else ""
    return _node_kind(rest) if Path(target).name == "exo-mesh" else ""


def _node_kind(arguments: Sequence[str]) -> str:
    return "node" if not arguments or arguments[0] in _NODE_VERBS or arguments[0].startswith("-") else ""


def home_of(cmdline: Sequence[str], environ: Mapping[str, str], here: Mapping[str, str], default: str) -> str:
    """Returns the home that a node with this command line and environment uses; "" if unknown. Pure.

    here: the environment of this process, whose usual home is `default`. A home is unknown if the environment cannot be
    read, and for `exo-mesh demo`, whose peers have homes of their own.
    """
    words = list(cmdline)
    named = environ.get(HOME_VARIABLE, "")
    for index, word in enumerate(words):
        if word == "--home" and index + 1 < len(words):
            named = words[index + 1]
        if word.startswith("--home="):
            named = word.partition("=")[2]
    if named:
        return _of_user(named, "~", environ.get("HOME", ""))
    is_demo = any(
        verb == "demo" and Path(before).name in ("exo-mesh", _NODE_MODULE) for before, verb in pairwise(words)
    )
    return "" if is_demo or not default else _usual_home(environ, here, default)


def _usual_home(environ: Mapping[str, str], here: Mapping[str, str], default: str) -> str:
    """The home without a flag or variable. Another user, or another HOME, has another one than this process."""
    if shared := environ.get(_DATA_VARIABLE):
        return os.path.join(shared, Path(default).name)
    if here.get(_DATA_VARIABLE):  # then `default` says nothing about a process without the variable
        return ""
    return _of_user(default, here.get("HOME", ""), environ.get("HOME", ""))


def _of_user(path: str, home: str, other: str) -> str:
    """A path below one home directory as that below another one; "" if that is unknown."""
    if not home or (path != home and not path.startswith(home.rstrip("/") + "/")):
        return path
    return other and other.rstrip("/") + path[len(home.rstrip("/")) :]


def own_processes(default_home: Path, home: Path | None = None) -> list[OwnProcess]:
    """Lists every exo-mesh process but this one, nodes first; with `home` only the processes of that node."""
    found = {process.pid: process for process in _found(str(default_home))}
    listed = []
    for process in found.values():
        parent = found.get(process.parent_pid)
        if process.kind != "node":
            process = replace(process, home=parent.home if parent else process.home, leftover=parent is None)
        if home is None or (process.home and Path(process.home).resolve() == home.resolve()):
            listed.append(process)
    return sorted(listed, key=lambda process: (process.kind != "node", process.pid))


def _found(default_home: str) -> Iterator[OwnProcess]:
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            cmdline = process.cmdline()
            kind = kind_of(cmdline)
            if not kind or process.pid == os.getpid():
                continue
            environ: Mapping[str, str] = {}
            with contextlib.suppress(psutil.AccessDenied, OSError):
                environ = process.environ()
            home = home_of(cmdline, environ, os.environ, default_home if kind == "node" else "")
            if home:  # "--home h1" in two directories names two homes
                with contextlib.suppress(psutil.AccessDenied, OSError):
                    home = os.path.normpath(Path(process.cwd()) / home)
            yield OwnProcess(process.pid, process.ppid(), kind, home, process.memory_info().rss)


def end_processes(processes: Iterable[OwnProcess], grace_s: float) -> dict[int, str]:
    """Sends SIGTERM, and SIGKILL after grace_s; returns "ended", "killed", "not permitted" or "stuck" by pid.

    A node that gets SIGTERM ends its own children, so only nodes and leftovers get the signal.
    """
    handles: dict[int, psutil.Process] = {}
    outcome: dict[int, str] = {}
    asked: list[psutil.Process] = []
    for one in processes:
        try:
            handles[one.pid] = process = psutil.Process(one.pid)
            if one.kind == "node" or one.leftover:
                process.terminate()
                asked.append(process)
        except psutil.NoSuchProcess:
            outcome[one.pid] = "ended"
        except psutil.AccessDenied:
            outcome[one.pid] = "not permitted"
            handles.pop(one.pid, None)
    psutil.wait_procs(asked, timeout=grace_s)
    outcome.update({pid: "ended" for pid, process in handles.items() if not process.is_running()})
    stuck = [process for pid, process in handles.items() if pid not in outcome]
    for process in stuck:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    _, alive = psutil.wait_procs(stuck, timeout=KILL_WAIT_S)
    left = {process.pid for process in alive}
    outcome.update({process.pid: "stuck" if process.pid in left else "killed" for process in stuck})
    return outcome
