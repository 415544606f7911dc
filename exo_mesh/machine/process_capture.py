"""Captures what the system reports about a process: threads, memory by mapping, and on macOS Apple's tools.

Names and numbers only. Blocking, except `run_tools`.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

MAX_MAPS = 40
MAX_THREADS = 256
MAX_LINES = 1000
"""Most lines of one tool's output."""

MAX_OUTPUT_BYTES = 256 * 1024
TOOL_S = 8.0
"""Time limit. `sample` runs for 2 s and then reads symbols; the others take 1 to 5 s on a large process."""

TOOLS: tuple[tuple[str, ...], ...] = (
    ("sample", "{pid}", "2"),
    ("vmmap", "-summary", "{pid}"),
    ("footprint", "-p", "{pid}"),
)
"""Apple's tools, with a placeholder for the process id."""


def threads_of(pid: int) -> list[dict[str, Any]]:
    """Lists each thread: its id, its CPU time, and on Linux its name, its state and the kernel function it waits in."""
    with contextlib.suppress(psutil.Error):
        return [
            _thread(pid, one.id, one.user_time + one.system_time) for one in psutil.Process(pid).threads()[:MAX_THREADS]
        ]
    return []


def _thread(pid: int, thread_id: int, cpu_s: float) -> dict[str, Any]:
    task = Path(f"/proc/{pid}/task/{thread_id}")
    shown: dict[str, Any] = {"id": thread_id, "cpu_s": round(cpu_s, 2)}
    with contextlib.suppress(OSError, IndexError):
        shown["name"] = (task / "comm").read_text(errors="replace").strip()
        shown["state"] = (task / "stat").read_text(errors="replace").rpartition(") ")[2][:1]
        shown["waits_in"] = (task / "wchan").read_text(errors="replace").strip("0\n")
    return shown


def memory_of(pid: int) -> dict[str, Any]:
    """Returns the bytes of the whole process, and its largest mappings by resident bytes; the other mappings as one."""
    shown: dict[str, Any] = {"total": {}, "maps": []}
    with contextlib.suppress(psutil.Error):
        shown["total"] = {
            f"{name}_bytes": value for name, value in psutil.Process(pid).memory_full_info()._asdict().items()
        }
    with contextlib.suppress(psutil.Error, AttributeError):  # macOS has no such list; vmmap gives it
        shown["maps"] = _largest([_mapping(one) for one in psutil.Process(pid).memory_maps()])
    return shown


def _mapping(one: Any) -> dict[str, Any]:
    name = Path(one.path).name or one.path
    return {"name": name, "resident_bytes": one.rss, "own_bytes": one.pss, "swap_bytes": one.swap}


def _largest(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    rows.sort(key=lambda row: int(row["resident_bytes"]), reverse=True)
    rest = rows[MAX_MAPS:]
    if not rest:
        return rows
    sums = {name: sum(row[name] for row in rest) for name in ("resident_bytes", "own_bytes", "swap_bytes")}
    return [*rows[:MAX_MAPS], {"name": f"{len(rest)} others", **sums}]


async def run_tools(
    pid: int, tools: Sequence[Sequence[str]] | None = None, limit_s: float = TOOL_S
) -> list[dict[str, Any]]:
    """Runs each tool on a process; by default Apple's tools on macOS and none elsewhere. Never raises."""
    if tools is None:
        tools = TOOLS if sys.platform == "darwin" else ()
    return list(await asyncio.gather(*(_run([part.format(pid=pid) for part in tool], limit_s) for tool in tools)))


async def _run(command: Sequence[str], limit_s: float) -> dict[str, Any]:
    began = time.monotonic()
    shown: dict[str, Any] = {"command": " ".join(command), "ok": False, "lines": [], "error": ""}
    try:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
    except OSError as exc:
        return {**shown, "error": f"{command[0]} cannot be started: {exc.strerror or exc}"}
    assert process.stdout is not None, "created with a pipe"
    output = bytearray()
    try:
        async with asyncio.timeout(limit_s):
            while chunk := await process.stdout.read(65536):
                output += chunk[: MAX_OUTPUT_BYTES - len(output)]
            shown["ok"] = await process.wait() == 0
        shown["error"] = "" if shown["ok"] else f"{command[0]} ended with exit code {process.returncode}"
    except TimeoutError:
        shown["error"] = f"{command[0]} was ended after {limit_s:g} s"
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
    shown["lines"] = output.decode(errors="replace").splitlines()[:MAX_LINES]
    return {**shown, "took_s": round(time.monotonic() - began, 2)}
