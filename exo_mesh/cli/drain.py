"""Let a node finish what it has and take nothing new, so that it can be stopped without anybody noticing.

New requests there get a 503, /readyz says no (nginx then asks other peers), and no plan counts on its memory. Its
stages go on for the requests of other peers; those that still run when the node stops go on elsewhere.
"""

from __future__ import annotations

import argparse
import time

from exo_mesh.cli import exit_codes
from exo_mesh.cli.parser import add_api_flags
from exo_mesh.client.api_client import ApiClient

_POLL_S = 0.2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """`--wait`, `--undo`, `--api-url`."""
    parser.add_argument("--wait", type=float, default=300.0, metavar="SECONDS", help="how long to wait for it (300)")
    parser.add_argument("--undo", action="store_true", help="take requests again")
    add_api_flags(parser, json=False)


def run(args: argparse.Namespace) -> int:
    """POST /drain, then wait until nothing is left; exit code 1 if something still runs after --wait."""
    client = ApiClient(args.api_url, args.home)
    if args.undo:
        client.delete("/drain")
        print("takes requests again")
        return exit_codes.OK
    state = client.post("/drain", {})
    end = time.monotonic() + args.wait
    while not state["drained"] and time.monotonic() < end:
        time.sleep(_POLL_S)
        state = client.get("/drain")
    if state["drained"]:
        print("drained: the node can be stopped")
        return exit_codes.OK
    print(f"{state['requests']} requests that entered here and {state['sequences']} sequences of its stages still run")
    return exit_codes.FAILED
