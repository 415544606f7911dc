"""Stop or restart a node of the mesh, this one or another, or change the log level of one while it runs.

Streams may finish before a stop or restart (--stop-grace of that node). `log-level debug` lasts until a restart of the
node; `log-level default` ends it, `log-level` shows it. `exo-mesh config mesh log_level=debug` is for the whole mesh.
`processes` lists the nodes, runners and helpers that run on this machine, also those that answer nobody any more;
`kill-all` ends them: SIGTERM, and SIGKILL for what is left after --grace. Both need no node that answers.

`sleep` tells the peers that this machine goes to sleep, so that they show it as asleep; `awake` that it is back, which
the node also finds out by itself. A service of systemd calls them; see docs/tasks/services.md.
"""

from __future__ import annotations

import argparse
import os
import urllib.parse
from pathlib import Path

from exo_mesh.cli import exit_codes
from exo_mesh.cli.parser import add_api_flags
from exo_mesh.cli.tables import print_json
from exo_mesh.client.api_client import ApiClient
from exo_mesh.doctor.sweep import sweep
from exo_mesh.settings.config import ConfigError, home_of

SLEEP = ("sleep", "awake")
LEVELS = ("debug", "info", "warning", "error")
DEFAULT = "default"
_ON_MACHINE = ("processes", "kill-all")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The action and its flags."""
    actions = ("stop", "restart", "log-level", *SLEEP, *_ON_MACHINE)
    parser.add_argument("action", choices=actions, help="restart: in the same process, with the same flags")
    parser.add_argument("level", nargs="?", choices=(*LEVELS, DEFAULT), help="for log-level: which lines are written")
    parser.add_argument("--peer", metavar="NAME", help="name or id of the node; the one that is asked by default")
    parser.add_argument("--grace", type=float, default=10.0, metavar="SECONDS", help="kill-all: before SIGKILL (10)")
    parser.add_argument("--dry-run", action="store_true", help="kill-all: say what would be ended, and end nothing")
    add_api_flags(parser)


def run(args: argparse.Namespace) -> int:
    """POST /admin/stop or /admin/restart, which return as soon as the node knows; GET or PUT /v1/logging; or look at
    the processes here."""
    if args.level and args.action != "log-level":
        raise ConfigError(f"{args.action} takes no log level")
    if args.action in _ON_MACHINE:
        return _on_machine(args)
    client = ApiClient(args.api_url, args.home)
    if args.action == "log-level":
        return _log_level(client, args)
    if args.action in SLEEP:
        return _sleep(client, args)
    query = f"?node_id={urllib.parse.quote(args.peer, safe='')}" if args.peer else ""
    told = client.post(f"/admin/{args.action}{query}", {})
    print_json(told) if args.json else print(f"{told['status']} {args.peer or told['node_id'][:8]}")
    return exit_codes.OK


def _on_machine(args: argparse.Namespace) -> int:
    grace_s = args.grace if args.action == "kill-all" and not args.dry_run else None
    swept = sweep(home_of(os.environ), Path(args.home) if args.home else None, grace_s)
    print_json(swept.values) if args.json else print(swept.text)
    return exit_codes.FAILED if swept.left else exit_codes.OK


def _sleep(client: ApiClient, args: argparse.Namespace) -> int:
    """Of the machine of the node that is asked."""
    if args.peer:
        raise ConfigError(f"node {args.action} is about the machine of this node: leave out --peer")
    told = client.post(f"/admin/{args.action}", {})
    text = "awake" if args.action == "awake" else f"told {told['told']} peers that this machine goes to sleep"
    print_json(told) if args.json else print(text)
    return exit_codes.OK


def _log_level(client: ApiClient, args: argparse.Namespace) -> int:
    """Of the node that is asked. Raises MeshErrors."""
    if args.peer:
        raise ConfigError("log-level is for the node that is asked: name another one with --api-url")
    if args.level:
        found = client.put("/v1/logging", {"level": None if args.level == DEFAULT else args.level})
    else:
        found = client.get("/v1/logging")
    until = " until it restarts" if found["own_level"] else ""
    print_json(found) if args.json else print(f"{found['level']}{until}")
    return exit_codes.OK
