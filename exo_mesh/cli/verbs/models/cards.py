"""The verbs `models add`, which makes a card of a hub repository for all peers, and `models delete`."""

from __future__ import annotations

import argparse
from typing import Any

from exo_mesh.cli import exit_codes
from exo_mesh.cli.client.api_client import ApiClient
from exo_mesh.cli.parser import add_api_flags
from exo_mesh.cli.tables import print_json
from exo_mesh.cli.verbs.models import facts

_DEADLINE_S = 120.0


def add_parsers(subparsers: Any) -> None:
    """Adds REPO or NAME, `--api-url`, `--json`."""
    text = "make a model card of a hub repository for all peers; downloads no weights"
    part = subparsers.add_parser("add", help=text, description=text)
    part.add_argument("repo", metavar="REPO", help="hub id, or ID@REVISION")
    add_api_flags(part)
    part.set_defaults(verb=add)
    text = "delete a card that `models add` made; model files stay"
    part = subparsers.add_parser("delete", help=text, description=text)
    part.add_argument("model", metavar="NAME", help="name of the card")
    add_api_flags(part)
    part.set_defaults(verb=delete)


def add(args: argparse.Namespace) -> int:
    """Calls `POST /models/add` and prints the model."""
    model = ApiClient(args.api_url, args.home).post("/models/add", {"repo": args.repo}, _DEADLINE_S)
    size = facts.size_text(model["num_bytes"])
    print_json(model) if args.json else print(f"added {args.repo}: {size}, context {facts.context_text(model)} tokens")
    return exit_codes.OK


def delete(args: argparse.Namespace) -> int:
    """Calls `DELETE /models/custom/…`."""
    client = ApiClient(args.api_url, args.home)
    answer = client.delete(f"/models/custom/{facts.model_path(args.model)}", _DEADLINE_S)
    print_json(answer) if args.json else print(f"deleted the card of {args.model}")
    return exit_codes.OK
