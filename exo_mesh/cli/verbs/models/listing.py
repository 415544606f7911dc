"""List the models on the disks of live peers, and unusable models of the called node with the reason."""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

from exo_mesh.cli import exit_codes
from exo_mesh.cli.client.api_client import ApiClient
from exo_mesh.cli.parser import add_api_flags
from exo_mesh.cli.tables import peer_names, people_console, print_json, print_table, state_text
from exo_mesh.cli.verbs.models import facts

HEADER = ("MODEL", "SIZE", "QUANT", "CONTEXT", "PEERS", "LAYERS", "LAST USED", "FITS")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds `--all`, `--api-url`, `--json`."""
    parser.add_argument("--all", action="store_true", help="also list models that have a card but that no peer has")
    add_api_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Prints the table from `/v1/models`, `/state`, `/v1/download/progress` and `/store/storage`."""
    client = ApiClient(args.api_url, args.home)
    listed = client.get("/v1/models")
    models = listed["data"]
    models += client.get("/v1/models?status=known")["data"] if args.all else []
    unusable = client.get("/v1/models?status=unusable")["data"]
    state = client.get("/state")
    downloads = client.get("/v1/download/progress")["data"]
    stored = {entry["name"]: entry for entry in client.get("/store/storage")["models"]}
    loaded = {instance["model"] for instance in state["view"]["instances"]}
    for model in models:
        model["used_at"] = stored.get(model["id"], {}).get("used_at")
        loads = (
            facts.memory_bytes(model["num_bytes"], model),
            facts.memory_bytes(model.get("estimated_bytes", 0), model),
        )
        about = loads[0], state, loads[1], model["id"]
        fits = "served" if facts.is_served(model) else facts.fit_text(*about)
        model["fits"] = "loaded" if model["id"] in loaded else fits
    if args.json:
        print_json([*models, *unusable])
        return exit_codes.OK
    rows = [_row(model, state, downloads) for model in models]
    rows += [[model["id"], *["-"] * 6, state_text(f"unusable: {model['reason']}")] for model in unusable]
    print_table(people_console(), HEADER, rows)
    if listed.get("is_reading"):
        print("the node is still reading the models on its disk; more may follow", file=sys.stderr)
    return exit_codes.OK


def _row(model: dict[str, Any], state: dict[str, Any], downloads: list[dict[str, Any]]) -> list[object]:
    names, is_served = peer_names(state), facts.is_served(model)
    return [
        model["id"],
        "-" if is_served else facts.size_text(model["num_bytes"], model.get("estimated_bytes", 0)),
        facts.quantisation(model),
        facts.context_text(model),
        facts.holders(model, names),
        "-" if is_served else facts.held_layers(model, state, downloads),
        facts.ago(model["used_at"], time.time()),
        state_text(model["fits"]),
    ]
