"""Measure this machine: `bench ring` times frames over real runner processes against plain TCP, `bench engines` the
engines on one checkpoint."""

from __future__ import annotations

import argparse

import exo_mesh.cli.bench_engines as bench_engines
import exo_mesh.cli.bench_ring as bench_ring


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """One subparser per benchmark."""
    subparsers = parser.add_subparsers(dest="bench", metavar="WHAT", required=True)
    bench_ring.add_parser(subparsers)
    bench_engines.add_parser(subparsers)


def run(args: argparse.Namespace) -> int:
    """Run the benchmark that was chosen."""
    code: int = args.run(args)
    return code
