"""Children of the tests that are forked from a warm interpreter are what a new interpreter would be."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.support import warm

SHOW = """
import json, os, signal, sys, threading
print(json.dumps({
    "name": __name__, "argv": sys.argv[1:], "cwd": os.getcwd(), "path": sys.path[0],
    "session": os.getsid(0) == os.getpid(), "passed": os.fstat(int(sys.argv[1])).st_ino,
    "variable": os.environ.get("GIVEN"), "home": os.environ.get("HOME"), "input": sys.stdin.read(),
    "files": sorted(int(name) for name in os.listdir("/proc/self/fd"))[:-1],
    "threads": threading.active_count(), "pipe": signal.getsignal(signal.SIGPIPE).name, "group": os.getpgid(0),
    "interrupt": signal.getsignal(signal.SIGINT) is signal.default_int_handler, "parent": os.getppid(),
}), flush=True)
print("noise", file=sys.stderr)
sys.exit(7)
"""
pytestmark = pytest.mark.skipif(sys.platform != "linux" or warm.COLD in os.environ, reason="no child is forked here")


@pytest.fixture
def shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the module `shows`, which prints what it finds; a warm process may run it."""
    (tmp_path / "shows.py").write_text(SHOW)
    monkeypatch.setitem(warm.WARM, "shows", ("json",))
    return tmp_path


def ask(folder: Path, variables: dict[str, str]) -> tuple[dict[str, object], bytes, int]:
    """What the module finds when it is started with a file, a session and an environment of its own."""
    reader, writer = os.pipe()
    try:
        child = subprocess.run(
            [sys.executable, "-m", "shows", str(writer), "word"],
            input=b"hello",
            capture_output=True,
            pass_fds=[writer],
            start_new_session=True,
            cwd=folder,
            env={"HOME": "/nowhere", **variables},
            timeout=60,
            check=False,
        )
        found = json.loads(child.stdout)
        assert found.pop("passed") == os.fstat(writer).st_ino and found.pop("group") != os.getpgid(0)
        return found, child.stderr, child.returncode
    finally:
        os.close(reader)
        os.close(writer)


def test_a_fork_finds_what_a_new_interpreter_finds(shown: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inherited = {name: value for name, value in os.environ.items() if name.startswith(("PYTHON", "LC_", "LANG", "LD_"))}
    forked = ask(shown, {"GIVEN": "1", **inherited})
    assert "shows" in warm._warm, "it was forked"
    monkeypatch.delitem(warm.WARM, "shows")
    assert forked == ask(shown, {"GIVEN": "1", **inherited})
    assert forked[0]["parent"] == os.getpid() and forked[2] == 7


async def test_a_fork_is_a_child_with_its_command_that_can_be_killed() -> None:
    command = [sys.executable, "-m", "tests.support.fake_openai", "--port", "0"]
    child = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
    assert child.stdout is not None and await child.stdout.readline()
    (found,) = [one for one in psutil.Process().children() if one.pid == child.pid]
    assert found.cmdline()[: len(command)] == command
    child.kill()
    assert await child.wait() == -9


def test_what_is_read_when_an_interpreter_starts_needs_a_new_one() -> None:
    command, environ = [sys.executable, "-m", "exo_mesh.runner"], dict(os.environ)
    assert warm._can_be_warm(command, environ)
    assert not warm._can_be_warm(command, {**environ, "PYTHONUTF8": "0"})
    assert not warm._can_be_warm([*command, "two words"], environ)
    assert not warm._can_be_warm([sys.executable, "-c", "pass"], environ)
