"""Malformed messages against real nodes: `python -m tools.fuzz [--count N] [--seed S] TARGET…`, or `all`.

Each target starts its own nodes and prints one line. The exit code is 1 if a node took harm. docs/tasks/security.md has
the figures.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from types import ModuleType

from exo_mesh.telemetry.logs import quiet_libraries
from tools.fuzz.rig import MIB, Prober, Reading, Rig, running, verdict

TARGETS = ("generate", "frames", "member", "tls", "mdns", "hello", "http", "bodies", "files")
SETTLE_S = 8.0
"""Pause for what ends by deadlines after the last message."""


async def attack(module: ModuleType, rig: Rig, seed: int, count: int, settle_s: float) -> tuple[Counter[str], Prober]:
    """Sends a target's messages while /healthz is probed."""
    prober = Prober(rig)
    probing = asyncio.create_task(prober.run())
    try:
        outcomes = await module.attack(rig, random.Random(seed), count)
        await asyncio.sleep(settle_s)
    finally:
        probing.cancel()
        await asyncio.gather(probing, return_exceptions=True)
    return outcomes, prober


def fuzz(name: str, seed: int, count: int | None, settle_s: float = SETTLE_S) -> list[str]:
    """Attacks one target and prints its line; returns the problems."""
    module = importlib.import_module(f"tools.fuzz.targets.{name}")
    count = count or module.COUNT
    with (
        tempfile.TemporaryDirectory(prefix="exo-mesh-fuzz-") as directory,
        running(Path(directory), module.NUM_NODES, module.FLAGS, closed=module.CLOSED) as rig,
    ):
        before, began = Reading.of(rig), time.monotonic()
        outcomes, prober = asyncio.run(attack(module, rig, seed, count, settle_s))
        took_s = time.monotonic() - began
        after = Reading.of(rig)
        found = verdict(rig, before, after, prober)
        for line in [*rig.notes, *found]:
            print(f"  {line}")
    ended = ", ".join(f"{code} {number}" for code, number in outcomes.most_common())
    print(
        f"{name}: seed {seed}, {sum(outcomes.values())} messages in {took_s:.0f} s: {ended}; "
        f"MiB {before.rss / MIB:.0f} -> {after.rss / MIB:.0f} (highest {before.peak / MIB:.0f} -> "
        f"{after.peak / MIB:.0f}); files {before.num_files} -> {after.num_files}; "
        f"{after.num_lines - before.num_lines} lines of log; "
        f"{len(set(before.pids) - set(after.pids))} processes ended; "
        f"{prober.num_asked} probes, {prober.num_failed} failed, slowest {prober.worst_s:.2f} s",
        flush=True,
    )
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.fuzz", description=__doc__)
    parser.add_argument("targets", nargs="+", choices=[*TARGETS, "all"], metavar="TARGET", help=", ".join(TARGETS))
    parser.add_argument("--count", type=int, help="messages to each target; each has its own default")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--settle-s", type=float, default=SETTLE_S, help="pause before the figures after an attack")
    args = parser.parse_args()
    quiet_libraries()
    names = TARGETS if "all" in args.targets else args.targets
    return int(sum(len(fuzz(name, args.seed, args.count)) for name in names) > 0)


if __name__ == "__main__":
    sys.exit(main())
