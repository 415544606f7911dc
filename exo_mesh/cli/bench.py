"""Measure this machine: `bench ring` times frames against plain TCP, `bench engines` the engines on one checkpoint,
`bench serve` asks a whole mesh many things at once, `bench group` tries a tensor group on this machine."""

from __future__ import annotations

import argparse
from collections.abc import Callable

import exo_mesh.cli.bench_engines as bench_engines
import exo_mesh.cli.bench_group as bench_group
import exo_mesh.cli.bench_ring as bench_ring
import exo_mesh.cli.bench_serve as bench_serve


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """One subparser per benchmark."""
    subparsers = parser.add_subparsers(dest="bench", metavar="WHAT", required=True)
    bench_ring.add_parser(subparsers)
    bench_serve.add_parser(subparsers)
    bench_engines.add_parser(subparsers)
    bench_group.add_parser(subparsers)


def run(args: argparse.Namespace) -> int:
    """Run the benchmark that was chosen."""
    verb: Callable[[argparse.Namespace], int] = args.run
    return verb(args)
