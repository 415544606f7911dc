"""Real `exo-mesh` processes for tests."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import psutil

from exo_mesh.cli.client.child_node import own_environ

COMMAND = [sys.executable, "-m", "exo_mesh.cli.main"]
QUIET_FLAGS = ["--host", "127.0.0.1", "--grpc-port", "0", "--discovery", "none", "--engine", "dummy"]
"""A node that is alone, talks to this machine only, and loads nothing heavy."""


def clean_environ(home: Path) -> dict[str, str]:
    """The environment without settings of exo-mesh, with a home and running nodes of its own, as another user has."""
    return own_environ(EXO_MESH_HOME=str(home), XDG_STATE_HOME=str(home / "state"), COLUMNS="100")


def start(argv: list[str], home: Path) -> subprocess.Popen[str]:
    """Start `exo-mesh argv` with its output in pipes."""
    return subprocess.Popen(
        [*COMMAND, *argv],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=clean_environ(home),
        start_new_session=True,
    )


def run(
    argv: list[str], home: Path, *, stdin: str | None = None, timeout_s: float = 60
) -> subprocess.CompletedProcess[str]:
    """Run `exo-mesh argv` to its end."""
    return run_in(clean_environ(home), argv, stdin=stdin, timeout_s=timeout_s)


def run_in(
    environ: Mapping[str, str], argv: list[str], *, stdin: str | None = None, timeout_s: float = 60
) -> subprocess.CompletedProcess[str]:
    """As `run`, with an environment of the test's own."""
    return subprocess.run(
        [*COMMAND, *argv],
        check=False,
        input=stdin or "",
        capture_output=True,
        text=True,
        timeout=timeout_s,
        env=dict(environ),
    )


def read_until(process: subprocess.Popen[str], word: str) -> str:
    """Standard output up to and including the line with `word`; all of it if it never comes."""
    assert process.stdout is not None
    shown = ""
    for line in process.stdout:
        shown += line
        if word in line:
            break
    return shown


def eventually(condition: Callable[[], bool], deadline_s: float = 10.0) -> bool:
    """Does it become true in time?"""
    end = time.monotonic() + deadline_s
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.02)
    return condition()


def gone(processes: list[psutil.Process]) -> bool:
    """Have all of them ended? A process that only waits to be reaped has."""
    return not [p for p in processes if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
