"""`python -m tools.llamacpp_architectures [NAME...]`: try architectures, each in a process of its own."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

from tools.llamacpp_architectures.canaries import tiny, write_canaries
from tools.llamacpp_architectures.check import Outcome, check
from tools.llamacpp_architectures.configs import ARCHITECTURES
from tools.llamacpp_architectures.table import write

DEADLINE_S = 120


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--experts", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--tiny", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--canaries", action="store_true", help="write the tiny models that the engine ships")
    parser.add_argument("--few", action="store_true", help="try three splits of each architecture")
    parser.add_argument("--write", action="store_true", help="write docs/reference/architectures-llamacpp.md")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the outcomes as JSON lines")
    parser.add_argument("--read", type=Path, metavar="FILE", help="take the outcomes from such a file")
    args = parser.parse_args(argv)
    if args.child:
        print(check(args.names[0], experts=args.experts, few=args.few).json())
        return 0
    if args.tiny:
        print(tiny(args.names[0], experts=args.experts))
        return 0
    if args.canaries:
        absent = write_canaries()
        print(f"no tiny model of: {', '.join(absent)}" if absent else "every architecture has a tiny model")
        return bool(absent)
    outcomes = []
    if args.read:
        outcomes = [Outcome(**json.loads(line)) for line in args.read.read_text().splitlines()]
    for name in args.names or ([] if args.read else ARCHITECTURES):
        outcome = try_apart(name, few=args.few)
        outcomes.append(outcome)
        print(f"{name:18s} {outcome.state:8s} {outcome.reason} {' '.join(outcome.different)[:150]}", flush=True)
    if args.json:
        args.json.write_text("".join(f"{outcome.json()}\n" for outcome in outcomes))
    if args.write:
        write(outcomes)
    return 0


def try_apart(arch: str, *, few: bool = False) -> Outcome:
    """The outcome from a child process: first without experts, and with experts if the library wants them."""
    first = _child(arch, few, [])
    return first if first.state in ("exact", "whole", "failed") else _better(first, _child(arch, few, ["--experts"]))


def _better(first: Outcome, second: Outcome) -> Outcome:
    return second if second.state != "absent" else first


def _child(arch: str, few: bool, flags: list[str]) -> Outcome:
    command = [sys.executable, "-m", "tools.llamacpp_architectures", "--child", *flags, *(["--few"] * few), arch]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    except subprocess.TimeoutExpired:
        return Outcome(arch, "absent", f"not done after {DEADLINE_S} s")
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        asserted = [line for line in done.stderr.splitlines() if "GGML_ASSERT" in line]
        return Outcome(arch, "absent", (asserted or [last])[-1].rpartition("/")[2][-200:])
    return Outcome(**json.loads(lines[-1]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
