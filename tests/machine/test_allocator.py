"""One arena of malloc for all threads."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

PROGRAM = """
import ctypes, sys, threading
from exo_mesh.machine.allocator import use_one_arena
if sys.argv[1] == "one":
    assert use_one_arena()
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
barrier = threading.Barrier(4)

def allocate():
    kept = [libc.malloc(50_000) for _ in range(20)]
    barrier.wait()

threads = [threading.Thread(target=allocate) for _ in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
sys.stdout.flush()
libc.malloc_stats()
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="arenas are glibc's")
@pytest.mark.parametrize("arenas", ["one", "usual"])
def test_threads_of_a_node_share_an_arena(arenas: str) -> None:
    argv = [sys.executable, "-c", PROGRAM, arenas]
    done = subprocess.run(argv, capture_output=True, text=True, check=True, timeout=60)
    assert (done.stderr.count("Arena ") == 1) is (arenas == "one"), done.stderr
