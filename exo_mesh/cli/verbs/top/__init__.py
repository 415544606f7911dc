"""Show the peers, models, requests and memory of the mesh, live in the terminal.

Keys: q quits, p pauses, Tab chooses a table, the arrows scroll it and choose the column to sort by, r reverses.
If the node called dies, another member is used. Without a terminal, one snapshot is printed.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from typing import Any

from exo_mesh.base.printable import ANSWER_CHARS, printable_values
from exo_mesh.cli import exit_codes
from exo_mesh.cli.client.api_client import ApiClient
from exo_mesh.cli.client.mesh_nodes import MeshNodes
from exo_mesh.cli.parser import add_api_flags
from exo_mesh.cli.tables import print_json

TICK_S = 0.5
"""Interval at which the clock and the size of the terminal are read."""
_WIDTH_OF_A_FILE = 140


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds `--once`, `--api-url`, `--home`, `--json`."""
    parser.add_argument("--once", action="store_true", help="print one snapshot and exit, as without a terminal")
    add_api_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Prints a snapshot, or draws `/metrics/stream` of the node, or of other members if it dies."""
    members = MeshNodes(ApiClient(args.api_url, args.home))
    if args.json:
        print_json(_snapshot(members.client))
    elif args.once or not _is_screen():
        _print_once(members.client)
    else:
        _watch(members)
    return exit_codes.OK


def _is_screen() -> bool:
    return sys.stdin.isatty() and sys.stdout.isatty() and os.environ.get("TERM", "dumb") not in ("dumb", "unknown")


def _snapshot(client: ApiClient) -> Any:
    from exo_mesh.cli.verbs.top.feed import read_snapshot

    return printable_values(read_snapshot(client), ANSWER_CHARS)


def _print_once(client: ApiClient) -> None:
    from rich.console import Console

    from exo_mesh.cli.verbs.top.feed import read_requests
    from exo_mesh.cli.verbs.top.live_data import LiveData
    from exo_mesh.cli.verbs.top.screen import Look, drawn

    data = LiveData(source="snapshot")
    data.take(_snapshot(client))
    data.requests = read_requests(client)
    console = Console(highlight=False, soft_wrap=True)
    width = console.width if console.is_terminal or "COLUMNS" in os.environ else _WIDTH_OF_A_FILE
    for line in drawn(data, Look(), width, None, _clock()):
        line.rstrip()
        console.print(line)


def _watch(members: MeshNodes) -> None:
    """Draws until q or Ctrl-C."""
    from rich.console import Console, Group
    from rich.live import Live

    from exo_mesh.cli.verbs.top.feed import LiveDataFeed
    from exo_mesh.cli.verbs.top.keys import raw_keys, wait_for_keys
    from exo_mesh.cli.verbs.top.screen import Look, drawn
    from exo_mesh.cli.verbs.top.sections import sections

    feed, look, console = LiveDataFeed(members), Look(), Console(highlight=False)
    feed.take(
        members.client, _snapshot(members.client), "connecting"
    )  # an error if no node answers now; later ones lead to another member
    before = signal.signal(signal.SIGTERM, _interrupt)
    shown = feed.data.copy()
    feed.start()
    try:
        with raw_keys(), Live(console=console, screen=True, auto_refresh=False) as live:
            while True:
                lines = drawn(shown, look, console.width, console.height, _clock())
                live.update(Group(*lines), refresh=True)
                for key in wait_for_keys(feed.wake, TICK_S):
                    if key in ("q", "Q", "\x04"):
                        return
                    look.press(key, sections(shown, console.width))
                shown = shown if look.is_paused else feed.data.copy()
    except (KeyboardInterrupt, EOFError):
        return
    finally:
        feed.stop()
        signal.signal(signal.SIGTERM, before)


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt


def _clock() -> str:
    return time.strftime("%H:%M:%S")
