"""Children of the tests that are forked from a warm interpreter are what a new interpreter would be."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

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
    "utf8": sys.flags.utf8_mode, "umask": os.umask(0),
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


def ask(folder: Path, variables: dict[str, str], **options: Any) -> tuple[dict[str, object], bytes, int]:
    """What the module finds when it is started with a file, a session and an environment of its own."""
    reader, writer = os.pipe()
    try:
        child = subprocess.run(
            [sys.executable, "-m", "shows", str(writer), "word"],
            input=b"hello",
            capture_output=True,
            pass_fds=[writer],
            env={"HOME": "/nowhere", **variables},
            timeout=60,
            check=False,
            **{"start_new_session": True, "cwd": folder, **options},
        )
        found = json.loads(child.stdout)
        assert found.pop("passed") == os.fstat(writer).st_ino and found.pop("group") != os.getpgid(0)
        return found, child.stderr, child.returncode
    finally:
        os.close(reader)
        os.close(writer)


def inherited() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith(("PYTHON", "LC_", "LANG", "LD_"))}


def forked_modules() -> list[str]:
    return [module for module, _ in warm._warm]


def test_a_fork_finds_what_a_new_interpreter_finds(shown: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for variables in ({}, {"PYTHONUTF8": "1"}, {"LANG": "C", "LC_ALL": "C"}):
        forked = ask(shown, {"GIVEN": "1", **inherited(), **variables})
        assert "shows" in forked_modules(), "it was forked"
        with monkeypatch.context() as patch:
            patch.delitem(warm.WARM, "shows")
            assert forked == ask(shown, {"GIVEN": "1", **inherited(), **variables})
        assert forked[0]["parent"] == os.getpid() and forked[2] == 7


@pytest.mark.parametrize(
    "options", [{"umask": 0o27}, {"process_group": 0, "start_new_session": False}, {"preexec_fn": lambda: os.umask(0)}]
)
def test_what_a_fork_cannot_be_given_needs_a_new_interpreter(
    shown: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    monkeypatch.setattr(warm, "_warm", {})
    found = ask(shown, inherited(), **options)
    assert found[0]["umask"] == options.get("umask", found[0]["umask"]) and not warm._warm


def test_a_missing_folder_is_an_error_of_the_start(shown: Path) -> None:
    with pytest.raises(FileNotFoundError):
        ask(shown, inherited(), cwd=shown / "missing")


def test_a_file_keeps_its_number_also_if_it_is_high(shown: Path) -> None:
    reader, writer = os.pipe()
    high = fcntl.fcntl(writer, fcntl.F_DUPFD, warm.FIRST_FREE_FD + 7)
    try:
        command = [sys.executable, "-m", "shows", str(high)]
        child = subprocess.run(command, pass_fds=[high], capture_output=True, cwd=shown, timeout=60, check=False)
        assert json.loads(child.stdout)["passed"] == os.fstat(high).st_ino
    finally:
        for file in (reader, writer, high):
            os.close(file)


def test_children_of_several_threads_are_those_that_each_started(shown: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        asked = [pool.submit(ask, shown, {"GIVEN": str(number), **inherited()}) for number in range(16)]
    assert [one.result()[0]["variable"] for one in asked] == [str(number) for number in range(16)]


def test_a_warm_process_is_for_one_environment_and_there_are_few(shown: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: dict[Any, warm.WarmProcess] = {}
    monkeypatch.setattr(warm, "_warm", kept)
    monkeypatch.setattr(warm, "MOST_WARM", 1)
    try:
        for threads in "112":
            ask(shown, {**inherited(), "OMP_NUM_THREADS": threads})
        assert [dict(items)["OMP_NUM_THREADS"] for _, items in kept] == ["2"]
    finally:
        warm.end()


def test_a_child_starts_cold_if_no_warm_process_does(shown: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warm, "_warm", {})
    monkeypatch.setitem(warm.WARM, "shows", ("no_such_module",))
    assert ask(shown, inherited())[2] == 7 and not warm._warm


async def test_a_fork_is_a_child_with_its_command_that_can_be_killed() -> None:
    command = [sys.executable, "-m", "tests.support.fake_openai", "--port", "0"]
    child = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
    assert child.stdout is not None and await child.stdout.readline()
    (found,) = [one for one in psutil.Process().children() if one.pid == child.pid]
    assert found.cmdline()[: len(command)] == command
    child.kill()
    assert await child.wait() == -9


def test_a_command_that_a_fork_cannot_show_needs_a_new_interpreter() -> None:
    command = [sys.executable, "-m", "exo_mesh.rings.runner"]
    assert warm._can_be_warm(command)
    assert not warm._can_be_warm([*command, "two words"])
    assert not warm._can_be_warm([sys.executable, "-c", "pass"])
