"""Delete the files of a model from all peers, or from the peers that `--peers` names.

Unload a loaded model first: `exo-mesh stop MODEL`. Files in the Hugging Face cache and the demo model are not deleted.
"""

from __future__ import annotations

import argparse
import urllib.parse

from exo_mesh.base.telemetry.tables import human_bytes
from exo_mesh.cli import exit_codes
from exo_mesh.cli.client.api_client import ApiClient
from exo_mesh.cli.parser import add_api_flags, model_argument
from exo_mesh.cli.tables import peer_names, print_json
from exo_mesh.cli.verbs.models import facts

_DEADLINE_S = 60.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds MODEL, `--peers`, `--api-url`, `--json`."""
    parser.add_argument("model", metavar="MODEL", type=model_argument, help="a name that exo-mesh list shows")
    parser.add_argument("--peers", metavar="PEERS", help="names or ids of peers, separated by commas (all)")
    add_api_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Calls `DELETE /v1/models/…` and prints how many bytes were freed."""
    client = ApiClient(args.api_url, args.home)
    names = peer_names(client.get("/state"))
    query = f"?{urllib.parse.urlencode({'peers': args.peers})}" if args.peers else ""
    answer = client.delete(f"/v1/models/{facts.model_path(args.model)}{query}", _DEADLINE_S)
    if args.json:
        print_json(answer)
        return exit_codes.OK
    where = ", ".join(names.get(peer, peer[:8]) for peer in answer["peers"])
    print(f"deleted {args.model} from {where}; {human_bytes(answer['freed_bytes'])} freed")
    return exit_codes.OK
