"""Stop or restart a node, change its log level while it runs, or manage the processes on this machine.

stop, restart   of this node, or of another one with --peer; streams may finish first (--stop-grace of that node)
log-level       show the log level, or change it until the node restarts; `log-level default` ends the change.
                For the whole mesh: `exo-mesh config mesh log_level=debug`
processes       list the nodes, runners and helpers that run on this machine, also those that no longer respond
kill-all        end them: SIGTERM, then SIGKILL after --grace. Like `processes`, it needs no running node
sleep, awake    report to the peers that this machine goes to sleep, or is back (which the node also notices by itself).
                A systemd service runs them; see docs/tasks/services.md
"""

from __future__ import annotations

import argparse
import os
import urllib.parse
from pathlib import Path

from exo_mesh.base.printable import counted
from exo_mesh.cli import exit_codes
from exo_mesh.cli.client.api_client import ApiClient
from exo_mesh.cli.doctor.sweep import sweep
from exo_mesh.cli.parser import add_api_flags, seconds
from exo_mesh.cli.tables import print_json, say
from exo_mesh.settings.config import ConfigError, home_of

SLEEP = ("sleep", "awake")
LEVELS = ("debug", "info", "warning", "error")
DEFAULT = "default"
_ON_MACHINE = ("processes", "kill-all")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the action and its flags."""
    actions = ("stop", "restart", "log-level", *SLEEP, *_ON_MACHINE)
    parser.add_argument("action", choices=actions, help="restart keeps the process id and the flags")
    parser.add_argument(
        "level", nargs="?", choices=(*LEVELS, DEFAULT), help="for log-level: the lowest level that is logged"
    )
    parser.add_argument("--peer", metavar="NAME", help="name or id of the node; by default the node called")
    parser.add_argument(
        "--grace", type=seconds, default=10.0, metavar="SECONDS", help="kill-all: time before SIGKILL (10)"
    )
    parser.add_argument("--dry-run", action="store_true", help="kill-all: list what would be ended, end nothing")
    add_api_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Runs the action: calls the node's API (/admin/…, /v1/logging), or looks at the processes of this machine.

    A stop or restart returns as soon as the node has accepted it.
    """
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
    answer = client.post(f"/admin/{args.action}{query}", {})
    print_json(answer) if args.json else print(f"{answer['status']} {args.peer or answer['node_id'][:8]}")
    return exit_codes.OK


def _on_machine(args: argparse.Namespace) -> int:
    grace_s = args.grace if args.action == "kill-all" and not args.dry_run else None
    swept = sweep(home_of(os.environ), Path(args.home) if args.home else None, grace_s)
    print_json(swept.values) if args.json else print(swept.text)
    return exit_codes.FAILED if swept.left else exit_codes.OK


def _sleep(client: ApiClient, args: argparse.Namespace) -> int:
    """Reports sleep or awake to the peers, for the machine of the node called. Raises ConfigError with --peer."""
    if args.peer:
        raise ConfigError(f"node {args.action} applies to the machine of the node called: leave out --peer")
    answer = client.post(f"/admin/{args.action}", {})
    peers = counted(answer["told"], "peer")
    text = "awake" if args.action == "awake" else f"notified {peers} that this machine goes to sleep"
    print_json(answer) if args.json else say(text)
    return exit_codes.OK


def _log_level(client: ApiClient, args: argparse.Namespace) -> int:
    """Shows or changes the log level of the node called. Raises MeshErrors."""
    if args.peer:
        raise ConfigError("log-level applies to the node called: name another node with --api-url, not with --peer")
    if args.level:
        found = client.put("/v1/logging", {"level": None if args.level == DEFAULT else args.level})
    else:
        found = client.get("/v1/logging")
    until = " until it restarts" if found["own_level"] else ""
    print_json(found) if args.json else print(f"{found['level']}{until}")
    return exit_codes.OK
