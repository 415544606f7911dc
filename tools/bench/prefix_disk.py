"""Measures the disk tier of the prefix cache: `python -m tools.bench prefix --disk DIR`.

A prompt is computed, and then asked of a new ring that reads it from its disks. Then one stream decodes while stages
write prompts that were computed before it, in turns with a stream on a ring without disks.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING

from exo_mesh.cli.bench.local_ring import LocalRunner
from exo_mesh.rings.prefix_disk.folder import stored_files
from exo_mesh.rings.runner.prefix.disk_index import BUSY_LAPS
from exo_mesh.settings.values import MOST_CACHE_BYTES

if TYPE_CHECKING:
    from tools.bench.prefix import PrefixBench

DEADLINE_S = 600.0
STREAM_PROMPT = 64
FILES = 3
"""Files that each stage writes beside one stream."""

ROOM_TOKENS = 200
"""Tokens of a stream besides the laps that lie between two copies of a prompt out of the engines."""

WINDOW_S = 0.5
"""A gap between two tokens counts as one while stages write if a file was completed at most so long after it. The gaps
in as many seconds before that are those that it is compared with: the load of the machine is the same."""


async def measure_disk(bench: PrefixBench, stages: int, args: argparse.Namespace) -> None:
    """Prints how long the first token of a new ring takes, cold and with the prompt on disk, in turns, and then the
    gaps between the tokens of a stream while stages write, beside those of a ring that writes nothing."""
    if not args.gaps:
        await measure_first(bench, stages, args)
    await measure_gaps(bench, stages, args)


async def measure_first(bench: PrefixBench, stages: int, args: argparse.Namespace) -> None:
    """Prints how long the first token of a new ring takes, cold and with the prompt on disk, in turns."""
    colds, warms = [], []
    for _ in range(args.rounds):
        prompt = bench.prompt(args.prompt)
        disks = args.disk / f"{stages}-{next(bench.numbers)}"
        async with bench.ring(stages, MOST_CACHE_BYTES, disks) as runners:
            cold = await bench.ask(runners, prompt, 8)
            written = [await _written(runner, 1) for runner in runners]
        async with bench.ring(stages, MOST_CACHE_BYTES, disks) as runners:
            warm = await bench.ask(runners, prompt, 8)
        colds.append(cold.first_s)
        warms.append(warm.first_s)
        same = "the same" if warm.token_ids == cold.token_ids else "other"
        print(
            f"{sum(written) / 1e6:.1f} MB on disk, {warm.cached} of {len(prompt)} tokens read, {same} tokens",
            flush=True,
        )
        shutil.rmtree(disks)
    cold_s, warm_s = statistics.median(colds), statistics.median(warms)
    print(
        f"{args.engine}, {stages} stages, {args.prompt} tokens: first token of a new ring after {1000 * cold_s:.1f} ms "
        f"cold, {1000 * warm_s:.1f} ms from disk ({100 * warm_s / cold_s:.1f} %)",
        flush=True,
    )


async def measure_gaps(bench: PrefixBench, stages: int, args: argparse.Namespace) -> None:
    """Prints the median and the 99th percentile of the seconds between the tokens of streams, while stages write and
    without disks. Before each stream, its ring computes as many prompts as it writes beside it."""
    disks, num_files = args.disk / f"{stages}-gaps", 0
    tokens = ROOM_TOKENS + FILES * BUSY_LAPS * stages
    gaps = Gaps()
    async with bench.ring(stages, MOST_CACHE_BYTES, disks) as writes, bench.ring(stages, MOST_CACHE_BYTES) as rests:
        for ring in (writes, rests):
            await bench.ask(ring, bench.prompt(STREAM_PROMPT), STREAM_PROMPT)  # paces are learnt
        for index in range(args.rounds):
            taken: dict[int, list[float]] = {}
            for ring in (writes, rests) if index % 2 else (rests, writes):
                for _ in range(FILES):
                    await bench.ask(ring, bench.prompt(args.prompt), 2)
                taken[id(ring)] = (await bench.ask(ring, bench.prompt(STREAM_PROMPT), tokens)).times
                if ring is writes:
                    ends = [one.path.stat().st_ctime for one in stored_files(disks)]
                    await _write_rest(writes, (index + 1) * (FILES + 1))
            times = taken[id(writes)]
            num_files += sum(times[0] <= end <= times[-1] for end in ends)
            gaps.add(times, taken[id(rests)], ends)
    shutil.rmtree(disks)
    print(
        f"{args.engine}, {stages} stages, prompts of {args.prompt} tokens: {num_files} files were completed beside "
        f"{args.rounds} streams of {tokens} tokens\n{gaps.describe()}",
        flush=True,
    )


@dataclass(slots=True)
class Gaps:
    """Seconds between the tokens of pairs of streams: one on a ring with disks, and one without."""

    all: list[tuple[float, float]] = field(default_factory=list)
    """The gaps between the same two tokens of both."""
    writing: list[tuple[float, float]] = field(default_factory=list)
    """Those that are at most WINDOW_S before the end of a write on the ring with disks."""
    before: list[float] = field(default_factory=list)
    """Those of the ring with disks in the WINDOW_S before each of these."""

    def add(self, times: Sequence[float], without: Sequence[float], ends: Sequence[float]) -> None:
        """Add a pair of streams. times and without: Unix times of the tokens with and without disks, ends: of the
        completion of files."""
        pairs = [
            (late - soon, other - before)
            for (soon, late), (before, other) in zip(pairwise(times), pairwise(without), strict=True)
        ]
        self.all += pairs
        for (soon, late), pair in zip(pairwise(times), pairs, strict=True):
            if any(soon <= end and late >= end - WINDOW_S for end in ends):
                self.writing.append(pair)
            elif any(end - 2 * WINDOW_S <= late <= end - WINDOW_S for end in ends):
                self.before.append(pair[0])

    def describe(self) -> str:
        """The percentiles of all gaps and of those while stages write, with and without disks, and then those while
        stages write beside those before."""
        lines = []
        for name, pairs in (("all gaps", self.all), ("while writing", self.writing)):
            (half, most), (half_without, most_without) = (
                _percentiles([pair[place] for pair in pairs]) for place in (0, 1)
            )
            lines.append(
                f"{name:>13}: {len(pairs)}, p50 {1000 * half:.2f} ms, without disks {1000 * half_without:.2f} ms "
                f"({half / (half_without or 1e-6):.3f}); p99 {1000 * most:.2f} ms, without disks "
                f"{1000 * most_without:.2f} ms ({most / (most_without or 1e-6):.3f})"
            )
        half, most = _percentiles([pair[0] for pair in self.writing])
        half_before, most_before = _percentiles(self.before)
        lines.append(
            f"just before it: {len(self.before)}, p50 {1000 * half_before:.2f} ms, p99 {1000 * most_before:.2f} ms; "
            f"while writing p50 {half / (half_before or 1e-6):.3f} x, p99 {most / (most_before or 1e-6):.3f} x"
        )
        return "\n".join(lines)


def _percentiles(gaps: Sequence[float]) -> tuple[float, float]:
    """The 50th and the 99th percentile; of fewer than two gaps 0."""
    if len(gaps) < 2:
        return 0.0, 0.0
    cuts = statistics.quantiles(gaps, n=100, method="inclusive")
    return cuts[49], cuts[98]


async def _write_rest(runners: Sequence[LocalRunner], files: int) -> None:
    """Waits until every stage of an idle ring has written so many files since it was started. Raises TimeoutError."""
    async with asyncio.timeout(DEADLINE_S):
        for runner in runners:
            while (await runner.fresh_beat()).prefix.disk_writes < files:
                pass


async def _written(runner: LocalRunner, files: int) -> int:
    """Waits until a stage has written so many files; returns their bytes. Raises TimeoutError."""
    async with asyncio.timeout(DEADLINE_S):
        while (beat := await runner.fresh_beat()).prefix.disk_files < files:
            pass
        return int(beat.prefix.disk_bytes)
