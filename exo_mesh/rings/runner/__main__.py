"""`python -m exo_mesh.rings.runner --control-fd N`: started by a node, never by hand."""

from __future__ import annotations

import argparse
import faulthandler
import logging
import os
import signal
import sys

from exo_mesh.base.gc_pauses import gc_pauses
from exo_mesh.base.telemetry.logs import quiet_libraries

_PR_SET_PDEATHSIG = 1


def main() -> int:
    """Parse the argument, then run the stage that the node asks for over the pipe."""
    parser = argparse.ArgumentParser(prog="exo_mesh.rings.runner", description=__doc__)
    parser.add_argument("--control-fd", type=int, required=True, help="inherited socket to the node")
    args = parser.parse_args()
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    quiet_libraries()
    _end_with_parent()
    # the node sends SIGUSR1 to get the stacks of all threads into its log
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the whole terminal; the node decides when to stop

    with gc_pauses():
        from exo_mesh.rings.runner.process import run_process

    return run_process(args.control_fd)


def _end_with_parent() -> None:
    """Ask the kernel to kill this process when its node dies, where the system can do that (Linux).

    The closed pipe also shows that the node is gone, but the thread that reads the pipe has to wait while an engine
    holds the interpreter's lock.
    """
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    os._exit(code)  # threads of foreign libraries must not delay the exit
