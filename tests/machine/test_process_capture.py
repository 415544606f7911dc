"""What the system says of a process, and tools that do not behave."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from exo_mesh.machine.process_capture import MAX_LINES, MAX_OUTPUT_BYTES, memory_of, run_tools, threads_of

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@linux_only
def test_threads_and_memory_of_this_process() -> None:
    threads = threads_of(os.getpid())
    assert any(thread["id"] == os.getpid() and thread["state"] for thread in threads)
    memory = memory_of(os.getpid())
    assert memory["total"]["rss_bytes"] > 0 and memory["total"]["uss_bytes"] > 0
    sizes = [one["resident_bytes"] for one in memory["maps"][:-1]]
    assert sizes == sorted(sizes, reverse=True) and memory["maps"][-1]["name"].endswith("others")
    assert not any("/" in one["name"] for one in memory["maps"] if not one["name"].startswith("[")), "no paths"


def test_a_process_that_is_gone_has_nothing_to_say() -> None:
    assert threads_of(2**22 + 1) == [] and memory_of(2**22 + 1) == {"total": {}, "maps": []}


async def test_tools_are_bounded_in_time_and_output(tmp_path: Path) -> None:
    shims = {"vmmap": f"echo summary of $2\nyes | head -c {2 * MAX_OUTPUT_BYTES}", "sample": "exec sleep 60",
             "footprint": "echo no such process >&2\nexit 3"}  # fmt: skip
    for name, script in shims.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    tools = [(str(tmp_path / "vmmap"), "-summary", "{pid}"), (str(tmp_path / "sample"), "{pid}", "2"),
             (str(tmp_path / "footprint"), "-p", "{pid}"), (str(tmp_path / "absent"), "{pid}")]  # fmt: skip
    vmmap, sample, footprint, absent = await run_tools(77, tools, limit_s=0.5)
    assert vmmap["ok"] and vmmap["lines"][0] == "summary of 77" and len(vmmap["lines"]) <= MAX_LINES
    assert not sample["ok"] and "was ended after 0.5 s" in sample["error"]
    assert footprint["lines"] == ["no such process"] and "exit code 3" in footprint["error"]
    assert "cannot be started" in absent["error"]
