"""Wake the sleeping machine of a peer: nodes in its network send Wake-on-LAN packets to it.

The peer must have been in the mesh before, and Wake-on-LAN must be enabled in its firmware and system.
"""

from __future__ import annotations

import argparse
import time
import urllib.parse

from exo_mesh.cli import exit_codes
from exo_mesh.cli.client.api_client import ApiClient
from exo_mesh.cli.parser import add_api_flags, seconds
from exo_mesh.cli.tables import say

_POLL_S = 0.5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds PEER, `--wait`, `--api-url`."""
    parser.add_argument("peer", metavar="PEER", help="name or id of the peer")
    text = "how long to wait until the peer is in the mesh again (60); 0 = do not wait"
    parser.add_argument("--wait", type=seconds, default=60.0, metavar="SECONDS", help=text)
    add_api_flags(parser, json=False)


def run(args: argparse.Namespace) -> int:
    """Calls `POST /admin/wake` and waits for the peer; exit code 1 if it does not join in time."""
    client = ApiClient(args.api_url, args.home)
    found = client.post(f"/admin/wake?node_id={urllib.parse.quote(args.peer, safe='')}", {})
    if found["status"] == "here":
        print(f"{found['name']} is awake and in the mesh")
        return exit_codes.OK
    say(f"sent Wake-on-LAN packets to {found['name']} from {', '.join(found['senders'])}")
    end = time.monotonic() + args.wait
    while args.wait and time.monotonic() < end:
        time.sleep(_POLL_S)
        if any(peer["id"] == found["node_id"] for peer in client.get("/state")["view"]["peers"]):
            print(f"{found['name']} is in the mesh again")
            return exit_codes.OK
    if args.wait:
        say(
            f"{found['name']} did not join within {args.wait:g} s: "
            "check that Wake-on-LAN is enabled in its firmware and system"
        )
        return exit_codes.FAILED
    return exit_codes.OK
