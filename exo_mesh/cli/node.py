"""Stop or restart a node of the mesh, this one or another; its streams may finish first (--stop-grace of that node)."""

from __future__ import annotations

import argparse
import urllib.parse

from exo_mesh.cli import exit_codes
from exo_mesh.cli.parser import add_api_flags
from exo_mesh.client.api_client import ApiClient


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """`stop` or `restart`, `--peer`, `--api-url`."""
    parser.add_argument("action", choices=("stop", "restart"), help="restart: in the same process, with the same flags")
    parser.add_argument("--peer", metavar="NAME", help="name or id of the node; the one that is asked by default")
    add_api_flags(parser, json=False)


def run(args: argparse.Namespace) -> int:
    """POST /admin/stop or /admin/restart; returns as soon as the node knows."""
    client = ApiClient(args.api_url, args.home)
    query = f"?node_id={urllib.parse.quote(args.peer, safe='')}" if args.peer else ""
    told = client.post(f"/admin/{args.action}{query}", {})
    print(f"{told['status']} {args.peer or told['node_id'][:8]}")
    return exit_codes.OK
