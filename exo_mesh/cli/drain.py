"""Let a node finish its requests and accept no new ones, so that stopping it disturbs no client.

New requests to the node get a 503, /readyz reports not ready (nginx then uses other peers), and new placements leave
the node out. Its stages keep serving requests of other peers; a request that still runs when the node stops continues
on other peers.
"""

from __future__ import annotations

import argparse
import time

from exo_mesh.cli import exit_codes
from exo_mesh.cli.parser import add_api_flags
from exo_mesh.client.api_client import ApiClient
from exo_mesh.printable import counted

_POLL_S = 0.2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds `--wait`, `--undo`, `--api-url`."""
    parser.add_argument("--wait", type=float, default=300.0, metavar="SECONDS", help="how long to wait (300)")
    parser.add_argument("--undo", action="store_true", help="accept requests again")
    add_api_flags(parser, json=False)


def run(args: argparse.Namespace) -> int:
    """Calls `POST /drain` and waits until nothing runs; exit code 1 if something still runs after --wait."""
    client = ApiClient(args.api_url, args.home)
    if args.undo:
        client.delete("/drain")
        print("the node accepts requests again")
        return exit_codes.OK
    state = client.post("/drain", {})
    end = time.monotonic() + args.wait
    while not state["drained"] and time.monotonic() < end:
        time.sleep(_POLL_S)
        state = client.get("/drain")
    if state["drained"]:
        print("drained: the node can be stopped")
        return exit_codes.OK
    left = f"{counted(state['requests'], 'request')} and {counted(state['sequences'], 'sequence')}"
    print(f"not drained: {left} of its stages still run")
    return exit_codes.FAILED
