"""The machine stays awake while there is work, by real programs that write down how they were called."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import textwrap
from pathlib import Path

import psutil
import pytest

from exo_mesh.machine.awake import LINGER_S, LINUX, MACOS, RETRY_S, SleepLock, commands_here

HOLDS = """#!/bin/sh
echo "$(basename "$0") $*" >> "$CALLS"
while [ "$#" -gt 1 ]; do shift; done
"$@"; echo ended >> "$CALLS"
"""
REFUSES_SLEEP = """#!/bin/sh
echo "$(basename "$0") $*" >> "$CALLS"
case "$*" in *sleep:idle*) echo 'Failed to inhibit: Access denied' >&2; exit 1;; esac
exec cat
"""
SLOWLY_REFUSES = """#!/bin/sh
echo "$*" >> "$CALLS"; sleep 0.2; exit 1
"""
REFUSES = "#!/bin/sh\necho called >> \"$CALLS\"; echo 'Failed to connect to bus' >&2; exit 1\n"


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the programs that a test places first in PATH write their calls."""
    found = tmp_path / "calls"
    found.touch()
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    monkeypatch.setenv("CALLS", str(found))
    monkeypatch.setattr("exo_mesh.machine.awake.STARTED_S", 0.1)
    return found


def place(calls: Path, name: str, text: str) -> None:
    program = calls.parent / "bin" / name
    program.write_text(text)
    program.chmod(0o755)


class Work:
    """What a node would say, and the time."""

    def __init__(self) -> None:
        self.why = ""
        self.now = 100.0

    def lock(self, commands: tuple[tuple[str, ...], ...]) -> SleepLock:
        return SleepLock(lambda: self.why, commands, lambda: self.now)


def called(calls: Path) -> list[str]:
    return calls.read_text().splitlines()


async def ended(calls: Path) -> None:
    while "ended" not in called(calls):
        await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    ("platform", "program", "said"),
    [
        ("linux", "systemd-inhibit", "--who=exo-mesh --why=requests run --mode=block --what=sleep:idle cat"),
        ("darwin", "caffeinate", "-i -s cat"),
    ],
)
async def test_it_holds_a_lock_while_there_is_work_and_a_while_after(
    calls: Path, platform: str, program: str, said: str
) -> None:
    place(calls, program, HOLDS)
    commands = commands_here(platform, logind=calls.parent)
    work = Work()
    lock = work.lock(commands)
    await lock.look()
    assert called(calls) == []
    work.why = "1 requests that entered here"
    await lock.look()
    await lock.look()
    assert lock.is_held
    assert called(calls) == [f"{program} {said}"], "asked for once"
    work.why = ""
    await lock.look()
    work.now += LINGER_S - 1
    await lock.look()
    assert lock.is_held
    work.now += 1
    await lock.look()
    assert not lock.is_held
    async with asyncio.timeout(10):
        await ended(calls)


async def test_a_service_that_may_not_forbid_sleep_forbids_idle_sleep(calls: Path) -> None:
    place(calls, "systemd-inhibit", REFUSES_SLEEP)
    work = Work()
    work.why = "work"
    lock = work.lock(LINUX)
    await lock.look()
    assert lock.is_held
    assert [line.split("--what=")[1] for line in called(calls)] == ["sleep:idle cat", "idle cat"]
    task = asyncio.create_task(lock.keep())
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert not lock.is_held


async def test_a_system_that_refuses_is_not_asked_all_the_time(calls: Path) -> None:
    place(calls, "caffeinate", REFUSES)
    work = Work()
    work.why = "work"
    lock = work.lock(MACOS)
    for _ in range(3):
        await lock.look()
    assert (lock.is_held, called(calls)) == (False, ["called"])
    work.now += RETRY_S
    await lock.look()
    assert called(calls) == ["called"] * 2


async def test_a_system_that_refuses_late_is_asked_for_less_and_then_left_alone(calls: Path) -> None:
    place(calls, "systemd-inhibit", SLOWLY_REFUSES)
    work = Work()
    work.why = "work"
    lock = work.lock(LINUX)
    for asked in (1, 2, 2, 2):
        await lock.look()
        assert len(called(calls)) == asked
        while lock.is_held:
            await asyncio.sleep(0.01)


async def test_machines_without_such_a_program_are_left_alone(calls: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(calls.parent / "bin"))
    assert commands_here("linux", logind=calls.parent) == ()
    place(calls, "systemd-inhibit", HOLDS)
    assert commands_here("linux", logind=calls.parent) == LINUX
    assert commands_here("linux", logind=calls.parent / "no logind") == ()
    assert commands_here("win32", logind=calls.parent) == ()
    await Work().lock(()).keep()


@pytest.mark.extended
def test_the_lock_ends_with_a_process_that_is_killed(calls: Path) -> None:
    place(calls, "caffeinate", HOLDS)
    script = textwrap.dedent("""
        import asyncio
        from exo_mesh.machine.awake import MACOS, SleepLock
        async def main():
            lock = SleepLock(lambda: "work", MACOS)
            await lock.look()
            print(lock._holder.pid, flush=True)
            await asyncio.sleep(600)
        asyncio.run(main())
    """)
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        holder = psutil.Process(int(process.stdout.readline()))
        assert holder.is_running()
        process.kill()
    psutil.wait_procs([holder], timeout=20)
    assert "ended" in called(calls)
