"""Measure this machine. `bench ring` times frames against plain TCP, `bench engines` compares engines on one
checkpoint, `bench serve` loads a whole mesh with many requests at once, `bench fairness` shows how requests share a
ring, and `bench compare` compares what they recorded."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

from exo_mesh.base.printable import printable
from exo_mesh.cli import exit_codes
from exo_mesh.cli.bench.result import BenchResult
from exo_mesh.cli.tables import print_json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds a subparser for each benchmark."""
    from exo_mesh.cli.bench import (
        compare,
        engines,
        fairness,
        ring,
        serve,
    )  # imports gRPC and NumPy, which other verbs do not need

    subparsers = parser.add_subparsers(dest="bench", metavar="WHAT", required=True)
    ring.add_parser(subparsers)
    serve.add_parser(subparsers)
    engines.add_parser(subparsers)
    fairness.add_parser(subparsers)
    compare.add_parser(subparsers)


def run(args: argparse.Namespace) -> int:
    """Runs the chosen benchmark and prints its result. Fails if the result misses a bar of the user."""
    measure: Callable[[argparse.Namespace], BenchResult] = args.run
    result = measure(args)
    print_result(result, as_json=args.json)
    for miss in result.misses:
        print(f"exo-mesh: {printable(miss)}", file=sys.stderr)
    return exit_codes.FAILED if result.misses else exit_codes.OK


def print_result(result: BenchResult, *, as_json: bool) -> None:
    """Prints the result of a benchmark as JSON or as text."""
    if as_json:
        print_json(result.values)
    else:
        print(result.text)
