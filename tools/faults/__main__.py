"""Injects faults into real nodes and checks the requests. docs/how-it-works/faults.md explains the figures.

python -m tools.faults drawn --seed 212 --runs 50       one fault at one moment of one answer, so many times
python -m tools.faults soak --minutes 30                random faults under four clients
python -m tools.faults soak --cores 0.3                 the same on machines so slow
python -m tools.faults classes                          every class of faults: all tests of tests/faults
python -m tools.faults table build/faults.jsonl         write what was recorded into docs/how-it-works/faults.md
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tools.faults import mesh, record
from tools.faults.drawn import Case, cases, play
from tools.faults.mesh import Meshes, why_not
from tools.faults.quota import CpuQuota
from tools.faults.soak import soak
from tools.faults.table import PAGE, write_tables
from tools.faults.verdicts import misses, summary

RECORD = Path("build/faults.jsonl")


def play_drawn(seed: int, first: int, runs: int) -> int:
    """Prints every run with the bars that it missed, and the table; the exit code is 1 if any run missed a bar."""
    drawn = list(itertools.islice(cases(seed), first - 1, first - 1 + runs))
    print(f"seed {seed}, runs {first} to {first + runs - 1}", flush=True)
    outcomes: list[dict[str, Any]] = []
    num_bad = 0
    with tempfile.TemporaryDirectory(prefix="exo-mesh-faults-", ignore_cleanup_errors=True) as root:
        meshes = Meshes(Path(root))
        for case in sorted(drawn, key=lambda case: case.peers):
            bad = [f"FAILED: {exc}"] if (exc := _played(meshes, case, seed, outcomes)) else misses(outcomes[-1])
            num_bad += bool(bad)
            print(case, *(_told(outcomes[-1]) if not exc else ()), *bad, sep="\n    ", flush=True)
        meshes.close()
    print(*summary(outcomes), f"{len(drawn) - num_bad} of {len(drawn)} runs met every bar", sep="\n")
    return 1 if num_bad else 0


def _played(meshes: Meshes, case: Case, seed: int, outcomes: list[dict[str, Any]]) -> AssertionError | None:
    """Plays one run and records its outcome; returns the error if an invariant did not hold."""
    try:
        outcome = play(meshes.of(case.peers), case).describe()
    except AssertionError as exc:
        meshes.give_up()
        return exc
    record.keep({"name": "drawn", "seed": seed, **outcome})
    outcomes.append(outcome)
    return None


def _told(outcome: dict[str, Any]) -> list[str]:
    shown = ("detected_s", "gap_s", "warm_load_s", "bytes_loaded", "resumed", "redialled", "freed_s")
    return [" ".join(f"{name}={outcome[name]}" for name in shown)]


def play_soak(minutes: float, seed: int) -> int:
    print(f"seed {seed}, {minutes:g} minutes", flush=True)
    with tempfile.TemporaryDirectory(prefix="exo-mesh-soak-", ignore_cleanup_errors=True) as root:
        result = soak(Path(root), 60 * minutes, seed)
    record.keep({"name": "soak", **result.describe()})
    print(json.dumps(result.describe(), indent=2))
    return 0


def run_classes() -> int:
    """Runs all tests of tests/faults, the slow ones too; their measurements are recorded."""
    command = [sys.executable, "-m", "pytest", "tests/faults", "-m", "slow or not slow", "-s", "--timeout", "900"]
    return subprocess.run(command, check=False, env=os.environ).returncode


_CORES = "CPU quota of each node with its runners, in cores; needs root (0: none)"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.faults", description=__doc__.splitlines()[0])
    parser.add_argument("--record", type=Path, default=RECORD, metavar="FILE", help=f"add what is measured ({RECORD})")
    verbs = parser.add_subparsers(dest="verb", required=True)
    drawn = verbs.add_parser("drawn")
    drawn.add_argument("--seed", type=int, default=212)
    drawn.add_argument("--first", type=int, default=1, help="number of the first run (1)")
    drawn.add_argument("--runs", type=int, default=50)
    drawn.add_argument("--cores", type=float, default=0.0, help=_CORES)
    soaking = verbs.add_parser("soak")
    soaking.add_argument("--cores", type=float, default=0.0, help=_CORES)
    soaking.add_argument("--minutes", type=float, default=30.0)
    soaking.add_argument("--seed", type=int, default=1)
    verbs.add_parser("classes")
    table = verbs.add_parser("table")
    table.add_argument("records", type=Path, nargs="+")
    table.add_argument("--page", type=Path, default=PAGE, help="the page with the tables (docs/how-it-works/faults.md)")
    args = parser.parse_args()
    if args.verb == "table":
        write_tables([row for path in args.records for row in record.read(path)], args.page)
        return 0
    if reason := why_not():
        print(f"every node needs an address of its own: {reason}", file=sys.stderr)
        return 2
    args.record.parent.mkdir(parents=True, exist_ok=True)
    os.environ[record.VARIABLE] = str(args.record.resolve())
    if args.verb == "classes":
        return run_classes()
    try:
        mesh.quota = CpuQuota(args.cores)
    except OSError as exc:
        print(f"--cores needs control groups that this user may write: {exc}", file=sys.stderr)
        return 2
    try:
        if args.verb == "drawn":
            return play_drawn(args.seed, args.first, args.runs)
        return play_soak(args.minutes, args.seed)
    finally:
        mesh.quota.close()


if __name__ == "__main__":
    sys.exit(main())
