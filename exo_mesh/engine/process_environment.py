"""The environment in which engines compute, in stages and in children that measure engines. Pure.

Threads of OpenBLAS and OpenMP wait for more work in a loop before they sleep, for 100 ms and longer by default. A stage
of a ring waits most of the time, and other stages, the node and other programs need the cores meanwhile. Measured with
two threads and one product every 20 ms: OpenBLAS used 21 ms of CPU time per product instead of 2.4, OpenMP in torch 16
instead of 3.9. The loops here are long enough for the gaps between the products of one forward pass: passes take as
long as with the defaults.

Libraries read these variables when they are loaded, so they are set before a process starts.
"""

from __future__ import annotations

from collections.abc import Mapping

ALLOCATOR = {
    # By default glibc maps and faults in fresh pages for every large message: half of the cost of a 16 MiB hop,
    # measured. Large temporary arrays of NumPy and torch cost the same.
    "MALLOC_MMAP_THRESHOLD_": "1073741824",
    "MALLOC_TRIM_THRESHOLD_": "17179869184",
    "MALLOC_TOP_PAD_": "268435456",
}

SHORT_LOOPS = {
    "OPENBLAS_THREAD_TIMEOUT": "18",  # a power of two, in cycles: about 0.1 ms
    # rounds, each of some ten cycles: about 0.5 ms, as long as a driver takes between two steps. With 10,000 rounds a
    # llama.cpp step of 9 ms took a tenth longer
    "GOMP_SPINCOUNT": "50000",
    "KMP_BLOCKTIME": "1",  # in ms; LLVM's OpenMP, with which torch comes on macOS
}

_POLICIES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
"""Variables by which an operator decides how OpenMP's threads wait."""


def compute_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment with ALLOCATOR, and with SHORT_LOOPS except for libraries whose waiting it already
    decides."""
    decided = any(name in environment for name in _POLICIES)
    ours = {name: value for name, value in SHORT_LOOPS.items() if not (decided and name in _POLICIES)}
    return {**ours, **environment, **ALLOCATOR}
