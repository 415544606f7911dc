"""Malformed messages and hostile content against real nodes: `python -m tools.fuzz [--count N] [--seed S] TARGET…`.

`all` means every target, `content` the targets of hostile content, `hostile-peer` a node with twelve hostile models.
Each target starts its own nodes and prints one line. With --seconds a target begins again with new cases until the time
is over. The exit code is 1 if a node took harm. docs/how-it-works/attacks.md describes the targets.
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
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType

from exo_mesh.base.telemetry.logs import quiet_libraries
from tools.fuzz import hostile_peer
from tools.fuzz.rig import MIB, Prober, Reading, Rig, Watch, beside_hog, running, verdict

TARGETS = ("generate", "frames", "member", "tls", "mdns", "hello", "http", "bodies", "files")
CONTENT = ("tokenizers", "values", "large", "control", "headers", "templates", "pieces")
"""Targets of hostile content. They have numbered cases, and bounds on memory that hold on any machine."""

HOSTILE_PEER = "hostile-peer"
GROUPS = {"all": (*TARGETS, *CONTENT, HOSTILE_PEER), "content": CONTENT, HOSTILE_PEER: (HOSTILE_PEER,)}

MAX_CHILD_BYTES = 1024 * MIB
CONTENT_PAUSE_S = 0.1
SETTLE_S = 8.0
"""Pause for what ends by deadlines after the last message."""


async def attack(
    module: ModuleType, rig: Rig, rng: random.Random, count: int, settle_s: float, pause_s: float
) -> tuple[Counter[str], Prober]:
    """Sends a target's messages while /healthz is probed."""
    prober = Prober(rig, pause_s)
    probing = asyncio.create_task(prober.run())
    try:
        outcomes = await module.attack(rig, rng, count)
        await asyncio.sleep(settle_s)
    finally:
        probing.cancel()
        await asyncio.gather(probing, return_exceptions=True)
    return outcomes, prober


def fuzz(name: str, seed: int, count: int | None, settle_s: float = SETTLE_S, seconds: float = 0.0) -> list[str]:
    """Attacks one target and prints its line; returns the problems. seconds: begin again until this time is over, with
    other messages."""
    module = importlib.import_module(f"tools.fuzz.targets.{name}")
    count = count or module.COUNT
    end, first, found = time.monotonic() + seconds, 0, list[str]()
    while not first or time.monotonic() < end:
        found += _round(name, module, seed, first, count, settle_s)
        first += count
    return found


def _round(name: str, module: ModuleType, seed: int, first: int, count: int, settle_s: float) -> list[str]:
    rng = random.Random(f"{seed}/{first}" if first else seed)
    is_content = name in CONTENT
    with tempfile.TemporaryDirectory(prefix="exo-mesh-fuzz-") as path, ExitStack() as stack:
        directory = Path(path)
        environ: dict[str, str] = {}
        if is_content:
            environ = stack.enter_context(module.prepared(directory, seed, range(first, first + count)))
        nodes = running(directory, module.NUM_NODES, _flags(module, directory), closed=module.CLOSED, environ=environ)
        rig = stack.enter_context(nodes)
        rig.seed, rig.first = seed, first
        hog_s = asyncio.run(beside_hog(rig)) if is_content else 0.0
        before, began = Reading.of(rig), time.monotonic()
        with Watch(rig) as watch:
            pause_s = CONTENT_PAUSE_S if is_content else 1.0
            outcomes, prober = asyncio.run(attack(module, rig, rng, count, settle_s, pause_s))
        took_s = time.monotonic() - began
        after = Reading.of(rig)
        found = verdict(rig, before, after, prober, only_nodes=is_content)
        found += _bounds(module, watch) if is_content else []
        for line in [*rig.notes, *found]:
            print(f"  {line}")
    cases = f"seed {seed}, {f'cases from {first}, ' if is_content else ''}"
    print(f"{name}: {cases}{_line(outcomes, took_s, before, after, prober, watch, hog_s)}", flush=True)
    return found


def _flags(module: ModuleType, directory: Path) -> list[str]:
    return [flag.replace("DIRECTORY", str(directory)) for flag in module.FLAGS]


def _bounds(module: ModuleType, watch: Watch) -> list[str]:
    """Lists the bounds on memory that a target's nodes have broken."""
    found = []
    if watch.node_share > module.MAX_NODE_SHARE:
        found.append(f"a node took {watch.node_share:.2f} times its memory, at most {module.MAX_NODE_SHARE} are right")
    if watch.child_bytes > MAX_CHILD_BYTES:
        most = MAX_CHILD_BYTES / MIB
        found.append(f"a child of a node took {watch.child_bytes / MIB:.0f} MiB, at most {most:.0f} are right")
    return found


def _line(
    outcomes: Counter[str], took_s: float, before: Reading, after: Reading, prober: Prober, watch: Watch, hog_s: float
) -> str:
    ended = ", ".join(f"{code} {number}" for code, number in outcomes.most_common())
    beside = f", p99 {prober.p99_s / hog_s:.1f} times that beside a busy process" if hog_s else ""
    return (
        f"{sum(outcomes.values())} messages in {took_s:.0f} s: {ended}; "
        f"MiB {before.rss / MIB:.0f} -> {after.rss / MIB:.0f} (highest {before.peak / MIB:.0f} -> "
        f"{after.peak / MIB:.0f}; a node {watch.node_share:.2f} times its start, "
        f"a child {watch.child_bytes / MIB:.0f}); {watch.cpu_s:.1f} s of CPU of the nodes; "
        f"files {before.num_files} -> {after.num_files}; "
        f"{after.num_lines - before.num_lines} lines of log; "
        f"{len(set(before.pids) - set(after.pids))} processes ended; "
        f"{prober.num_asked} probes, {prober.num_failed} failed, slowest {prober.worst_s:.2f} s{beside}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.fuzz", description=__doc__)
    parser.add_argument(
        "targets",
        nargs="+",
        choices=[*TARGETS, *CONTENT, *GROUPS],
        metavar="TARGET",
        help=", ".join((*TARGETS, *CONTENT, *GROUPS)),
    )
    parser.add_argument("--count", type=int, help="messages to each target; each has its own default")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--settle-s", type=float, default=SETTLE_S, help="pause before the figures after an attack")
    parser.add_argument("--seconds", type=float, default=0.0, help="for each target; default: one round of messages")
    args = parser.parse_args()
    quiet_libraries()
    found: list[str] = []
    for name in dict.fromkeys(one for target in args.targets for one in GROUPS.get(target, (target,))):
        if name == HOSTILE_PEER:
            found += hostile_peer.run(args.settle_s)
        else:
            found += fuzz(name, args.seed, args.count, args.settle_s, args.seconds)
    return int(len(found) > 0)


if __name__ == "__main__":
    sys.exit(main())
