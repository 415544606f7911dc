"""Show the peers, their memory and links, and which peer holds which layers of each loaded model."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.live import Live

from exo_mesh.cli import exit_codes
from exo_mesh.cli.client.api_client import ApiClient
from exo_mesh.cli.parser import add_api_flags
from exo_mesh.cli.tables import people_console, print_json, say
from exo_mesh.cli.topology_picture import picture, tokens_by_instance
from exo_mesh.errors import InputError

WATCH_EVERY_S = 1.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds `--watch`, `--api-url`, `--json`."""
    parser.add_argument("--watch", action="store_true", help="redraw every second, until Ctrl-C")
    add_api_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Prints `GET /v1/topology` with --json; else draws `GET /state`."""
    client = ApiClient(args.api_url, args.home)
    if args.json and args.watch:
        raise InputError("--watch and --json exclude each other: call --json again for a new state", param="watch")
    if args.json:
        print_json(client.get("/v1/topology"))
        return exit_codes.OK
    console = people_console()
    if args.watch:
        watch(lambda: client.get("/state"), console, time.monotonic, time.sleep)
        return exit_codes.OK
    console.print(picture(client.get("/state"), now=time.time()))
    if refused := client.get("/v1/topology")["refused"]:
        say("refused:\n" + "\n".join(f"  {reason}" for reason in refused))
    return exit_codes.OK


def watch(
    read: Callable[[], dict[str, Any]],
    console: Console,
    clock: Callable[[], float],
    sleep: Callable[[float], None],
) -> None:
    """Draws what `read` returns every second, until `read` raises or Ctrl-C; speeds are since the last picture."""
    before, at = read(), clock()
    with Live(picture(before), console=console, auto_refresh=False) as live:
        try:
            while True:
                sleep(WATCH_EVERY_S)
                state, now = read(), clock()
                live.update(picture(state, speeds(before, state, now - at)), refresh=True)
                before, at = state, now
        except KeyboardInterrupt:
            return


def speeds(before: dict[str, Any], state: dict[str, Any], elapsed_s: float) -> dict[str, float]:
    """Tokens per second by instance between two states; a counter that fell (a new driver) counts as 0."""
    earlier = tokens_by_instance(before)
    return {
        instance_id: max(0, count - earlier.get(instance_id, count)) / elapsed_s
        for instance_id, count in tokens_by_instance(state).items()
        if elapsed_s > 0
    }
