"""`python -m tools.tensor_groups [--write] [ARCHITECTURE...]`: measures a table on this machine.

Two ranks on loopback over MLX's ring collectives run every architecture with a shard(). If a rank crashes or hangs, two
new ranks continue after that architecture.
"""

from __future__ import annotations

import argparse
import json
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from typing import IO, Any

from exo_mesh_mlx.provider import groupable

from exo_mesh.cli.bench.local_ring import free_endpoints
from tools.tensor_groups.table import TOLERANCE, write_table

DEADLINE_S = 300.0
"""Time limit for one architecture, and for the start before the first."""


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="tools.tensor_groups", description=__doc__.split("\n")[0])
    parser.add_argument("--write", action="store_true", help="write the table into docs/how-it-works/tensor-groups.md")
    parser.add_argument("--size", type=int, default=2, help="ranks")
    parser.add_argument("architecture", nargs="*")
    args = parser.parse_args(argv)
    answers = list(check_all(args.architecture or groupable(), args.size))
    if args.write:
        write_table(answers, args.size)
    wrong = [answer for answer in answers if "failed" in answer or answer.get("difference", 0.0) > TOLERANCE]
    print(f"{sum('difference' in answer for answer in answers)} computed, {len(wrong)} wrong")
    return 1 if wrong else 0


def check_all(names: Sequence[str], size: int) -> Iterator[dict[str, Any]]:
    """Returns an answer for each architecture, in order; see rank.py."""
    left = list(names)
    while left:
        for answer in _run(left, size):
            print(json.dumps(answer), flush=True)
            yield answer
            left.remove(answer["architecture"])
        if left:
            lost = {"architecture": left.pop(0), "failed": "a rank crashed or hung"}
            print(json.dumps(lost), flush=True)
            yield lost


def _run(names: Sequence[str], size: int) -> Iterator[dict[str, Any]]:
    """Returns the answers of one set of processes, until it ends or is silent for too long."""
    endpoints = json.dumps(free_endpoints(size))
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            subprocess.Popen(
                [sys.executable, "-m", "tools.tensor_groups.rank", str(rank), endpoints, folder, *names],
                stdout=subprocess.PIPE,
            )
            for rank in range(size)
        ]
        try:
            lines: queue.Queue[bytes] = queue.Queue()
            output = processes[0].stdout
            assert output is not None, "made with a pipe"
            threading.Thread(target=_read, args=(output, lines), daemon=True).start()
            while line := lines.get(timeout=DEADLINE_S):
                yield json.loads(line)
        except queue.Empty:
            return
        finally:
            for process in processes:
                process.kill()
                process.wait()


def _read(output: IO[bytes], lines: queue.Queue[bytes]) -> None:
    for line in output:
        if line.startswith(b"{"):
            lines.put(line)
    lines.put(b"")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
