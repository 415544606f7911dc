"""Search the hub for models, and show whether each fits this mesh."""

from __future__ import annotations

import argparse
import urllib.parse

from exo_mesh.cli import exit_codes
from exo_mesh.cli.client.api_client import ApiClient
from exo_mesh.cli.parser import add_api_flags
from exo_mesh.cli.tables import print_json, say_table
from exo_mesh.cli.verbs.models import facts

_DEADLINE_S = 60.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds QUERY, `--limit`, `--api-url`, `--json`."""
    parser.add_argument("query", metavar="QUERY", help="words of the name")
    parser.add_argument("--limit", type=int, default=20, metavar="N", help="most models to list (20; up to 100)")
    add_api_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Prints the result of `/models/search`."""
    client = ApiClient(args.api_url, args.home)
    query = urllib.parse.urlencode({"query": args.query, "limit": args.limit})
    found = client.get(f"/models/search?{query}", _DEADLINE_S)["data"]
    if args.json:
        print_json(found)
        return exit_codes.OK
    state = client.get("/state")
    rows = [
        [
            model["id"],
            facts.size_text(model["num_bytes"]),
            model["downloads"],
            model["likes"],
            "gated" if model["is_gated"] else "open",
            facts.fit_text(model["num_bytes"], state, name=model["id"]),
        ]
        for model in found
    ]
    say_table(("MODEL", "SIZE", "DOWNLOADS", "LIKES", "ACCESS", "FITS"), rows)
    return exit_codes.OK
