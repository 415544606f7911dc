"""Stop or restart a node of the mesh, this one or another, or change the log level of one while it runs.

Streams may finish before a stop or restart (--stop-grace of that node). `log-level debug` lasts until a restart of the
node; `log-level default` ends it, `log-level` shows it. `exo-mesh config mesh log_level=debug` is for the whole mesh.
"""

from __future__ import annotations

import argparse
import urllib.parse

from exo_mesh.cli import exit_codes
from exo_mesh.cli.parser import add_api_flags
from exo_mesh.client.api_client import ApiClient
from exo_mesh.settings.config import ConfigError

LEVELS = ("debug", "info", "warning", "error")
DEFAULT = "default"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """`stop`, `restart` or `log-level`, `--peer`, `--api-url`."""
    actions = ("stop", "restart", "log-level")
    parser.add_argument("action", choices=actions, help="restart: in the same process, with the same flags")
    parser.add_argument("level", nargs="?", choices=(*LEVELS, DEFAULT), help="for log-level: which lines are written")
    parser.add_argument("--peer", metavar="NAME", help="name or id of the node; the one that is asked by default")
    add_api_flags(parser, json=False)


def run(args: argparse.Namespace) -> int:
    """POST /admin/stop or /admin/restart, which return as soon as the node knows; or GET or PUT /v1/logging."""
    client = ApiClient(args.api_url, args.home)
    if args.action == "log-level":
        return _log_level(client, args)
    if args.level:
        raise ConfigError(f"{args.action} takes no log level")
    query = f"?node_id={urllib.parse.quote(args.peer, safe='')}" if args.peer else ""
    told = client.post(f"/admin/{args.action}{query}", {})
    print(f"{told['status']} {args.peer or told['node_id'][:8]}")
    return exit_codes.OK


def _log_level(client: ApiClient, args: argparse.Namespace) -> int:
    """Of the node that is asked. Raises MeshErrors."""
    if args.peer:
        raise ConfigError("log-level is for the node that is asked: name another one with --api-url")
    if args.level:
        found = client.put("/v1/logging", {"level": None if args.level == DEFAULT else args.level})
    else:
        found = client.get("/v1/logging")
    print(f"{found['level']}{' until it restarts' if found['own_level'] else ''}")
    return exit_codes.OK
