"""One arena of malloc for all threads, and no large blocks in it."""

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


BLOCKS = """
import ctypes, sys
from exo_mesh.machine.allocator import use_one_arena
if sys.argv[1] == "node":
    assert use_one_arena()
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.free.argtypes = [ctypes.c_void_p]
libc.free(libc.malloc(20_000_000))  # here glibc raises its limit
kept = libc.malloc(15_000_000)
sys.stdout.flush()
libc.malloc_stats()
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the limit is glibc's")
@pytest.mark.parametrize("kind", ["node", "usual"])
def test_a_large_block_stays_out_of_the_arena_also_after_a_larger_one(kind: str) -> None:
    done = subprocess.run([sys.executable, "-c", BLOCKS, kind], capture_output=True, text=True, check=True, timeout=60)
    arena = next(int(line.split("=")[1]) for line in done.stderr.splitlines() if line.startswith("system bytes"))
    assert (arena < 15_000_000) is (kind == "node"), done.stderr


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="arenas are glibc's")
@pytest.mark.parametrize("arenas", ["one", "usual"])
def test_threads_of_a_node_share_an_arena(arenas: str) -> None:
    argv = [sys.executable, "-c", PROGRAM, arenas]
    done = subprocess.run(argv, capture_output=True, text=True, check=True, timeout=60)
    assert (done.stderr.count("Arena ") == 1) is (arenas == "one"), done.stderr
