"""Measure this machine: `bench ring` times frames over real runner processes against plain TCP."""

from __future__ import annotations

import argparse

import exo_mesh.cli.bench_ring as bench_ring


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """One subparser per benchmark."""
    subparsers = parser.add_subparsers(dest="bench", metavar="WHAT", required=True)
    bench_ring.add_parser(subparsers)


def run(args: argparse.Namespace) -> int:
    """Run the benchmark that was chosen."""
    return bench_ring.run(args)
