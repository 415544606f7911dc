"""The memory that a process has for its data, without the code of programs and libraries that it has used so far."""

from __future__ import annotations

from pathlib import Path

import psutil


def own_bytes(process: psutil.Process) -> int:
    """The bytes that a process has written and nobody else holds: what grows if it forgets to free something.

    The resident memory also counts pages of libraries. A node gets 3 MB of them with its first requests, and on a busy
    machine, where the system takes such pages away and gives them back, also later.
    """
    try:
        lines = Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines()[1:]
    except FileNotFoundError:  # not Linux
        return int(process.memory_full_info().uss)
    sizes = {name: int(size.split()[0]) * 1024 for name, _, size in (line.partition(":") for line in lines)}
    return sizes["Anonymous"] + sizes["Swap"]
