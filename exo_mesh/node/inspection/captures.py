"""Captures on request: the stacks of all threads and tasks of this node and its runners, and their memory maps.

Stacks contain files, lines and names of functions, but no values of variables, so no prompt and no token.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from types import CodeType, FrameType
from typing import Any

from exo_mesh.base.tasks import Bound
from exo_mesh.rings.hosting.supervisor import Runner

MAX_PROCESSES = 16
MAX_TASKS = 256
MAX_FRAMES = 64
"""Most frames of a stack; the innermost ones are kept."""


class Captures:
    """Captures this node. runners: of this node, by instance. One capture at a time, since each slows its process."""

    def __init__(self, node_id: str, name: str, runners: Callable[[], Mapping[str, Runner]]) -> None:
        self._node_id = node_id
        self._name = name
        self._runners = runners
        self._bound = Bound(1, "captures run on this node")

    async def here(self, wanted: str = "") -> dict[str, Any] | None:
        """Captures this node and its runners. wanted: only the runner with this pid, instance or label; None if there
        is none. Raises OverloadError while another capture runs."""
        runners = list(self._runners().items())
        if wanted:
            runners = [(name, one) for name, one in runners if wanted in (name, one.label, str(one.pid))]
            if not runners:
                return None
        with self._bound.taken():
            began = time.time()
            work = [] if wanted else [_node()]
            work += [_runner(name, runner) for name, runner in runners[:MAX_PROCESSES]]
            processes = await asyncio.gather(*work)
        return {
            "node_id": self._node_id,
            "name": self._name,
            "at": round(began, 3),
            "took_s": round(time.time() - began, 3),
            "processes": processes,
            "left_out": max(0, len(runners) - MAX_PROCESSES),
        }


async def _node() -> dict[str, Any]:
    tasks = [_task(task) for task in list(asyncio.all_tasks())[:MAX_TASKS]]
    return {"kind": "node", "stacks": _own_stacks(), "tasks": tasks, **await _system_view(os.getpid())}


async def _runner(instance_id: str, runner: Runner) -> dict[str, Any]:
    stacks = await runner.stacks()
    shown = {"kind": "runner", "runner": runner.label, "instance": instance_id, "stacks": stacks, "tasks": []}
    return {**shown, **await _system_view(runner.pid)}


async def _system_view(pid: int) -> dict[str, Any]:
    from exo_mesh.machine.process_capture import memory_of, run_tools, threads_of

    threads, memory, tools = await asyncio.gather(
        asyncio.to_thread(threads_of, pid), asyncio.to_thread(memory_of, pid), run_tools(pid)
    )
    return {"pid": pid, "threads": threads, "memory": memory, "tools": tools}


def _own_stacks() -> list[str]:
    """The stacks of all threads of this process, in the format of faulthandler."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    lines = []
    for ident, frame in sys._current_frames().items():
        lines.append(f"Thread 0x{ident:016x} [{names.get(ident, '')}] (most recent call first):")
        lines += [_line(code, line) for code, line in _frames(frame)]
    return lines


def _frames(frame: FrameType | None) -> Iterator[tuple[CodeType, int]]:
    for _ in range(MAX_FRAMES):
        if frame is None:
            return
        yield frame.f_code, frame.f_lineno
        frame = frame.f_back


def _task(task: asyncio.Task[Any]) -> dict[str, Any]:
    """The name of a task, and its stack with the coroutines that it awaits, the innermost frame last."""
    found: list[str] = []
    inner: Any = task.get_coro()
    while inner is not None and len(found) < MAX_FRAMES:
        frame = _first(inner, "cr_frame", "gi_frame", "ag_frame")
        if frame is not None:
            found.append(_line(frame.f_code, frame.f_lineno))
        inner = _first(inner, "cr_await", "gi_yieldfrom", "ag_await")
    return {"name": task.get_name(), "stack": found}


def _first(value: Any, *names: str) -> Any:
    """The first of these attributes that exists and is not None."""
    return next((found for name in names if (found := getattr(value, name, None)) is not None), None)


def _line(code: CodeType, line: int) -> str:
    return f'  File "{code.co_filename}", line {line} in {code.co_name}'
