"""Threads of tensor libraries sleep while a stage waits."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys

import pytest

from exo_mesh.engine.process_environment import ALLOCATOR, SHORT_LOOPS, compute_environment
from exo_mesh.rings.hosting.runner_child import RunnerChild, spawn

PRINT = "import json, os; print(json.dumps(dict(os.environ)))"

WAIT = """
import sys, time
if sys.argv[1] == "numpy":
    import numpy
    from exo_mesh_numpy.threads import set_threads
    set_threads("2")
    left, right = numpy.ones((512, 2048), numpy.float32), numpy.ones((2048, 512), numpy.float32)
    multiply = lambda: left @ right
else:
    import torch
    torch.set_num_threads(2)
    left, right = torch.ones((512, 2048)), torch.ones((2048, 512))
    multiply = lambda: left @ right
multiply()
waited_s = 0.0
for _ in range(10):
    multiply()
    begin = time.process_time()
    time.sleep(0.02)
    waited_s += time.process_time() - begin
print(waited_s)
"""


@pytest.mark.parametrize("library", ["numpy", pytest.param("torch", marks=pytest.mark.extended)])
def test_a_process_uses_no_cpu_between_products(library: str) -> None:
    """Ten gaps of 20 ms between frames: threads that waited in a loop would use 200 ms of CPU time and more."""
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    environment = {name: value for name, value in os.environ.items() if name not in SHORT_LOOPS}
    done = subprocess.run(
        [sys.executable, "-c", WAIT, library],
        env=compute_environment(environment),
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert float(done.stdout) < 0.04


async def test_a_runner_starts_with_them() -> None:
    child: RunnerChild = await spawn((sys.executable, "-c", PRINT), {"PATH": os.environ["PATH"]})
    assert child.process.stdout is not None
    found = json.loads(await child.process.stdout.read())
    await child.process.wait()
    child.close()
    assert found.items() >= {**SHORT_LOOPS, **ALLOCATOR}.items()


def test_what_an_operator_decided_stays() -> None:
    found = compute_environment({"OMP_WAIT_POLICY": "ACTIVE", "OPENBLAS_THREAD_TIMEOUT": "26", "HOME": "/x"})
    assert found == {"OMP_WAIT_POLICY": "ACTIVE", "OPENBLAS_THREAD_TIMEOUT": "26", "HOME": "/x", **ALLOCATOR}
