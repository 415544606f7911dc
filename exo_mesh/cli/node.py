"""Stop or restart a node of the mesh, this one or another; its streams may finish first (--stop-grace of that node).

`sleep` tells the peers that this machine goes to sleep, so that they show it as asleep; `awake` that it is back, which
the node also finds out by itself. A service of systemd calls them; see docs/services.md.
"""

from __future__ import annotations

import argparse
import urllib.parse

from exo_mesh.cli import exit_codes
from exo_mesh.cli.parser import add_api_flags
from exo_mesh.client.api_client import ApiClient
from exo_mesh.settings.config import ConfigError

_SLEEP = ("sleep", "awake")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """`stop`, `restart`, `sleep` or `awake`, `--peer`, `--api-url`."""
    parser.add_argument("action", choices=("stop", "restart", *_SLEEP), help="restart: in the same process")
    parser.add_argument("--peer", metavar="NAME", help="name or id of the node; the one that is asked by default")
    add_api_flags(parser, json=False)


def run(args: argparse.Namespace) -> int:
    """POST /admin/stop or /admin/restart; returns as soon as the node knows."""
    client = ApiClient(args.api_url, args.home)
    if args.action in _SLEEP:
        if args.peer:
            raise ConfigError(f"node {args.action} is about the machine of this node: leave out --peer")
        told = client.post(f"/admin/{args.action}", {})
        print("awake" if args.action == "awake" else f"told {told['told']} peers that this machine goes to sleep")
        return exit_codes.OK
    query = f"?node_id={urllib.parse.quote(args.peer, safe='')}" if args.peer else ""
    told = client.post(f"/admin/{args.action}{query}", {})
    print(f"{told['status']} {args.peer or told['node_id'][:8]}")
    return exit_codes.OK
