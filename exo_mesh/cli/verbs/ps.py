"""List the model instances that are loaded."""

from __future__ import annotations

import argparse

from exo_mesh.cli import exit_codes
from exo_mesh.cli.client.api_client import ApiClient
from exo_mesh.cli.parser import add_api_flags
from exo_mesh.cli.tables import peer_names, people_console, print_json, print_table, ring_line, state_text


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds `--api-url`, `--json`."""
    add_api_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Prints the instances in `GET /state`."""
    state = ApiClient(args.api_url, args.home).get("/state")
    instances = state["view"]["instances"]
    if args.json:
        print_json(instances)
        return exit_codes.OK
    names = peer_names(state)
    rows = [[item["id"], item["model"], state_text(item["state"]), ring_line(item, names)] for item in instances]
    print_table(people_console(), ("INSTANCE", "MODEL", "STATE", "PEERS AND LAYERS"), rows)
    return exit_codes.OK
