"""As process 1 of a container: orphans are waited for, signals are passed on, the exit code is the node's."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.processes import clean_environ, eventually

UNSHARE = [*(["unshare"] if os.getuid() == 0 else ["unshare", "--map-root-user"]), "--pid", "--fork", "--mount-proc"]
TEXT = """
import os, signal, subprocess, sys, time
from exo_mesh.machine.first_process import leave_first_process
leave_first_process()
"""
ORPHAN = """
pid = int(subprocess.check_output(["sh", "-c", "sleep 0.05 >/dev/null & echo $!"]))
deadline = time.monotonic() + 10
while os.path.exists(f"/proc/{pid}") and time.monotonic() < deadline:
    time.sleep(0.01)
print(os.getpid() != 1, os.path.exists(f"/proc/{pid}"))
sys.exit(7)
"""
WAITING = """
signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))
print("ready", flush=True)
time.sleep(60)
"""


@pytest.fixture(autouse=True, scope="module")
def namespaces() -> None:
    if shutil.which("unshare") is None:
        pytest.skip("unshare is not installed")
    tried = subprocess.run([*UNSHARE, "true"], capture_output=True, text=True, timeout=20, check=False)
    if tried.returncode:
        pytest.skip(f"process namespaces cannot be made here: {tried.stderr.strip()}")


def as_first_process(code: str, home: Path) -> subprocess.Popen[str]:
    command = [*UNSHARE, sys.executable, "-c", TEXT + code]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, stdin=subprocess.DEVNULL,
        env=clean_environ(home),
    )  # fmt: skip


def test_an_orphan_is_no_zombie_and_the_exit_code_is_kept(tmp_path: Path) -> None:
    process = as_first_process(ORPHAN, tmp_path)
    assert process.communicate(timeout=30) == ("True False\n", "")
    assert process.returncode == 7


def test_a_signal_reaches_the_node(tmp_path: Path) -> None:
    process = as_first_process(WAITING, tmp_path)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    assert eventually(lambda: bool(children.read_text().split()), 5)
    os.kill(int(children.read_text().split()[0]), signal.SIGTERM)
    process.communicate(timeout=30)
    assert process.returncode == 5


def test_elsewhere_nothing_changes(tmp_path: Path) -> None:
    code = "import os; before = os.getpid()" + TEXT + "print(os.getpid() == before)"
    command = [sys.executable, "-c", code]
    assert subprocess.check_output(command, text=True, timeout=30, env=clean_environ(tmp_path)) == "True\n"
